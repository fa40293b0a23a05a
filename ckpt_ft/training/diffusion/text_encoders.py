"""A Stable Diffusion pipeline's tokenizers and text encoders: loaded, and adapters on those that are trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ckpt_ft.errors import UserError

from .arguments import DiffusionModelArguments, PipelineArguments
from .joint import NAMES, TextAndUNet
from .parts import check_words, given, load_part

_TARGETS = ("q_proj", "k_proj", "v_proj", "out_proj")  # the attention's projections, as in diffusers' scripts


def load_tokenizers(args: DiffusionModelArguments, sdxl: bool) -> list[Any]:
    """One for SD 1.x and 2.x, two for SDXL.

    Raises:
        UserError: one cannot be loaded, or knows no word.
    """
    from transformers import CLIPTokenizer

    tokenizers = [load_part(CLIPTokenizer, args, f"tokenizer{suffix}") for suffix in ("", "_2")[: 1 + sdxl]]
    for tokenizer in tokenizers:
        check_words(given(args), tokenizer)
    return tokenizers


def load_text_encoders(args: DiffusionModelArguments, tokenizers: list[Any], dtype: torch.dtype) -> list[Any]:
    """Those of `tokenizers`, frozen.

    Raises:
        UserError: one cannot be loaded, or its tokenizer is another's.
    """
    from transformers import CLIPTextModel, CLIPTextModelWithProjection

    encoders = []
    for name, cls, tokenizer in zip(NAMES, (CLIPTextModel, CLIPTextModelWithProjection), tokenizers, strict=False):
        encoder = load_part(cls, args, name, variant=args.variant, dtype=dtype).requires_grad_(False)
        positions = encoder.config.max_position_embeddings
        if tokenizer.model_max_length > positions:
            raise UserError(
                f"{given(args)}: its tokenizer makes {tokenizer.model_max_length} tokens, its text encoder takes "
                f"{positions}; set model_max_length in tokenizer_config.json"
            )
        encoders.append(encoder)
    return encoders


def add_text_adapters(model: TextAndUNet, args: PipelineArguments) -> TextAndUNet:
    """LoRA in float32 on the frozen text encoders, of the U-Net's rank."""
    from diffusers.training_utils import cast_training_params
    from peft import LoraConfig

    for encoder in model.text_encoders.values():
        encoder.add_adapter(
            LoraConfig(
                r=args.rank,
                lora_alpha=args.lora_alpha or args.rank,
                lora_dropout=args.lora_dropout,
                init_lora_weights="gaussian",
                target_modules=list(_TARGETS),
            )
        )
        cast_training_params(encoder, dtype=torch.float32)
    if len(model.text_encoders) > 1:
        _last_layer(model.text_encoders[NAMES[0]]).requires_grad_(False)  # SDXL reads that encoder in front of it
    return model.train()


def _last_layer(encoder: nn.Module) -> nn.Module:
    layers = next(module for name, module in encoder.named_modules() if name.endswith("encoder.layers"))
    assert isinstance(layers, nn.ModuleList)
    return layers[-1]
