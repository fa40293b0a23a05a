"""Packed rows of images and text are computed as single rows, in each family for which packing is allowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText
from versions import needs_processor
from vision_language_configs import GEMMA, LLAVA, MLLAMA, PACKED, TEXT

from ckpt_ft.errors import UserError
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.training.text import pack
from ckpt_ft.training.vision_language import TOKEN_TYPES, collator_of, concatenated_images
from ckpt_ft.workloads.images import images_of_row
from ckpt_ft.workloads.transformers_models import PACKABLE, PACKABLE_WITH_IMAGES

IGNORED = -100


def tiny_model(config: dict[str, Any], attention: str = "sdpa") -> Any:
    named = {name: value for name, value in config.items() if name != "model_type"}
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(config["model_type"], **named), attn_implementation=attention
    )
    model.config.use_cache = model.config.get_text_config().use_cache = False  # as the recipe loads it
    return model.train()


def row(model: Any, images: int, words: int) -> dict[str, Any]:
    """Returns an encoded row: images of noise, then words."""
    ids, seen = torch.randint(20, 64, (words,)).tolist(), None
    if images:
        seen = images_of_row(model, {}, TrainingSpec.of(images=images, image_size=(100, 60), seq_length=512))
        ids = seen.ids[0].tolist() + ids
    encoded = {"input_ids": ids, "labels": [IGNORED, *ids[1:]], "images": {}}
    encoded |= {kind: [0] * len(ids) for kind in TOKEN_TYPES}
    for name, value in seen.inputs.items() if seen else ():
        if name in TOKEN_TYPES:
            encoded[name][: seen.length] = value[0].tolist()
        else:
            encoded["images"][name] = torch.randn(value.shape) if name == "pixel_values" else value
    return encoded


def packed(rows: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    along = {name: [row[name] for row in rows] for name in rows[0] if name != "images"}
    sequences = pack(along | {"row": [[at] for at in range(len(rows))]}, most)
    return [
        {name: values[at] for name, values in sequences.items() if name != "row"}
        | {"images": concatenated_images(rows[which]["images"] for which in sequences["row"][at])}
        for at in range(len(sequences["row"]))
    ]


def loss_and_gradients(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", PACKED)
def test_loss_and_gradients_equal_those_of_single_rows(family: str, attention: str) -> None:
    needs_processor(family)
    model = tiny_model(PACKED[family], attention)
    rows = [row(model, 1, 5), row(model, 2, 7), row(model, 0, 9), row(model, 1, 4)]
    sequences = packed(rows, sum(len(one["input_ids"]) for one in rows) // 2 + 20)
    assert len(sequences) == 2
    together = collator_of(model, 0, packing=True)
    batch = together(sequences)
    assert "attention_mask" not in batch
    loss, gradients = loss_and_gradients(model, batch)
    plain, expected = loss_and_gradients(model, together(rows))
    torch.testing.assert_close(loss, plain, rtol=1e-6, atol=0)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (gradients[name] - gradient).abs().max()
        assert error <= 3e-6 * gradient.abs().max().clamp(min=1e-3), name


@pytest.mark.parametrize(
    "text", sorted(PACKABLE - {"qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "glm4v_text"})
)
def test_packed_rows_do_not_attend_to_each_other_in_any_language_model(text: str) -> None:
    model = tiny_model({**LLAVA, "text_config": {"model_type": text, **TEXT, "pad_token_id": 0, "eos_token_id": 2}})
    rows = [row(model, 1, 5), row(model, 0, 9)]
    together = collator_of(model, 0, packing=True)
    loss, _ = loss_and_gradients(model, together(packed(rows, 256)))
    plain, _ = loss_and_gradients(model, together(rows))
    torch.testing.assert_close(loss, plain, rtol=1e-6, atol=0)


def test_every_packable_family_is_tested() -> None:
    assert {config["model_type"] for config in PACKED.values()} == PACKABLE_WITH_IMAGES


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (GEMMA, "packing: a gemma3 is not known to keep packed rows apart"),  # its sliding-window mask for images
        (MLLAMA, "packing: a mllama is not known"),
        ({**LLAVA, "text_config": {"model_type": "lfm2", **TEXT}}, "packing: the lfm2 in this llava is not known"),
    ],
)
def test_packing_of_other_families_is_one_line(config: dict[str, Any], says: str) -> None:
    with torch.device("meta"), pytest.raises(UserError, match=says) as refused:
        collator_of(tiny_model(config), 0, packing=True)
    assert "\n" not in str(refused.value)


def test_packed_batch_for_flash_attention_is_one_sequence() -> None:
    model = tiny_model(PACKED["qwen2_vl"])
    sequences = packed([row(model, 1, 5), row(model, 1, 7), row(model, 0, 9)], 24)
    several = collator_of(model, 0, packing=True)(sequences)
    model.config.get_text_config()._attn_implementation = "flash_attention_2"
    batch = collator_of(model, 0, packing=True)(sequences)
    tokens = sum(len(sequence["input_ids"]) for sequence in sequences)
    assert several["position_ids"].shape[:2] == (4, len(sequences))
    assert batch["position_ids"].shape == (4, 1, tokens)
    assert batch["input_ids"].shape == batch["labels"].shape == batch["mm_token_type_ids"].shape == (1, tokens)
    assert (batch["position_ids"][0] == 0).sum() == 3
    longest = max(range(len(sequences)), key=lambda at: len(sequences[at]["input_ids"]))
    begins = sum(len(sequence["input_ids"]) for sequence in sequences[:longest])
    one = batch["position_ids"][:, 0, begins : begins + several["position_ids"].shape[2]]
    assert one.equal(several["position_ids"][:, longest])
