"""Images in text: the model's own processor decides the number of their tokens, and the vision tower is traced."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers.utils import is_torchvision_available
from vision_language_configs import MISTRAL3, SEEING

from ckpt_ft.errors import UserError
from ckpt_ft.planning.check import check_model
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.workloads.images import images_of_row
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.model_config import read_config, read_processor

FEW_PIXELS = {"min_pixels": 784, "max_pixels": 10**6}


def written(path: Path, name: str, processor: dict[str, Any] | None = None) -> str:
    kind, config, _ = SEEING[name]
    (path / "config.json").write_text(json.dumps({**config, "architectures": [kind]}))
    if processor is not None:
        (path / "preprocessor_config.json").write_text(json.dumps(processor))
    return str(path)


def spec_with_images(seq_length: int = 64, **more: Any) -> TrainingSpec:
    return TrainingSpec.of(images=2, image_size=(100, 60), seq_length=seq_length, **more)


@pytest.mark.parametrize("name", SEEING)
def test_processor_decides_the_image_tokens_and_the_tower_runs(name: str, tmp_path: Path) -> None:
    tokens = SEEING[name][2]
    where = written(tmp_path, name, FEW_PIXELS)
    length = 64 if tokens < 28 else 256
    workload = load(spec_with_images(length).edit(model=where), "cpu")
    assert workload.shape == {"seq_length": length, "images": 2, "image_tokens": 2 * tokens}
    ids = workload.make_batch(3, None)["input_ids"]
    assert ids.shape == (3, length)
    assert (ids == 7).sum(1).tolist() == [2 * tokens] * 3
    assert workload.notes == ()
    assert any("vis" in path for path in workload.trace(1).module_activations())


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_policy_keeps_the_numbers_of_a_batch_with_images(name: str, tmp_path: Path) -> None:
    assert check_model(
        spec_with_images().edit(model=written(tmp_path, name, FEW_PIXELS), policy="full", batch_size=2), 0
    ).ok


@pytest.mark.parametrize(
    ("name", "size", "tokens"),
    [
        # without the class's own pixel limit of 35 x 35 tokens
        ("Qwen/Qwen2.5-VL-3B-Instruct", (1024, 1024), 37 * 37),
        ("Qwen/Qwen2-VL-2B-Instruct", (1280, 720), 46 * 26),  # 1288 x 728 pixels, in steps of 28
        ("google/gemma-3-4b-pt", (1024, 1024), 256),
        ("llava-hf/llava-1.5-7b-hf", (640, 480), 576),
        ("google/paligemma-3b-pt-224", (640, 480), 256),
    ],
)
def test_image_tokens_of_published_models(name: str, size: tuple[int, int], tokens: int) -> None:
    config = read_config(name)
    kind = getattr(transformers, config["architectures"][0])
    model = SimpleNamespace(config=kind.config_class(**config), forward=kind.forward)
    seen = images_of_row(model, read_processor(name), TrainingSpec.of(images=2, image_size=size))
    assert seen.image_tokens == 2 * tokens
    assert 2 * tokens < seen.length < 2 * tokens + 12  # start and end tokens, and text


def test_pixel_values_have_the_processors_shape_and_dtype(tmp_path: Path) -> None:
    """They are float32 whatever the weights are, and a row's patches follow each other."""
    batch = load(
        spec_with_images(dtype="bfloat16").edit(model=written(tmp_path, "qwen2_vl", FEW_PIXELS)), "cpu"
    ).make_batch(2, None)
    assert (batch["pixel_values"].shape, batch["pixel_values"].dtype) == ((4 * 32, 3 * 2 * 14 * 14), torch.float32)
    assert batch["image_grid_thw"].tolist() == [[1, 4, 8]] * 4
    assert batch["mm_token_type_ids"].sum(1).tolist() == [16, 16]


def test_max_pixels_makes_images_smaller(tmp_path: Path) -> None:
    where = written(tmp_path, "qwen2_vl", FEW_PIXELS)
    assert (
        load(spec_with_images(max_pixels=4 * 784).edit(model=where), "cpu").shape["image_tokens"] == 2 * 2
    )  # 28 x 56 pixels
    (tmp_path / "other").mkdir()
    where = written(tmp_path / "other", "idefics3")
    assert (
        load(spec_with_images(256, longest_side=64).edit(model=where), "cpu").shape["image_tokens"] == 2 * 5 * 4
    )  # 64 x 38 pixels: 2 x 2 tiles


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_pixels": 784}, "max pixels 784: it applies to images; give their number too"),
        ({"images": 1, "longest_side": 64}, "longest side 64: Qwen2VLImageProcessorPil does not go by it"),
        ({"images": 1, "max_pixels": 7}, "max pixels 7: Qwen2VLImageProcessorPil makes no image of less than 784"),
        ({"images": 1, "max_pixels": -1}, "max pixels -1: a number, or 0 for the processor's own"),
        ({"images": 1, "train_towers": "eyes"}, "train towers 'eyes'"),
        ({"images": 9, "image_size": (100, 60), "seq_length": 64}, "9 images of 100x60 pixels take 81 tokens of it"),
        ({"images": 1, "image_size": (5, 0)}, "image size 5x0: each side has 1 to"),
        ({"images": 80, "image_size": (100, 60)}, "sequence length 512: 80 images"),
    ],
)
def test_images_that_do_not_fit_the_length_are_one_line(settings: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=says) as refused:
        load(TrainingSpec.of(written(tmp_path, "qwen2_vl", FEW_PIXELS), **settings), "cpu")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("bert-base-uncased", "1 images: BertForMaskedLM takes no images among its text"),
        ("stable-diffusion-v1-5/stable-diffusion-v1-5", "images 1: the batches of .* hold no images among text"),
    ],
)
def test_images_for_a_text_model_are_refused(name: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        load(TrainingSpec.of(name, images=1), "t4")


def test_adapters_of_the_vision_tower_include_numbered_layers(tmp_path: Path) -> None:
    spec_with_images = TrainingSpec.of(images=1, image_size=(100, 60), lora_r=4, train_towers="vision")
    model = load(spec_with_images.edit(model=written(tmp_path, "qwen2_5_vl", FEW_PIXELS)), "cpu").model
    adapted = {name.partition(".lora_A")[0] for name, _ in model.named_parameters() if "lora_A" in name}
    ends = {".".join(name.split(".")[-2:]) for name in adapted}
    assert {"mlp.0", "mlp.2", "attn.qkv"} <= ends
    assert not any("language_model" in name for name in adapted)


def test_packing_of_rows_with_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="packed rows with images are not predicted"):
        load(spec_with_images(rows="packed").edit(model=written(tmp_path, "qwen2_5_vl")), "cpu")


@pytest.mark.skipif(is_torchvision_available(), reason="needs a machine without torchvision")
def test_library_that_a_processor_needs_is_named(tmp_path: Path) -> None:
    config = {**MISTRAL3, "architectures": ["Mistral3ForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="2 images: PixtralProcessor requires the Torchvision library: install it, or"):
        load(spec_with_images().edit(model=str(tmp_path)), "cpu")
