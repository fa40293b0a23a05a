"""Tiny vision-language models, and the inputs of one training step with an image per row."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCABULARY, IMAGE = 99, 98  # the image token
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
    "intermediate_size": 48, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "max_position_embeddings": 128, "use_cache": False,
}  # fmt: skip
_SIGLIP: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 8,
    "image_size": 32, "vision_use_head": False,
}  # fmt: skip
_QWEN = {
    "image_token_id": IMAGE, "video_token_id": 97, "vision_start_token_id": 96, "vision_end_token_id": 95,
    "text_config": {
        **_TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
    },
}  # fmt: skip
_EYES = {"model_type": "siglip_vision_model", **_SIGLIP}
_PIXTRAL = {
    "image_token_index": IMAGE, "vision_feature_layer": -1, "text_config": {"model_type": "mistral", **_TEXT},
    "vision_config": {
        "model_type": "pixtral", "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "patch_size": 8, "image_size": 32,
    },
}  # fmt: skip
_LLAMA = {"model_type": "llama", **_TEXT}
_IDEFICS = {"image_token_id": IMAGE, "scale_factor": 2, "vision_config": _SIGLIP, "tie_word_embeddings": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        **_QWEN,
        "vision_config": {
            "depth": 2, "embed_dim": 32, "num_heads": 4, "hidden_size": 32, "patch_size": 8, "mlp_ratio": 2,
        },
    },
    "qwen2_5_vl": {
        **_QWEN,
        "vision_config": {
            "depth": 2, "hidden_size": 32, "num_heads": 4, "out_hidden_size": 32, "intermediate_size": 48,
            "patch_size": 8, "window_size": 32, "fullatt_block_indexes": [1],
        },
    },
    "llava": {
        "image_token_index": IMAGE, "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
        "text_config": _LLAMA, "vision_config": _EYES,
    },
    "paligemma": {
        "image_token_index": IMAGE, "projection_dim": 32, "text_config": {"model_type": "gemma", **_TEXT},
        "vision_config": _EYES,
    },
    "gemma3": {
        "image_token_index": IMAGE, "mm_tokens_per_image": 4, "boi_token_index": 96, "eoi_token_index": 95,
        "text_config": {"model_type": "gemma3_text", **_TEXT, "layer_types": ["sliding_attention", "full_attention"]},
        "vision_config": _EYES,
    },
    "pixtral": {**_PIXTRAL, "model_type": "llava", "vision_feature_select_strategy": "full"},
    "mistral3": {**_PIXTRAL, "spatial_merge_size": 2},
    "idefics3": {**_IDEFICS, "text_config": _LLAMA},
    "smolvlm": {**_IDEFICS, "text_config": _LLAMA},
}  # fmt: skip
# Image tokens for 16 patches; the other models merge patches in fours.
_TOKENS = {"llava": 16, "paligemma": 16, "pixtral": 16}


def make(name: str, lora: bool = False) -> nn.Module:
    """Returns the model in train mode; the only dropout is before LoRA adapters, of which each tower has some."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.for_model(**{"model_type": name, **CONFIGS[name]})
    config.use_cache = False
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.1))
        for key, p in model.named_parameters():  # adapters start at zero, which would give half of them no gradient
            if "lora_B" in key:
                nn.init.normal_(p)
    return model.train()


def batch(name: str, rows: int = 2) -> dict[str, torch.Tensor]:
    """Returns `rows` samples with one image of 4 x 4 patches and text."""
    generator = torch.Generator().manual_seed(1)
    tokens = _TOKENS.get(name, 4)
    ids = torch.randint(3, 90, (rows, tokens + 8), generator=generator)
    ids[:, 2 : 2 + tokens] = IMAGE
    labels = ids.clone()
    labels[:, : 5 + tokens] = -100
    inputs = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
    if name.startswith("qwen"):
        pixels = torch.randn(rows * 16, 3 * 2 * 8 * 8, generator=generator)
        grid = torch.tensor([[1, 4, 4]] * rows)
        return {**inputs, "pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": (ids == IMAGE).int()}
    pixels = torch.randn(rows, 3, 32, 32, generator=generator)
    if name in ("paligemma", "gemma3"):
        return {**inputs, "pixel_values": pixels, "token_type_ids": (ids == IMAGE).long()}
    if name in ("pixtral", "mistral3"):
        return {**inputs, "pixel_values": pixels, "image_sizes": torch.tensor([[32, 32]] * rows)}
    return {**inputs, "pixel_values": pixels.unsqueeze(1) if name in ("idefics3", "smolvlm") else pixels}


def numbers(model: nn.Module, name: str) -> dict[str, torch.Tensor]:
    """Returns the loss, gradients and random state after a step."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(2)
    loss = model(**batch(name)).loss
    loss.backward()
    gradients = {f"gradient {key}": p.grad for key, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), "random": torch.get_rng_state(), **gradients}
