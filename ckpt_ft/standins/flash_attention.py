"""FlashAttention for transformers' attention interface: a stand-in for flash-attn and FlexAttention in traces.

It calls torch's flash backend of scaled dot product attention, which saves the output and the log-sum-exp as
flash-attn does. Grouped heads are passed as they are, and packed rows are recognised by their positions, so no mask of
pairs is allocated. FlashAttention-3 saves the same and is faster on Hopper: its operators have names of their own.

Approximations: packed rows, and a vision tower's windows, take the time of full attention over the whole sequence;
padding, which flash-attn removes, stays; FlexAttention's block mask (a number for each 128 x 128 pairs) is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad

from ckpt_ft.compat.libraries import ATTENTION
from ckpt_ft.compat.patches import patched
from ckpt_ft.errors import UserError

if TYPE_CHECKING:
    from ckpt_ft.memory.record.events import Op

# In transformers' tables; under "flash_attention_2" transformers would require the package.
NAME, NAME_3 = "fused", "fused_3"
_versions: set[int] = set()  # of FlashAttention, as the running trace has called them


def register() -> None:
    """Register the stand-in with transformers as the attention implementations `NAME` and `NAME_3`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    for name in (NAME, NAME_3):
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, flash_attention_mask)


def renamed(ops: Sequence[Op]) -> Sequence[Op]:
    """The recorded operators; FlashAttention-3's get a name of their own, because they take another time."""
    if 3 not in _versions:
        return ops
    return [replace(op, name=op.name.replace("aten._scaled_dot_product_flash_", "flash_attn_3.")) for op in ops]


@contextmanager
def for_live_models() -> Iterator[None]:
    """Use the stand-in wherever a model asks for flash or flex attention: those kernels take no fake tensors.

    Raises:
        UserError: when the step calls torch's flex_attention itself.
    """
    _versions.clear()
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    with ExitStack() as stack:
        if flex is not None:
            stack.enter_context(patched(flex_device=_refuse_flex))
        if "transformers" in sys.modules:
            from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
            from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

            names = [name for name in ALL_ATTENTION_FUNCTIONS if "flash" in name or name == "flex_attention"]
            stack.enter_context(overridden(ALL_ATTENTION_FUNCTIONS, dict.fromkeys(names, attention)))
            stack.enter_context(overridden(ALL_MASK_ATTENTION_FUNCTIONS, dict.fromkeys(names, flash_attention_mask)))
        yield


@contextmanager
def overridden(functions: Any, own: dict[str, Any]) -> Iterator[None]:
    """Puts functions into one of transformers' tables, in place of those that are registered for all models."""
    before = dict(functions)
    functions.update(own)
    try:
        yield
    finally:
        for name in own:
            del functions[name]
            if name in before and functions.get(name) is not before[name]:
                functions[name] = before[name]


def _refuse_flex(*args: Any) -> None:
    raise UserError(
        "the step calls flex_attention of torch itself, which is not traced; call scaled_dot_product_attention, or "
        "load a model of transformers with attn_implementation='flex_attention'"
    )


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
    implementation = getattr(module.config, ATTENTION, None) or ""
    flash = implementation != "flex_attention"
    if implementation.endswith("3"):
        _versions.add(3)
    if torch.compiler.is_compiling() and flash and len(query) == 1 and kwargs.get("position_ids") is not None:
        # transformers looks for several sequences in it (modeling_flash_attention_utils.py, _is_packed_sequence)
        from ckpt_ft.compat.compiler import graph_break

        graph_break(msg="transformers reads the positions of a single row")
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
