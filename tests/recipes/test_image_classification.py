"""recipes/image_classification.py on drawn shapes and class folders, run in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from peft import PeftModel
from recipe_scripts import history, load_recipe
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    ConvNextConfig,
    ConvNextForImageClassification,
    SiglipConfig,
    SiglipForImageClassification,
    SwinConfig,
    SwinForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

from ckpt_ft.errors import run
from ckpt_ft.training.samples.drawings import drawn_shapes

SMALL = ["--use_cpu", "--max_steps", "4", "--per_device_train_batch_size", "4", "--logging_steps", "1"]
QUIET = ["--disable_tqdm", "true", "--ac_report", "none", "--eval_strategy", "no"]


@pytest.fixture(autouse=True, scope="module")
def _drawn_once() -> Iterator[None]:
    """Draws the shapes once for all tests, because no test changes the dataset."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckpt_ft.training.classification.drawn_shapes", cache(drawn_shapes))
        yield


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    return load_recipe("image_classification")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen drawn shapes in folders of three classes; one image is grey, one has an alpha channel."""
    top = tmp_path_factory.mktemp("shapes")
    rows = [row for row in drawn_shapes(resolution=40) if row["label"] < 3][:16]
    for i, row in enumerate(rows):
        (top / f"class {row['label']}").mkdir(exist_ok=True)
        mode = {0: "L", 1: "RGBA"}.get(i, "RGB")
        row["image"].convert(mode).save(top / f"class {row['label']}" / f"{i:02}.png")
    return top


def train(recipe: ModuleType, out: Path, *flags: str, quiet: bool = True) -> Path:
    recipe.main([*SMALL, *(QUIET if quiet else []), "--output_dir", str(out), *flags])
    return out


@pytest.mark.slow
def test_built_in_classification_run_learns(recipe: ModuleType, tmp_path: Path) -> None:
    """Two of its eight epochs; chance is 1/8."""
    flags = ["--max_steps", "-1", "--num_train_epochs", "2", "--per_device_train_batch_size", "32"]
    out = train(recipe, tmp_path, *flags, "--logging_steps", "20", "--eval_strategy", "epoch")
    losses, results = history(out), json.loads((out / "eval_results.json").read_text())
    assert losses[-1] < 0.85 * losses[0]
    assert results["eval_accuracy"] > 0.2
    assert len(history(out, "eval_accuracy")) == 2


@pytest.mark.slow
def test_complete_built_in_run_is_accurate(recipe: ModuleType, tmp_path: Path) -> None:
    recipe.main(["--use_cpu", *QUIET[:4], "--output_dir", str(tmp_path)])
    assert json.loads((tmp_path / "eval_results.json").read_text())["eval_accuracy"] > 0.75


def test_policy_keeps_losses_and_batch_norm_statistics(recipe: ModuleType, folder: Path, tmp_path: Path) -> None:
    data = ["--dataset_name", str(folder)]
    plain = train(recipe, tmp_path / "plain", *data)
    expected = AutoModelForImageClassification.from_pretrained(plain).state_dict()
    for policy in ("stages", "aggressive", "full", "segments:2,save:conv"):
        out = train(recipe, tmp_path / policy, *data, "--ac_policy", policy, "--ac_check")
        assert history(out) == history(plain)
        found = AutoModelForImageClassification.from_pretrained(out).state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_accumulated_steps_have_the_gradients_of_the_whole_batch(
    recipe: ModuleType, folder: Path, tmp_path: Path
) -> None:
    """transformers alone makes them twice as large for a model whose forward takes any arguments."""
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    vision: dict[str, Any] = {**small, "image_size": 32, "patch_size": 8}
    SiglipForImageClassification(SiglipConfig(vision_config=vision)).save_pretrained(tmp_path / "model")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "model")
    flags = ["--model_name_or_path", str(tmp_path / "model"), "--dataset_name", str(folder), "--max_steps", "1"]
    whole = history(train(recipe, tmp_path / "whole", *flags, "--per_device_train_batch_size", "8"), "grad_norm")[0]
    parts = history(train(recipe, tmp_path / "parts", *flags, "--gradient_accumulation_steps", "2"), "grad_norm")[0]
    assert parts == pytest.approx(whole, rel=1e-3)


def small_model(kind: str) -> Any:
    if kind == "vit":
        config = ViTConfig(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=32,
            patch_size=8,
        )  # fmt: skip
        return ViTForImageClassification(config)
    if kind == "swin":
        return SwinForImageClassification(
            SwinConfig(image_size=32, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=4)
        )
    return ConvNextForImageClassification(ConvNextConfig(hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1]))


@pytest.mark.parametrize(("kind", "policy"), [("vit", "modules:mlp"), ("swin", "stages"), ("convnext", "stages:3+4")])
def test_model_families_on_class_folders(
    recipe: ModuleType, folder: Path, tmp_path: Path, kind: str, policy: str
) -> None:
    small_model(kind).save_pretrained(tmp_path / "model")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "model")
    flags = ["--model_name_or_path", str(tmp_path / "model"), "--dataset_name", str(folder), "--ac_policy", policy]
    flags += ["--test_split_size", "0.25", "--eval_strategy", "steps", "--eval_steps", "2"]
    out = train(recipe, tmp_path / "out", *flags)
    model = AutoModelForImageClassification.from_pretrained(out)
    assert model.config.id2label == {0: "class 0", 1: "class 1", 2: "class 2"}
    assert AutoImageProcessor.from_pretrained(out).size["height"] == 32
    assert 0 <= json.loads((out / "eval_results.json").read_text())["eval_accuracy"] <= 1


@pytest.mark.parametrize("kind", ["vit", "swin", "convnext"])
def test_adapters_of_every_model_family(recipe: ModuleType, folder: Path, tmp_path: Path, kind: str) -> None:
    small_model(kind).save_pretrained(tmp_path / "model")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "model")
    flags = ["--model_name_or_path", str(tmp_path / "model"), "--dataset_name", str(folder), "--use_peft"]
    flags += ["--ac_policy", "full", "--test_split_size", "0.25", "--eval_strategy", "steps", "--eval_steps", "4"]
    out = train(recipe, tmp_path / "out", *flags)
    assert 0 <= json.loads((out / "eval_results.json").read_text())["eval_accuracy"] <= 1
    base = AutoModelForImageClassification.from_pretrained(
        tmp_path / "model", num_labels=3, ignore_mismatched_sizes=True
    )
    adapted = PeftModel.from_pretrained(base, out)
    changed = [name for name, value in adapted.state_dict().items() if "lora_B" in name and value.abs().max() > 0]
    linear = [m for n, m in base.named_modules() if isinstance(m, torch.nn.Linear) and "lora" in n]
    assert len(changed) == len(linear) // 2 > 0


def test_adapter_includes_batch_norm_statistics(recipe: ModuleType, folder: Path, tmp_path: Path) -> None:
    """Training changes the statistics; without them the loaded model would predict differently."""
    base = train(recipe, tmp_path / "base", "--dataset_name", str(folder), "--max_steps", "1")
    flags = [
        "--dataset_name",
        str(folder),
        "--model_name_or_path",
        str(base),
        "--use_peft",
        "--lora_r",
        "4",
        "--ac_policy",
        "full",
    ]
    out = train(recipe, tmp_path / "lora", *flags, "--learning_rate", "0.1")
    adapted = PeftModel.from_pretrained(AutoModelForImageClassification.from_pretrained(base), out).eval()
    untrained = AutoModelForImageClassification.from_pretrained(base).eval()
    norms = [name for name, _ in untrained.named_buffers() if name.endswith("num_batches_tracked")]
    counted = {name: value for name, value in adapted.named_buffers() if "modules_to_save" in name}
    assert len([name for name in counted if name.endswith("num_batches_tracked")]) == len(norms)
    assert {int(value) for name, value in counted.items() if name.endswith("tracked")} == {1 + 4}
    x = torch.randn(2, 3, 32, 32)
    assert not torch.allclose(adapted(x).logits, untrained(x).logits)


def test_resumed_classification_run_has_the_same_losses(recipe: ModuleType, folder: Path, tmp_path: Path) -> None:
    """From within the second epoch, whose crops differ from the first's."""
    flags = ["--dataset_name", str(folder), "--max_steps", "8", "--save_steps", "6", "--ac_policy", "full"]
    whole = history(train(recipe, tmp_path / "whole", *flags))
    half = train(recipe, tmp_path / "half", *flags)
    (half / "checkpoint-8" / "trainer_state.json").unlink()  # as after a kill
    assert history(train(recipe, half, *flags, "--resume_from_checkpoint", "latest")) == whole


def test_epoch_does_not_end_with_a_batch_of_one(
    recipe: ModuleType, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--dataset_name", str(folder), "--per_device_train_batch_size", "5", "--max_steps", "-1"]
    out = train(recipe, tmp_path, *flags, "--num_train_epochs", "1")
    assert len(history(out)) == 3  # 16 images: three batches of five
    assert "each epoch leaves out the last of 16 images" in capsys.readouterr().out


def test_report_and_card_are_written(recipe: ModuleType, folder: Path, tmp_path: Path) -> None:
    out = train(
        recipe,
        tmp_path,
        "--dataset_name",
        str(folder),
        "--ac_report",
        "json,md",
        "--ac_policy",
        "aggressive",
        "--no_augment",
    )
    assert (out / "memory_report.md").is_file()
    assert json.loads((out / "memory_report.json").read_text())
    assert "library_name: transformers" in (out / "README.md").read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ac_policy", "stages:5"], "ResNetForImageClassification has no stage 5; it has 4, counted from 1"),
        (["--per_device_train_batch_size", "1"], "Expected more than 1 value per channel"),
        (["--dataset_name", "no/where"], "dataset no/where"),
        (["--model_name_or_path", "no/where"], "model no/where"),
        (["--ac_policy", "stags"], "did you mean 'stages'"),
    ],
)
def test_invalid_classification_input_is_one_line_and_exit_code_2(
    recipe: ModuleType,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    message: str,
) -> None:
    argv = [*SMALL, *QUIET, "--output_dir", str(tmp_path), "--dataset_name", str(folder), *flags]
    with pytest.raises(SystemExit) as exit_code:
        run(lambda: recipe.main(argv))
    assert exit_code.value.code == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.parametrize("name", ["vit_large", "resnet50"])
def test_vision_yaml_files_parse(recipe: ModuleType, root: Path, name: str, tmp_path: Path) -> None:
    """With another precision, which this machine may not support."""
    precision = "--bf16" if name == "vit_large" else "--fp16"
    argv = ["--config", str(root / "recipes" / "vision" / f"{name}.yaml"), precision, "false", "--use_cpu", "true"]
    model_args, data_args, ac_args, training_args = recipe.parse([*argv, "--output_dir", str(tmp_path)])
    assert model_args.model_name_or_path in ("google/vit-large-patch16-224", "microsoft/resnet-50")
    assert data_args.dataset_test_split == "validation"
    assert str(ac_args.policy) in ("pointwise", "stages:3+4")
    assert training_args.eval_strategy == "epoch"
