"""torchao's Float8Linear, whose three matrix products are in 8 bits, with the ops of torchao and without its package.

accelerate converts a model so under `mixed_precision="fp8"` with torchao (`AORecipeKwargs`, utils/ao.py). Inputs and
weights are saved for backward as they are, and each product casts its operands anew (torchao 0.18,
float8/float8_linear.py and float8_ops.py). A weight that FSDP2 gathers in 8 bits is cast before the gather instead
(fsdp_utils.py: WeightWithDynamicFloat8CastTensor).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ckpt_ft.errors import UserError

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_SMALLEST = 1e-12  # of a largest value (float8_utils.py: EPS)
_MULTIPLE = 16  # `torch._scaled_mm` takes sizes that are multiples of it
Cast = tuple[Tensor, Tensor]  # the values in 8 bits, and the scale that they were multiplied by


def to_float8(model: nn.Module) -> None:
    """Converts the linear layers of `model` in place as accelerate does: all but the first and the last.

    Layers with sizes that are no multiples of 16 stay as they are, too.

    Raises:
        UserError: no layer can be converted.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    taken = [m for m in layers[1:-1] if m.in_features % _MULTIPLE == m.out_features % _MULTIPLE == 0]
    if not taken:
        raise UserError(
            f"mixed precision fp8: {type(model).__name__} has no linear layers to convert (of sizes that are "
            f"multiples of {_MULTIPLE}, without the first and the last); take bf16"
        )
    for layer in taken:
        layer.__class__ = Float8Linear


def refuse_block_scales(model: nn.Module) -> None:
    """Raises UserError if torchao's `quantize_` has converted `model` to MXFP8 or NVFP4 training (its prototypes)."""
    for kind in map(type, (*model.modules(), *model.parameters())):
        if kind.__module__.startswith("torchao.prototype.moe_training") and kind.__name__[:5] in ("MXFP8", "NVFP4"):
            raise UserError(
                f"{kind.__name__}: MXFP8 and NVFP4 training of torchao is not predicted; trace the model as it is "
                "before quantize_, or with torchao.float8.convert_to_float8_training"
            )


class Float8Linear(nn.Linear):
    """A linear layer with one scale for each operand.

    Attributes:
        gathers: FSDP2 gathers the weight in 8 bits.
        scale: of the weight, where it is computed for all layers at once, after the update (torchao's
            `precompute_float8_dynamic_scale_for_fsdp`); None: it is computed before each gather.
        gathered: the weight in 8 bits as it was gathered last, and its scale.
    """

    gathers = False
    scale: Tensor | None = None
    gathered: Cast | tuple[None, None] = None, None

    def forward(self, hidden: Tensor) -> Tensor:
        kind = hidden.device.type
        if torch.is_autocast_enabled(kind):
            hidden = hidden.to(torch.get_autocast_dtype(kind))
        out: Tensor = _Product.apply(hidden, self.weight.t(), *self.gathered)
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def sent(self, shard: Tensor, group: Any) -> Cast:
        """What a rank sends of its `shard` of the weight: it is cast with the scale of the whole weight."""
        return cast(shard, E4M3, group) if self.scale is None else (scaled(shard, E4M3, self.scale), self.scale)


class _Product(torch.autograd.Function):
    """hidden (..., inputs) times weight (inputs, outputs); all gradients are computed, needed or not."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, data: Tensor | None, scale: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden, weight if data is None else data.t(), scale)
        left = cast(hidden.reshape(-1, hidden.shape[-1]), E4M3)
        right = cast(weight, E4M3) if data is None or scale is None else (data.t(), scale)
        out = product(left, right, hidden.dtype, fast=True)
        return out.reshape(*hidden.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight, gathered = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        data, scale = cast(weight, E4M3) if gathered is None else (weight, gathered)
        of_hidden = product(cast(flat, E5M2), (data.t(), scale), gradient.dtype)
        data, scale = cast(flat, E5M2)
        right = cast(hidden.reshape(-1, hidden.shape[-1]), E4M3)
        of_weight = product((data.t(), scale), right, gradient.dtype)
        return of_hidden.reshape(hidden.shape), of_weight.t(), None, None


def cast(tensor: Tensor, dtype: torch.dtype, group: Any = None) -> Cast:
    """The tensor in 8 bits with one scale; group: processes that hold the other shards of the tensor."""
    largest = tensor.abs().max()
    if group is not None:
        ops = torch.ops._c10d_functional
        largest = ops.wait_tensor(ops.all_reduce(largest, "max", group.group_name))
    scale = (torch.finfo(dtype).max / largest.to(torch.float64).clamp(min=_SMALLEST)).to(torch.float32)
    return scaled(tensor, dtype, scale), scale


def scaled(tensor: Tensor, dtype: torch.dtype, scale: Tensor) -> Tensor:
    most = torch.finfo(dtype).max
    return (tensor.to(torch.float32) * scale).clamp(-most, most).to(dtype)


def product(left: Cast, right: Cast, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """The matrix product of two casts in `dtype`: rows of the left operand and columns of the right one lie together.

    fast: sums in fewer bits.
    """
    (a, of_a), (b, of_b) = left, right
    short = -a.shape[1] % _MULTIPLE
    a, b = nn.functional.pad(a, (0, short)), nn.functional.pad(b, (0, 0, 0, short))  # copies, also where none is short
    a = a if a.stride(1) == 1 else a.contiguous()
    b = b if b.stride(0) == 1 else b.t().contiguous().t()
    return torch.ops.aten._scaled_mm(a, b, of_a.reciprocal(), of_b.reciprocal(), out_dtype=dtype, use_fast_accum=fast)
