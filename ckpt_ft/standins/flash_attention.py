"""FlashAttention-2 for transformers' attention interface: a stand-in that traces need no flash-attn for.

The kernel is the one that torch has as its flash backend: it saves the output and the log-sum-exp. It takes grouped
heads as they are and knows packed rows by their positions, so that no mask of pairs is ever made. Padded rows, which
flash-attn takes the padding out of, are taken to be whole: a batch is traced with its longest row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

NAME = "fused"  # in transformers' tables; its own name asks for the package


def register() -> None:
    """Make transformers know the stand-in as attention implementation `NAME`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, flash_attention_mask)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Query (B, H, L, E), key and value (B, H or fewer, L, E) -> (B, L, H, E)."""
    causal = module.is_causal if is_causal is None else is_causal
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, None, dropout, bool(causal), scale=scaling, enable_gqa=True
        )
    return out.transpose(1, 2), None
