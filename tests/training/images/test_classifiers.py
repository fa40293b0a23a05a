"""Inputs of a classifier, loading of classifiers, and requirements of BatchNorm."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn
from transformers import TrainingArguments, ViTConfig, ViTForImageClassification, ViTImageProcessor

from ckpt_ft.errors import UserError
from ckpt_ft.training.classification import (
    ImageRows,
    check_batch_norm,
    collate,
    load_classifier,
    load_processor,
    own_resolution,
    position_arguments,
    random_crop,
)
from ckpt_ft.training.models import ModelArguments
from ckpt_ft.training.samples.drawings import drawn_shapes

NAMES = ["ant", "bee", "cat"]


def shapes() -> Any:
    from datasets import Image as ImageFeature

    return (
        drawn_shapes(4, resolution=64)
        .select_columns(["image", "label"])
        .cast_column("image", ImageFeature(decode=False))
    )


def processor(side: int = 32) -> Any:
    return ViTImageProcessor(size={"height": side, "width": side})


def saved_vit(path: Path) -> str:
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=32, patch_size=8,
        num_labels=5,
    )  # fmt: skip
    ViTForImageClassification(config).save_pretrained(path)
    processor().save_pretrained(path)
    return str(path)


def test_crops_depend_on_seed_epoch_and_row_only() -> None:
    rows = shapes()
    one, other = (ImageRows(rows, processor(), 32, min_crop=0.3, seed=1) for _ in range(2))
    other[3]  # earlier draws have no effect
    assert torch.equal(one[0]["pixel_values"], other[0]["pixel_values"])
    other.epoch.fill_(1)
    assert not torch.equal(one[0]["pixel_values"], other[0]["pixel_values"])
    assert not torch.equal(one[0]["pixel_values"], ImageRows(rows, processor(), 32, 0.3, seed=2)[0]["pixel_values"])


def test_pixels_are_normalised() -> None:
    shown = ImageRows(shapes(), processor(64), None)[0]["pixel_values"]
    assert shown.shape == (3, 64, 64)
    corner = drawn_shapes(4, resolution=64)[0]["image"].getpixel((0, 0))
    assert shown[:, 0, 0].tolist() == pytest.approx([channel / 127.5 - 1 for channel in corner], abs=1e-6)


def test_resize_keeps_the_aspect_ratio() -> None:
    wide = ImageRows([], processor(), 32).pixels(Image.linear_gradient("L").resize((64, 32)).convert("RGB"))
    assert wide.shape == (3, 32, 32)
    assert wide[0, 0, 0] == pytest.approx(-1, abs=0.05)


@pytest.mark.parametrize("size", [(64, 48), (1, 1), (300, 2)])
def test_random_crop_is_inside_and_large_enough(size: tuple[int, int]) -> None:
    draw = random.Random(0)
    for _ in range(50):
        crop = random_crop(Image.new("RGB", size), 0.5, draw)
        assert crop.width <= size[0]
        assert crop.height <= size[1]
        if size == (64, 48):
            assert crop.width * crop.height >= 0.48 * 64 * 48
            assert 0.72 < crop.width / crop.height < 1.39


def test_collated_batch() -> None:
    rows = ImageRows(shapes(), processor(), 32)
    batch = collate([rows[i] for i in range(4)], interpolate_pos_encoding=True)
    assert batch["pixel_values"].shape == (4, 3, 32, 32)
    assert batch["labels"].tolist() == shapes()["label"]
    assert batch["interpolate_pos_encoding"] is True


@pytest.mark.filterwarnings("ignore")
def test_pretrained_head_of_another_size_is_replaced(tmp_path: Path) -> None:
    model = load_classifier(ModelArguments(model_name_or_path=saved_vit(tmp_path)), NAMES)
    kept = ViTForImageClassification.from_pretrained(tmp_path)
    assert model.config.id2label == {0: "ant", 1: "bee", 2: "cat"}
    assert model.classifier.out_features == 3
    assert torch.equal(model.vit.layers[0].mlp.fc1.weight, kept.vit.layers[0].mlp.fc1.weight)


def test_position_embeddings_are_interpolated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = load_classifier(ModelArguments(model_name_or_path=saved_vit(tmp_path)), [str(i) for i in range(5)])
    extra = position_arguments(model, 48)
    assert "position embeddings of 32 pixels are interpolated to --resolution 48" in capsys.readouterr().out
    assert model(torch.zeros(1, 3, 48, 48), **extra).logits.shape == (1, 5)
    assert position_arguments(model, 32) == position_arguments(model, None) == {}
    assert position_arguments(load_classifier(ModelArguments(), NAMES), 48) == {}


def test_lora_trains_adapters_head_and_batch_norm() -> None:
    model = load_classifier(ModelArguments(use_peft=True, lora_r=2), NAMES)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name.split(".")[-3] for name in trained if "lora_" in name} == {"lora_A", "lora_B"}
    convolutions = [
        m for m in model.get_base_model().modules() if isinstance(m, nn.Conv2d) and m.kernel_size != (1, 1)
    ]
    assert len([name for name in trained if "lora_A" in name]) >= len(convolutions) // 2
    assert any("classifier.modules_to_save" in name for name in trained)
    assert any("normalization.modules_to_save" in name for name in trained)


def test_resolution_of_processors(tmp_path: Path) -> None:
    from transformers import ConvNextImageProcessor

    assert own_resolution(load_processor(ModelArguments())) == 32
    assert own_resolution(ConvNextImageProcessor(size={"shortest_edge": 384})) == 384


def arguments(tmp_path: Path, **flags: Any) -> TrainingArguments:
    return TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **flags)


def test_batch_of_one_with_batch_norm_is_avoided(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = load_classifier(ModelArguments(), NAMES)
    args = arguments(tmp_path, per_device_train_batch_size=4)
    assert not check_batch_norm(model, args, 10).dataloader_drop_last
    assert check_batch_norm(model, args, 9).dataloader_drop_last
    assert not args.dataloader_drop_last
    assert "each epoch leaves out the last of 9 images" in capsys.readouterr().out


def test_batch_of_one_without_batch_norm_is_allowed(tmp_path: Path) -> None:
    model = load_classifier(ModelArguments(model_name_or_path=saved_vit(tmp_path)), [str(i) for i in range(5)])
    args = arguments(tmp_path, per_device_train_batch_size=1)
    assert not check_batch_norm(model, args, 9).dataloader_drop_last


@pytest.mark.parametrize("loader", [lambda args: load_classifier(args, NAMES), load_processor])
def test_model_that_cannot_be_loaded_is_refused(tmp_path: Path, loader: Any) -> None:
    with pytest.raises(UserError, match=f"model {tmp_path}"):
        loader(ModelArguments(model_name_or_path=str(tmp_path)))
