"""Every command that is printed for a known model: the recipe's parser reads it, and it trains a tiny such model."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from recipe_scripts import history, load_recipe
from safetensors.torch import load_file
from tiny_checkpoints import families, write_checkpoint
from transformers import AutoModelForCausalLM, ViTImageProcessor

from ckpt_ft.errors import UserError
from ckpt_ft.spec.command import recipe_command
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.training.models import ModelArguments, load_pretrained
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.model_config import KnownModel
from ckpt_ft.workloads.transformers_models import TASKS, class_and_task, tasks_of

ENCODERS = families("masked-lm")
TEXT_TASKS = ("text-classification", "token-classification", "embedding", "reranker")
SETTINGS = [
    {}, {"lora_r": 8, "lora_dropout": 0.1, "batch_size": 4}, {"mixed_precision": "bf16", "optimizer": "adamw"},
]  # fmt: skip


def name_of(model: KnownModel) -> str:
    return str(model.config["model_type"])


@pytest.mark.parametrize("settings", SETTINGS, ids=["full", "lora", "bf16"])
def test_recipe_parses_the_command_of_every_known_model(settings: dict[str, object]) -> None:
    parsers: dict[str, Any] = {}
    printed = set()
    for model in families(*(task.name for task in TASKS)):
        spec = TrainingSpec.of(model.name, seq_length=64, policy="full", **settings)
        own = class_and_task(model.name, model.config)[1].name
        for task in (own, *[task for task in TEXT_TASKS if task in tasks_of(model.config["model_type"])]):
            command = recipe_command(spec.edit(task="" if task == own else task), task)
            if not command:
                continue
            _, _, recipe, *words = shlex.split(command)
            parsers.setdefault(recipe, load_recipe(recipe).parse)([*words, "--use_cpu"])
            printed.add(recipe)
    assert printed >= {"llm", "text"}


def trained(base: str, rows: str, out: Path, **settings: object) -> list[float]:
    """Runs the command that is printed for the checkpoint in `base`, for a step on `rows`; returns its losses."""
    spec = TrainingSpec.of(base, policy="full", batch_size=2, **settings)
    _, _, recipe, *words = shlex.split(recipe_command(spec, load(spec, "cpu").kind))
    words[words.index("DATASET")] = rows
    more = ["--use_cpu", "--max_steps", "1", "--logging_steps", "1", "--ac_report", "none", "--disable_tqdm", "true"]
    load_recipe(recipe).main([*words, *more, "--output_dir", str(out), "--save_strategy", "no"])
    return history(out)


@pytest.mark.parametrize("model", families("causal-lm"), ids=name_of)
def test_llm_recipe_trains_every_family(model: KnownModel, sample: tuple[Path, Path], tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", model, sample[0])
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"row {row} of the text to learn"}) + "\n" for row in range(4)))
    losses = trained(base, str(rows), tmp_path / "out", seq_length=16)
    assert losses[0] == pytest.approx(7.62, abs=0.8)  # ln 2048


@pytest.mark.parametrize("task", TEXT_TASKS)
@pytest.mark.parametrize("model", ENCODERS, ids=name_of)
def test_text_recipe_trains_every_encoder(
    model: KnownModel, task: str, sample: tuple[Path, Path], tmp_path: Path
) -> None:
    """As many weights are trained as the estimate counts: adapters, and the new head whole."""
    if task not in tasks_of(name_of(model)):
        pytest.skip(f"transformers has no {name_of(model)} for {task}")
    base = write_checkpoint(tmp_path / "base", model, sample[0])
    rows = tmp_path / "rows.jsonl"
    columns: dict[str, dict[str, Any]] = {
        "text-classification": {"text": "a b", "label": "x"},
        "token-classification": {"tokens": ["a", "b"]},
        "embedding": {"anchor": "a", "positive": "a b"},
        "reranker": {"query": "a", "passage": "b", "label": 1},
    }
    made = [{**columns[task], **({"label": ["x", "y"]} if task[:2] == "to" else {})} for _ in range(4)]
    made[0] |= {"label": "y"} if task == "text-classification" else {}
    rows.write_text("".join(json.dumps(row) + "\n" for row in made))
    settings = {"seq_length": 16, "lora_r": 4, "task": task, "num_labels": 2 if "classification" in task else 0}
    losses = trained(base, str(rows), tmp_path / "out", **settings)
    spread = 0.6 if name_of(model) == "modernbert" else 0.3  # the logits of its new head are of the order of 1
    assert losses[0] == pytest.approx(0.69, abs=spread)  # ln 2: of two classes, of yes and no, of two rows
    spec = TrainingSpec.of(base, policy="full", **settings)
    counted = sum(weight.numel() for weight in load(spec, "cpu").model.parameters() if weight.requires_grad)
    assert (
        sum(value.numel() for value in load_file(tmp_path / "out" / "adapter_model.safetensors").values()) == counted
    )


def test_llm_recipe_adapts_what_is_estimated(sample: tuple[Path, Path], tmp_path: Path) -> None:
    """All linear layers: PEFT's own choice would be two of them in each block."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"row {row} of the text to learn"}) + "\n" for row in range(4)))
    trained(str(sample[0]), str(rows), tmp_path / "out", seq_length=16, lora_r=4)
    spec = TrainingSpec.of(str(sample[0]), policy="full", lora_r=4)
    counted = sum(weight.numel() for weight in load(spec, "cpu").model.parameters() if weight.requires_grad)
    assert (
        sum(value.numel() for value in load_file(tmp_path / "out" / "adapter_model.safetensors").values()) == counted
    )


@pytest.mark.parametrize("model", families("image-classification"), ids=name_of)
def test_image_classification_recipe_trains_every_family(model: KnownModel, tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", model)
    ViTImageProcessor(size={"height": 224, "width": 224}).save_pretrained(base)
    for at in range(8):
        (tmp_path / "rows" / "train" / "ab"[at % 2]).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), ("red", "green")[at % 2]).save(
            tmp_path / "rows" / "train" / "ab"[at % 2] / f"{at}.png"
        )
    losses = trained(base, str(tmp_path / "rows"), tmp_path / "out", resolution=224)
    assert losses[0] == pytest.approx(0.69, abs=0.7)  # ln 2


@pytest.mark.parametrize("model", ENCODERS, ids=name_of)
def test_encoder_is_refused_as_a_causal_language_model(
    model: KnownModel, sample: tuple[Path, Path], tmp_path: Path
) -> None:
    says = f"cannot be trained as a causal language model: a {name_of(model)} is an encoder"
    base = write_checkpoint(tmp_path / "base", model, sample[0])
    with pytest.raises(UserError, match=says) as refused:
        load_recipe("llm").main(
            [
                "--use_cpu",
                "--model_name_or_path",
                base,
                "--dataset_name",
                str(sample[1]),
                "--output_dir",
                str(tmp_path),
            ]
        )
    assert "\n" not in str(refused.value)
    with pytest.raises(UserError, match=says):
        load_pretrained(ModelArguments(model_name_or_path=base), AutoModelForCausalLM)
