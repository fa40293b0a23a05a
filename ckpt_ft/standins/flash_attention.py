"""FlashAttention for transformers' attention interface: a stand-in for flash-attn and FlexAttention in traces.

It calls torch's flash backend of scaled dot product attention, which saves the output and the log-sum-exp as
flash-attn does. Grouped heads are passed as they are, and packed rows are recognised by their positions, so no mask of
pairs is allocated. Approximations: the predicted time of packed rows, and of a vision tower's windows, is that of full
attention over the whole sequence; padded rows, from which flash-attn removes the padding, are traced with their
padding; FlashAttention-3 and the Hub's builds, which save the same, are timed as FlashAttention-2, and are faster on
Hopper; FlexAttention's block mask (one number for each 128 x 128 pairs) is left out.
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

NAME = "fused"  # in transformers' tables; under "flash_attention_2" transformers would require the package


def register() -> None:
    """Register the stand-in with transformers as the attention implementation `NAME`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, flash_attention_mask)


@contextmanager
def for_live_models() -> Iterator[None]:
    """Use the stand-in wherever a model asks for flash or flex attention: those kernels take no fake tensors."""
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
    """Attention of query (B, H, L, E) over key and value (B, H or fewer heads, L, E): (B, L, H, E)."""
    flash = getattr(module.config, "_attn_implementation", None) != "flex_attention"
    if torch.compiler.is_compiling() and flash and len(query) == 1 and kwargs.get("position_ids") is not None:
        # transformers looks for several sequences in it (modeling_flash_attention_utils.py, _is_packed_sequence)
        torch._dynamo.graph_break(msg="transformers reads the positions of a single row")
    causal = module.is_causal if is_causal is None else is_causal
    width, head = value.size(-1), query.size(-1)
    if width != head:  # transformers pads values so for multi-head latent attention
        value = pad(value, (0, head - width))
    query, key, value = (x.to(_dtype(module, x)) for x in (query, key, value))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, None, dropout, bool(causal), scale=scaling, enable_gqa=True
        )
    return out[..., :width].transpose(1, 2), None


def _dtype(module: nn.Module, x: Tensor) -> torch.dtype:
    """The dtype for the kernel: autocast's or the model's own if `x` is fp32, as it is after a norm in fp32."""
    if x.dtype is not torch.float32:
        return x.dtype
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return getattr(module.config, "dtype", None) or x.dtype
