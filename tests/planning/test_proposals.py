"""The policies that a plan tries."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from ckpt_ft.planning.search import other_policies


def test_policies_of_single_towers_are_tried() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"model_type": "llama", "vocab_size": 40, **sizes}
    vision = {
        "model_type": "siglip_vision_model", "image_size": 16, "patch_size": 8, "vision_use_head": False, **sizes,
    }  # fmt: skip
    config = AutoConfig.for_model("llava", text_config=text, vision_config=vision, image_token_index=39)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    by_tower = {policy for policy in other_policies(model) if "@" in policy}
    assert by_tower == {"full@language", "full@vision", "full,pointwise@language", "full,pointwise@vision"}
    model.model.vision_tower.requires_grad_(False)  # the frozen tower saves nothing, so full equals full@language
    assert not [policy for policy in other_policies(model) if "@" in policy]
