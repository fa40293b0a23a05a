"""Linear layers with the packed weights of GPTQ, AWQ, HQQ, torchao, FP8, EETQ, AQLM and quanto, for traces.

`PACKINGS` has one row for each method: the tensors of a layer, and what a forward and a backward pass make of them.
A trace needs neither these libraries nor CUDA; bitsandbytes' layers are in `quantised_layers.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_I8, _U8, _I32, _F16, _F32 = torch.int8, torch.uint8, torch.int32, torch.float16, torch.float32
Shapes = list[tuple[tuple[int, ...], torch.dtype | None]]  # None for the dtype of the model


@dataclass(frozen=True)
class Packing:
    """How a method stores the weight of a linear layer, and computes with it.

    Attributes:
        source: where the library says so.
        tensors: (rows, columns, bits, group) -> shapes and dtypes, the packed weight first.
        group: elements that share a scale, if the configuration does not say.
        forward: whether a forward pass unpacks the whole weight; otherwise its kernel reads the packed one.
        keeps: whether the unpacked weight is kept for the backward pass; otherwise backward unpacks it.
        saves_input: whether the input is kept for the backward pass.
        through: the dtype in which the weight is unpacked, before it is cast; None for the input's.
        experts: whether it packs fused experts, too, which is not modelled.
    """

    source: str
    tensors: Callable[[int, int, int, int], Shapes]
    group: int = 128
    forward: bool = True
    keeps: bool = False
    saves_input: bool = False
    through: torch.dtype | None = None
    experts: bool = False


def _gptq(rows: int, columns: int, bits: int, group: int) -> Shapes:
    groups = -(-columns // group)
    return [
        ((columns * bits // 32, rows), _I32), ((groups, rows * bits // 32), _I32), ((groups, rows), _F16),
        ((columns,), _I32),
    ]  # fmt: skip


def _awq(rows: int, columns: int, bits: int, group: int) -> Shapes:
    groups = -(-columns // group)
    return [((columns, rows * bits // 32), _I32), ((groups, rows * bits // 32), _I32), ((groups, rows), _F16)]


def _hqq(rows: int, columns: int, bits: int, group: int) -> Shapes:
    groups = -(-rows * columns // group)
    return [((rows * columns * bits // 8,), _U8), ((groups, 1), None), ((groups, 1), None)]


def _fp8(rows: int, columns: int, bits: int, group: int) -> Shapes:
    return [((rows, columns), _I8), ((-(-rows // group), -(-columns // group)), _F32)]


def _quanto(rows: int, columns: int, bits: int, group: int) -> Shapes:
    if bits == 8:
        return [((rows, columns), _I8), ((rows, 1), None)]
    groups = -(-rows * columns // group)
    return [((rows * columns * bits // 8,), _U8), ((groups, 1), None), ((groups, 1), None)]


def _aqlm(rows: int, columns: int, bits: int, group: int) -> Shapes:
    """One codebook of 2**bits vectors of `group` weights."""
    code = _I8 if bits <= 8 else torch.int16
    return [((rows, columns // group, 1), code), ((1, 2**bits, 1, group), _F16), ((rows, 1, 1, 1), _F16)]


PACKINGS: dict[str, Packing] = {
    "gptq": Packing("gptqmodel, nn_modules/qlinear: qweight, qzeros, scales, g_idx", _gptq, experts=True),
    "awq": Packing("gptqmodel, nn_modules/qlinear: qweight, qzeros, scales", _awq, experts=True),
    "hqq": Packing("hqq, core/quantize.py: Quantizer.quantize, HQQMatmulNoCacheMul", _hqq, group=64),
    "torchao int8": Packing(
        "torchao, int8_tensor.py: qdata, scale, zero_point; F.linear casts the weight, and autograd keeps the cast",
        lambda rows, columns, bits, group: [((rows, columns), _I8), ((rows, 1), _F32), ((rows, 1), _I8)],
        keeps=True,
    ),
    "torchao float8": Packing(
        "torchao, float8_tensor.py: qdata, scale; F.linear unpacks in float32, and autograd keeps the cast",
        lambda rows, columns, bits, group: [((rows, columns), _I8), ((rows, 1), _F32)],
        keeps=True, through=_F32,
    ),
    "fp8": Packing(
        "transformers, integrations/finegrained_fp8.py: FP8LinearFunction", _fp8, forward=False, experts=True
    ),
    "eetq": Packing(
        "transformers, integrations/eetq.py: EetqLinearMMFunction",
        lambda rows, columns, bits, group: [((columns, rows), _I8), ((rows,), _F16)],
        forward=False, saves_input=True,
    ),
    "quanto": Packing("optimum-quanto, tensor/function.py: QuantizedLinearFunction", _quanto, saves_input=True),
    "aqlm": Packing("aqlm, inference.py: QuantizedLinear", _aqlm, group=8, experts=True),
}  # fmt: skip


class _PackedMatmul(torch.autograd.Function):
    """x @ weight.T with a frozen weight: only x gets a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: PackedLinear) -> Tensor:
        packing, ctx.layer = layer.packing, layer
        if not packing.forward:
            return layer.product(x, bias)
        weight = layer.unpacked(x.dtype)
        ctx.save_for_backward(*((weight,) if packing.keeps else ()), *((x,) if packing.saves_input else ()))
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        weight = ctx.saved_tensors[0] if ctx.layer.packing.keeps else ctx.layer.unpacked(grad.dtype)
        return torch.matmul(grad, weight), None, None


class PackedLinear(nn.Linear):
    """`nn.Linear` with a frozen packed weight, without values.

    Args:
        bits: bits of a weight.
        group: elements that share a scale; 0 for the method's default, -1 for a whole row.
    """

    def __init__(self, linear: nn.Linear, packing: Packing, bits: int, group: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packing, self.bias = packing, linear.bias
        group = self.in_features if group < 0 else group or packing.group
        like = linear.weight
        made = [
            torch.empty(shape, dtype=dtype or like.dtype, device=like.device)
            for shape, dtype in packing.tensors(self.out_features, self.in_features, bits, group)
        ]
        self.weight = nn.Parameter(made[0], requires_grad=False)
        for number, tensor in enumerate(made[1:]):
            self.register_buffer(f"packed{number}", tensor)

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """A new (out_features, in_features) weight, as a kernel writes it."""
        shape: Sequence[int] = (self.out_features, self.in_features)
        codes = torch.zeros(shape, dtype=self.packing.through or dtype, device=self.weight.device)
        if self.packing.through is None:
            return codes
        scaled = codes * 1  # both live until the cast ends
        return scaled.to(dtype)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x @ weight.T by a kernel that reads the packed weight: one with an expanded element stands for it."""
        weight = torch.zeros((), dtype=x.dtype, device=x.device).expand(self.out_features, self.in_features)
        return F.linear(x, weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features) in x's dtype."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        out: Tensor = _PackedMatmul.apply(x, bias, self)
        return out
