"""FlashAttention for transformers' attention interface: a stand-in that traces need no flash-attn and no Triton for.

The kernel is the one that torch has as its flash backend: it saves the output and the log-sum-exp. It takes grouped
heads as they are and knows packed rows by their positions, so that no mask of pairs is ever made; its seconds are
those of the whole sequence, as are those of a vision tower's windows. Padded rows, which flash-attn takes the padding
out of, are taken to be whole: a batch is traced with its longest row. FlexAttention saves the same; its block mask
(a number for each 128 x 128 pairs) is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad

NAME = "fused"  # in transformers' tables; its own name asks for the package


def register() -> None:
    """Make transformers know the stand-in as attention implementation `NAME`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, flash_attention_mask)


@contextmanager
def for_live_models() -> Iterator[None]:
    """The stand-in where a model asks transformers for flash or flex attention: their kernels take no fake tensors."""
    if "transformers" not in sys.modules:
        yield
        return
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    kernels, masks = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    fused = dict.fromkeys((name for name in kernels if "flash" in name or name == "flex_attention"), attention)
    with patch.dict(kernels, fused), patch.dict(masks, dict.fromkeys(fused, flash_attention_mask)):
        yield


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
    width, head = value.size(-1), query.size(-1)
    if width != head:  # as transformers does for multi-head latent attention
        value = pad(value, (0, head - width))
    query, key, value = (x.to(_dtype(module, x)) for x in (query, key, value))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, None, dropout, bool(causal), scale=scaling, enable_gqa=True
        )
    return out[..., :width].transpose(1, 2), None


def _dtype(module: nn.Module, x: Tensor) -> torch.dtype:
    """What the kernel is given: of fp32, which norms in fp32 lead to, autocast's precision or the model's own."""
    if x.dtype is not torch.float32:
        return x.dtype
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return getattr(module.config, "dtype", None) or x.dtype
