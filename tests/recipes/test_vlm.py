"""recipes/vlm.py on a small part of the built-in sample, run in this process."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from peft import PeftModel
from PIL import Image
from recipe_scripts import history, load_recipe
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForImageTextToText, AutoProcessor

from ckpt_ft.cli import main as cli
from ckpt_ft.errors import UserError, run
from ckpt_ft.planning.plan import plan
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.training.samples.language import make_questions
from ckpt_ft.training.vision_language import VisionLanguageModelArguments, load_model
from ckpt_ft.units import format_bytes
from ckpt_ft.workloads.load import load

SMALL = {
    "max_steps": 4, "per_device_train_batch_size": 4, "logging_steps": 1, "save_strategy": "no", "eval_strategy": "no",
    "learning_rate": 1e-3, "ac_report": "json", "disable_tqdm": "true",
}  # fmt: skip
LORA = ["--use_peft", "--lora_r", "4", "--lora_dropout", "0"]


@pytest.fixture(scope="session")
def drawn(_caches: None) -> tuple[Path, Path]:
    """The built-in model's directory, and a jsonl file of 48 questions with their images."""
    model, questions = make_questions(48)
    return Path(model), Path(questions)


@pytest.fixture(scope="session")
def vlm(drawn: tuple[Path, Path]) -> ModuleType:
    recipe = load_recipe("vlm")
    recipe.make_questions = lambda: tuple(map(str, drawn))  # type: ignore[attr-defined]
    return recipe


def train(vlm: ModuleType, out: Path, *flags: str, **changed: object) -> list[float]:
    """Returns the losses of a run."""
    small = [part for name, value in {**SMALL, **changed}.items() for part in (f"--{name}", str(value))]
    vlm.main(["--use_cpu", *small, "--output_dir", str(out), *flags])
    return history(out)


def trained(out: Path) -> set[str]:
    """Returns the towers with adapters."""
    keys = " ".join(load_file(out / "adapter_model.safetensors"))
    return {tower for tower in ("language_model", "vision_tower") if tower in keys}


@pytest.mark.parametrize(
    ("flags", "policy"),
    [
        (["--train_towers", "both"], "full@language,full@vision"),
        pytest.param(["--train_towers", "language", *LORA], "full@language", marks=pytest.mark.slow),
        (["--train_towers", "vision", *LORA], "save:attention+matmul"),
    ],
    ids=["full", "language", "vision"],
)
def test_policy_keeps_the_losses_of_a_vlm_and_its_peak_is_predicted(
    vlm: ModuleType, tmp_path: Path, flags: list[str], policy: str
) -> None:
    # equal rows, so that the first step, without optimizer states, does not have the peak
    data = rows(tmp_path, *[row("good.png")] * 8)
    plain = train(vlm, tmp_path / "plain", *flags, dataset_name=data)
    assert plain[3] != plain[0]
    changed = {"ac_policy": policy, "dataset_name": data}
    assert train(vlm, tmp_path / "policy", *flags, "--ac_check", **changed) == plain
    report = json.loads((tmp_path / "policy" / "memory_report.json").read_text())
    measured, predicted = report["ranks"][0]["peaks"], report["ranks"][0]["predicted"]["peaks"]
    for phase in ("forward", "backward", "optimizer"):
        assert predicted[phase] == pytest.approx(measured[phase]["allocated"], rel=0.005)


@pytest.mark.slow  # three runs
def test_adapters_of_one_tower_load_and_the_frozen_tower_saves_nothing(
    vlm: ModuleType, drawn: tuple[Path, Path], tmp_path: Path
) -> None:
    kept = {}
    for towers in ("language", "vision", "both"):
        out = tmp_path / towers
        train(vlm, out, *LORA, train_towers=towers, max_steps=2)
        names = {"language": {"language_model"}, "vision": {"vision_tower"}}
        assert trained(out) == names.get(towers, {"language_model", "vision_tower"})
        kept[towers] = json.loads((out / "memory_report.json").read_text())["ranks"][0]["at_peak"]["activations"]
        model = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(drawn[0]), out)
        assert [key for key, value in model.state_dict().items() if "lora_B" in key and value.abs().max() > 0]
        AutoProcessor.from_pretrained(out)
    assert kept["language"] < 0.85 * kept["both"]


@pytest.mark.slow
def test_built_in_run_learns(vlm: ModuleType, tmp_path: Path) -> None:
    losses = train(vlm, tmp_path, max_steps=30, eval_strategy="steps", learning_rate=3e-3)
    assert losses[0] > 5  # ln 381 = 5.94 for an untrained model
    assert sum(losses[-5:]) / 5 < 3
    assert json.loads((tmp_path / "eval_results.json").read_text())["eval_loss"] < 3.5


def test_resumed_vlm_run_has_the_same_losses(vlm: ModuleType, tmp_path: Path) -> None:
    flags = [*LORA, "--ac_policy", "full@language", "--train_towers", "both"]
    losses = train(vlm, tmp_path / "whole", *flags, save_strategy="steps", save_steps=2)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    (tmp_path / "cut" / "checkpoint-4" / "trainer_state.json").unlink()
    resume = ["--resume_from_checkpoint", "latest"]
    assert train(vlm, tmp_path / "cut", *flags, *resume, save_strategy="steps", save_steps=2) == losses


@pytest.mark.slow  # test_dataset_rows.py tests the largest batch itself
def test_auto_plans_with_the_largest_batch(
    vlm: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_ft.training.fit.plan", partial(plan, policies=["none", "full"]))
    train(vlm, tmp_path, train_towers="both", max_steps=3, ac_policy="auto", ac_budget="100MiB")
    assert "--ac_policy auto:" in capsys.readouterr().out
    report = json.loads((tmp_path / "memory_report.json").read_text())["ranks"][0]
    assert max(phase["allocated"] for phase in report["peaks"].values()) < 100 << 20


def rows(folder: Path, *lines: object) -> Path:
    Image.new("RGB", (48, 48), "red").save(folder / "good.png")
    (folder / "cut.png").write_bytes((folder / "good.png").read_bytes()[:60])
    (folder / "text.png").write_text("no picture")
    (folder / "loop.png").symlink_to("loop.png")
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def row(image: object, content: object = "<image>What is it?", **more: object) -> dict[str, object]:
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "red"}]
    return {"messages": turns, "images": [image], **more}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (row("gone.png"), "row 2: image .*gone.png' does not exist"),
        (row("cut.png"), "row 2: .*cut.png cannot be read"),
        (row("text.png"), "row 2: .*text.png cannot be read"),
        (row("../outside.png"), "row 2: image ../outside.png lies outside of the data folder"),
        (row("/etc/passwd"), "row 2: image /etc/passwd lies outside of the data folder"),
        (row("a\0.png"), "row 2: image .*png' does not exist"),
        (row("a" * 5000), "row 2: image .*aaa.* does not exist"),
        (row("loop.png"), "row 2: image .*loop.png' does not exist"),
        (row("https://a.b/c.png"), "row 2: image .*c.png' does not exist"),
        (row("good.png", "<image><image>Which?"), "row 2: 1 images, and its messages mention 2"),
        (row("good.png", "What?"), "row 2: 1 images, and its messages mention 0"),
        (
            row("good.png", [{"type": "text", "text": "<image><image>?"}]),
            "row 2: 1 images, and its messages mention 2",
        ),
        (row("good.png", None), "row 2: a turn's 'content' is a text or a list of parts"),
        ({"messages": None, "images": []}, "row 2: expected 'messages', a list of turns"),
    ],
)
def test_bad_row_fails(vlm: ModuleType, drawn: tuple[Path, Path], tmp_path: Path, line: object, message: str) -> None:
    (tmp_path / "data").mkdir()
    Image.new("RGB", (48, 48)).save(tmp_path / "outside.png")
    file = rows(tmp_path / "data", row("good.png"), line)
    with pytest.raises(UserError, match=message) as error:
        train(vlm, tmp_path / "out", dataset_name=file)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--image_column", "pictures"], "--image_column pictures: .* has no such column"),
        (["--messages_column", "chat"], "--messages_column chat: .* has no such column"),
        (["--image_column", "messages"], "--messages_column and --image_column name one column"),
        (["--dataloader_drop_last"], "--dataloader_drop_last: the 1 rows do not fill a batch of 4"),
        (["--image_folder", "nowhere"], "--image_folder nowhere: no such folder"),
        (["--max_length", "20"], "none of the 1 rows has its images and a token to learn within --max_length 20"),
        (["--max_pixels", "4096"], "max pixels 4096: LlavaNextImageProcessor(Pil)? has no such budget"),
        (["--longest_side", "64"], "longest side 64: LlavaNextImageProcessor(Pil)? does not go by it"),
        (["--dataset_num_proc", "-1"], "--dataset_num_proc -1: it should be greater than or equal to 0"),
        (["--packing"], "no flag '--packing'"),
        (["--ac_policy", "full@audio"], "has no audio tower; it has language, vision"),
        ([*LORA, "--lora_target_modules", "qq"], "--lora_target_modules qq: no layer of that name"),
    ],
)
def test_contradictory_vlm_flags_are_one_line(vlm: ModuleType, tmp_path: Path, flags: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        train(vlm, tmp_path / "out", *flags, dataset_name=rows(tmp_path, row("good.png")))


def test_text_rows_are_refused_if_only_the_vision_tower_trains(vlm: ModuleType, tmp_path: Path) -> None:
    file = rows(tmp_path, row("good.png"), {**row("good.png", "What is it?"), "images": []})
    with pytest.raises(UserError, match="--train_towers vision: 1 of 2 rows have no image, from which that tower"):
        train(vlm, tmp_path / "out", dataset_name=file, train_towers="vision")


def test_vlm_error_is_exit_code_2(vlm: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = rows(tmp_path, row("gone.png"))
    with pytest.raises(SystemExit) as stopped:
        run(lambda: train(vlm, tmp_path / "out", dataset_name=file))
    assert stopped.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_parquet_file_with_images(vlm: ModuleType, tmp_path: Path) -> None:
    from datasets import Dataset, Features, List, Value
    from datasets import Image as ImageFeature

    turns = List({"role": Value("string"), "content": List({"type": Value("string"), "text": Value("string")})})
    content = [{"type": "image", "text": None}, {"type": "text", "text": "What is it?"}]
    answer = [{"type": "text", "text": "red"}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    picture = Image.new("RGB", (96, 48), "red")
    made = Dataset.from_dict(
        {"messages": [messages] * 6, "images": [[picture]] * 6},
        features=Features(messages=turns, images=List(ImageFeature())),
    )
    made.to_parquet(tmp_path / "rows.parquet")
    losses = train(vlm, tmp_path / "out", dataset_name=tmp_path / "rows.parquet", train_towers="both")
    assert torch.tensor(losses).isfinite().all()
    assert losses[-1] < losses[0]


def test_vlm_yaml_files_parse(vlm: ModuleType, root: Path) -> None:
    for file in sorted((root / "recipes" / "vlm").glob("*.yaml")):
        model_args, data_args, ac_args, _ = vlm.parse(["--config", str(file), "--use_cpu", "--bf16", "false"])
        assert model_args.train_towers == "language"
        assert str(ac_args.policy) == "full@language,head"
        assert data_args.max_pixels == 1280 * 28 * 28


@pytest.mark.slow  # a 7B model's step is traced twice
def test_figures_in_the_vlm_yaml_equal_the_estimate(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = root / "recipes" / "vlm" / "qwen2.5_vl_7b_lora_24gb.yaml"
    said = re.search(r"([\d.]+ GiB) reserved, ([\d.]+ GiB) allocated", file.read_text().replace("\n# ", " "))
    assert said is not None
    words = ["--config", str(file), "--image-size", "1148x868", "--device", "rtx-4090", "--json"]
    monkeypatch.setattr("sys.argv", ["ckpt-ft", "estimate", *words])
    assert cli._main() == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["shape"]["image_tokens"] == 1271
    assert (format_bytes(answer["peak_reserved"]), format_bytes(answer["peak_allocated"])) == said.groups()


@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize("towers", ["language", "vision", "both"])
def test_estimate_trains_the_parameters_of_the_recipe(drawn: tuple[Path, Path], lora: int, towers: str) -> None:
    model = str(drawn[0])
    recipe = load_model(
        VisionLanguageModelArguments(
            model_name_or_path=model, train_towers=towers, use_peft=bool(lora), lora_r=lora or None
        )
    )
    estimated = load(
        TrainingSpec.of(model, train_towers=towers, lora_r=lora, images=1, image_size=(48, 48)), "cpu"
    ).model
    assert trainable(estimated) == trainable(recipe)
    assert any("vision" in name for name in trainable(recipe)) is (towers != "language")


def trainable(model: nn.Module) -> dict[str, torch.Size]:
    return {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
