"""A Stable Diffusion pipeline's tokenizers and text encoders, loaded."""

from __future__ import annotations

from typing import Any

import torch

from ckpt_ft.errors import UserError
from ckpt_ft.workloads.pipeline_parts import NAMES

from .arguments import DiffusionModelArguments
from .parts import check_words, given, load_part


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
