"""Named op groups: the dispatched operators whose outputs `save:` keeps.

Operators are listed by dispatched name (`aten.mm.default`), so the table can list kernels that the installed torch
lacks. Kernels of other packages are matched by pattern.
"""

from __future__ import annotations

import re
from functools import cache

import torch

from ckpt_ft.errors import UserError, did_you_mean

_KERNELS = {  # by their names in aten
    # all kernels that scaled_dot_product_attention dispatches to; its math fallback uses bmm and counts as matmul
    "attention": (
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_attention_math_for_mps",
        "_flash_attention_forward", "_efficient_attention_forward", "_cudnn_attention_forward",
    ),
    "matmul": (
        "mm", "addmm", "bmm", "baddbmm", "linear", "mkldnn_linear", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm",
        "_int_mm",
    ),
    "conv": ("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution"),
    "router": ("topk",),
}  # fmt: skip
GROUPS = {f"aten.{name}.default": group for group, names in _KERNELS.items() for name in names}
PATTERNS: dict[str, re.Pattern[str]] = {  # flash-attn, flex, xformers, sage and custom attention forwards
    "attention": re.compile(r"(?!aten\.)(?!.*(backward|bwd)).*(attention|attn)", re.IGNORECASE),
    "matmul": re.compile(r"(bitsandbytes\.gemm|torchao\..*(mm|linear)|.*grouped_mm)", re.IGNORECASE),
}


@cache
def group_of(op: str) -> str | None:
    """Return the group of the operator named `op` (the `str` of its overload), or None."""
    if op in GROUPS:
        return GROUPS[op]
    for group, pattern in PATTERNS.items():
        if pattern.match(op):
            return group
    return None


def check_op_name(name: str) -> None:
    """Raise UserError unless this torch has the operator `name` (`aten.bmm.default`) and it allocates its output."""
    namespace, op, *overload = name.split(".")
    library = getattr(torch.ops, namespace)
    packet = getattr(library, op, None)
    if packet is None:
        suggestion = did_you_mean(op, dir(library), f"{namespace}.{{}}")
        raise UserError(f"save: this torch ({torch.__version__}) has no operator '{name}'{suggestion}")
    unknown = [part for part in overload if part not in packet.overloads()]
    if unknown:
        raise UserError(f"save: '{namespace}.{op}' has no overload '{unknown[0]}' ({', '.join(packet.overloads())})")
    overloads = [getattr(packet, part) for part in overload or packet.overloads()]
    if any(_writes_in_place(op) for op in overloads):
        raise UserError(f"save: '{name}' writes into its input; there is no output of its own to keep")
    if any(_is_view(op) for op in overloads):
        raise UserError(
            f"save: '{name}' gives a view of its input, which holds no memory of its own to keep; name the operator "
            "that makes the tensor (aten.mm, aten.clone)"
        )


def _writes_in_place(op: torch._ops.OpOverload) -> bool:
    """Whether the operator writes into an argument that is not an `out=` argument."""
    schema = op._schema
    return schema.is_mutable and not any(argument.is_out for argument in schema.arguments)


def _is_view(op: torch._ops.OpOverload) -> bool:
    """Whether an output of the operator shares memory with an argument."""
    if op is torch.ops.aten._unsafe_view.default:  # a view that its schema does not declare
        return True
    return any(out.alias_info is not None and not out.alias_info.is_write for out in op._schema.returns)
