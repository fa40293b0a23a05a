"""A linear layer held in 8 bits, in bitsandbytes' layout: a stand-in that traces need no CUDA and no bitsandbytes for.

One byte a weight with one float32 scale a row. Forward rounds its input to 8 bits, row by row, and multiplies whole
numbers; backward makes the weight in the input's dtype (bitsandbytes 0.50, autograd/_functions.py, MatMul8bitLt, and
backends/cuda/ops.py; Dettmers et al. 2022, arXiv:2208.07339). Columns with outliers, which it multiplies apart, are
taken to be none: their number depends on the data, and in published models is below one in a hundred.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from .linears import replace_linears

OUTLIER = 6.0  # transformers' llm_int8_threshold


@torch.library.custom_op("ckpt_ft::quantize_rows", mutates_args=())
def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """float16 (rows, n) -> int8 (rows, n) and its float32 scales (rows,)."""
    scales = x.abs().amax(1).float()
    return (x * (127 / scales[:, None])).round().to(torch.int8), scales


@quantize_rows.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=torch.int8), x.new_empty(x.shape[0], dtype=torch.float32)


@torch.library.custom_op("ckpt_ft::int8_matmul", mutates_args=())
def int8_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """int8 (rows, n) and (m, n) -> int32 (rows, m)."""
    return x.int() @ weight.int().t()


@int8_matmul.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.int32)


@register_flop_formula(torch.ops.ckpt_ft.int8_matmul)
def _flops(x_shape: tuple[int, int], weight_shape: tuple[int, int], *args: Any, **kwargs: Any) -> int:
    return 2 * x_shape[0] * x_shape[1] * weight_shape[0]


@torch.library.custom_op("ckpt_ft::dequantize_product", mutates_args=())
def dequantize_product(product: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """int32 (rows, m) -> float16, whatever the layer's dtype: bitsandbytes' kernel knows no other."""
    return (product * (rows[:, None] * columns / 127**2)).to(torch.float16)


@dequantize_product.register_fake
def _(product: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    return torch.empty_like(product, dtype=torch.float16)


class _Matmul(torch.autograd.Function):
    """x @ weight.T; the gradient goes to x alone, the weight is frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: Int8Linear) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        half = flat.to(torch.float16)
        whole, rows = quantize_rows(half)
        (half.abs() >= OUTLIER).any()
        del half
        product = int8_matmul(whole, layer.weight)
        out = dequantize_product(product, rows, layer.scales)
        if bias is not None:
            out.add_(bias)
        ctx.layer, ctx.x = layer, flat  # held as an attribute, where no saved-tensor hook finds it
        return out.to(x.dtype).view(*x.shape[:-1], -1)  # beside the product, which lives as long

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        weight = ctx.layer.weight.to(ctx.x.dtype, copy=True).mul_(ctx.layer.scales[:, None].mul(1 / 127))
        return torch.matmul(grad.to(ctx.x.dtype), weight), None, None


class Int8Linear(nn.Linear):
    """`nn.Linear` with a frozen 8-bit weight."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight, scales = quantize_rows(linear.weight.detach().to(torch.float16))
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = linear.bias
        self.register_buffer("scales", scales)

    scales: Tensor

    @property
    def W_q(self) -> Tensor:
        """By which peft knows a layer (of HQQ) that makes its weight itself where DoRA asks for it."""
        return self.weight

    def dequantize(self) -> Tensor:
        """The weight in float32, as bitsandbytes makes it."""
        return self.weight.float().mul_(self.scales[:, None].mul(1 / 127))

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features) in x's dtype."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        out: Tensor = _Matmul.apply(x, bias, self)
        return out


def to_int8(model: nn.Module, skip: tuple[str, ...] | None = None) -> nn.Module:
    """Hold the linear layers of `model` in 8 bits, but for those that `replace_linears` leaves, and freeze all of it.

    The rest stays in its dtype, as transformers loads a model in 8 bits. Works on "meta" too.
    """
    replace_linears(model, Int8Linear, skip)
    return model.requires_grad_(False)
