"""recipes/dpo.py on the built-in preferences, run in this process."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from recipe_scripts import history, load_recipe
from transformers import AutoModelForCausalLM

from ckpt_ft.errors import UserError
from ckpt_ft.planning.plan import plan
from ckpt_ft.training import preferences
from ckpt_ft.training.samples.language import make_preferences

trl = pytest.importorskip("trl")
SMALL = {
    "max_steps": 4, "max_length": 64, "per_device_train_batch_size": 2, "logging_steps": 1, "save_strategy": "no",
    "ac_report": "json", "disable_tqdm": "true",
}  # fmt: skip
LORA = ["--use_peft", "--lora_r", "4", "--lora_dropout", "0", "--lora_target_modules", "all-linear"]


@pytest.fixture(scope="module")
def dpo(sample: tuple[Path, Path]) -> ModuleType:
    return load_recipe("dpo")


def train(dpo: ModuleType, out: Path, *flags: str, **changed: object) -> list[float]:
    """Returns the losses of a run."""
    small = [part for name, value in {**SMALL, **changed}.items() for part in (f"--{name}", str(value))]
    dpo.main(["--use_cpu", *small, "--output_dir", str(out), *flags])
    return history(out)


@pytest.mark.parametrize("flags", [pytest.param([], id="full", marks=pytest.mark.slow), pytest.param(LORA, id="lora")])
def test_policy_keeps_dpo_losses_and_its_peak_is_predicted(dpo: ModuleType, tmp_path: Path, flags: list[str]) -> None:
    plain = train(dpo, tmp_path / "plain", *flags)
    # the model equals its reference, so both answers are equally likely
    assert plain[0] == pytest.approx(math.log(2), abs=1e-6)
    assert plain[3] != plain[0]
    assert train(dpo, tmp_path / "policy", *flags, "--ac_policy", "save:attention+matmul", "--ac_check") == plain
    report = json.loads((tmp_path / "policy" / "memory_report.json").read_text())
    measured = report["ranks"][0]["peaks"]
    predicted = report["ranks"][0]["predicted"]["peaks"]
    for phase in ("forward", "backward", "optimizer"):
        assert predicted[phase] == pytest.approx(measured[phase]["allocated"], rel=0.005)


def test_swapped_weights_stay_off_the_device(dpo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's trainers do not move the model; the callback moves everything except the swapped blocks."""
    moved: list[Any] = []
    monkeypatch.setattr(trl.DPOTrainer, "_move_model_to_device", lambda self, model, device: moved.append(device))
    assert len(train(dpo, tmp_path / "swap", *LORA, "--ac_policy", "swap:3", max_steps=1)) == 1
    assert moved == []


@pytest.mark.slow
def test_training_prefers_the_chosen_answer(dpo: ModuleType, tmp_path: Path) -> None:
    losses = train(dpo, tmp_path, max_steps=20, per_device_train_batch_size=8, learning_rate=1e-3)
    assert sum(losses[-5:]) / 5 < 0.5  # ln 2 = 0.69


def test_auto_counts_the_reference_model(
    dpo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_ft.training.fit.plan", partial(plan, policies=["none", "full"]))
    weights = sum(p.numel() * 4 for p in AutoModelForCausalLM.from_pretrained(make_preferences()[0]).parameters())
    train(dpo, tmp_path, max_steps=1, ac_policy="auto", ac_budget="600MiB")
    assert "--ac_policy auto:" in capsys.readouterr().out
    report = json.loads((tmp_path / "memory_report.json").read_text())
    assert report["ranks"][0]["at_peak"]["parameters"] == 2 * weights


@pytest.mark.slow
def test_largest_batch_is_found_for_an_existing_trainer(dpo: ModuleType, tmp_path: Path) -> None:
    losses = train(
        dpo,
        tmp_path,
        "--find_max_batch_size",
        max_steps=2,
        gradient_accumulation_steps=8,
        ac_budget="200MiB",
    )
    report = json.loads((tmp_path / "memory_report.json").read_text())
    batch = report["provenance"]["per_device_batch_size"]
    assert batch * report["provenance"]["gradient_accumulation_steps"] == 16
    assert 2 < batch <= report["max_batch"]["proved"]
    assert len(losses) == 2


@pytest.mark.slow
def test_resumed_dpo_run_has_the_same_losses(dpo: ModuleType, tmp_path: Path) -> None:
    flags = [*LORA, "--ac_policy", "full"]
    losses = train(dpo, tmp_path / "whole", *flags, save_strategy="steps", save_steps=2)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    (tmp_path / "cut" / "checkpoint-4" / "trainer_state.json").unlink()
    resume = ["--resume_from_checkpoint", "latest"]
    assert train(dpo, tmp_path / "cut", *flags, *resume, save_strategy="steps", save_steps=2) == losses


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "completion": "b"}, "no column 'chosen' among prompt, completion"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "row 2 has no 'rejected'"),
    ],
)
def test_bad_preference_rows_are_one_line(dpo: ModuleType, tmp_path: Path, row: dict[str, str], message: str) -> None:
    data = tmp_path / "data.jsonl"
    good = {**row, "rejected": "c"} if "rejected" in row else row
    data.write_text(json.dumps(good) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(UserError, match=message):
        train(dpo, tmp_path / "out", dataset_name=data)


def test_built_in_preferences_differ_in_word_order_only(sample: tuple[Path, Path]) -> None:
    _, preferences = make_preferences()
    rows = [json.loads(line) for line in Path(preferences).read_text(encoding="utf-8").splitlines()]
    assert len(rows) > 1000
    assert all(sorted(row["chosen"].split()) == sorted(row["rejected"].split()) for row in rows)
    assert all(row["chosen"] != row["rejected"] for row in rows)


@pytest.mark.parametrize(("ours", "theirs"), [("DPOArguments", "DPOConfig"), ("GRPOArguments", "GRPOConfig")])
def test_flags_have_the_defaults_of_trl(ours: str, theirs: str) -> None:
    """This includes defaults that TRL changes in TrainingArguments, such as its smaller learning rate."""
    own = {field.name: field.default for field in fields(getattr(preferences, ours)) if field.init}
    library = {field.name: field.default for field in fields(getattr(trl, theirs))}
    other = {name for name, default in own.items() if name in library and default != library[name]}
    assert other == {"bf16", "gradient_checkpointing"}  # the user chooses the precision, and the policy checkpoints
