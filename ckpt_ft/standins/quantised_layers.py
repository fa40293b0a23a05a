"""Linear layers with 4-bit (NF4) and 8-bit (LLM.int8) weights, in the memory layout of bitsandbytes 0.50.

A trace uses these stand-ins in place of bitsandbytes' layers, so it needs neither CUDA nor bitsandbytes.

NF4 (Dettmers et al. 2023, arXiv:2305.14314; the sixteen levels are from appendix E) packs two weights into a byte and
keeps one float32 scale (absmax) for every 64 weights. Double quantisation stores the scales in 8 bits, with a float32
scale for every 256 of them, a table of 256 levels and one offset. Forward and backward each unpack the whole weight
and free it again: forward in the compute dtype, backward in the dtype that the weight was packed from, cast to the
gradient's dtype. [bitsandbytes, autograd/_functions.py, MatMul4Bit; backends/cuda/ops.py]

LLM.int8 (Dettmers et al. 2022, arXiv:2208.07339) keeps one byte for each weight and one float32 scale for each row.
Forward rounds its input to 8 bits row by row and multiplies integers; backward unpacks the weight in the input's
dtype. bitsandbytes multiplies columns with outliers separately. The stand-in assumes that there are none: their number
depends on the data, and in published models it is below one in a hundred. [autograd/_functions.py, MatMul8bitLt]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula


def replace_linears(
    model: nn.Module,
    make: Callable[[nn.Linear], nn.Module],
    skip: tuple[str, ...] | None,
    listed: list[str] | None = None,
) -> None:
    """Replace each linear layer that transformers would quantise by `make(layer)`.

    Args:
        skip: last parts of the names of layers to leave; None for the layers that transformers leaves.
        listed: without `skip`, the layers that the quantisation's configuration leaves.
    """
    stays = _of_transformers(model, listed) if skip is None else lambda name: name.rpartition(".")[2] in skip
    for name, module in list(model.named_modules()):
        layer = _as_linear(module)
        if layer is not None and not stays(name):
            model.set_submodule(name, make(layer))


def _of_transformers(model: nn.Module, listed: list[str] | None) -> Callable[[str], bool]:
    """A function that tells by a layer's name whether transformers leaves it: heads, tied layers, T5's `wo`."""
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if kind is None or not isinstance(model, kind):
        return lambda name: name.rpartition(".")[2] == "lm_head"
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    kept = HfQuantizer.get_modules_to_not_convert(model, listed, model._keep_in_fp32_modules)
    return lambda name: not should_convert_module(name, kept)


def _as_linear(module: nn.Module) -> nn.Linear | None:
    """`module` if it is a linear layer; a transposed copy of GPT-2's `Conv1D`; None for any other module."""
    if type(module) is nn.Linear:
        return module
    if type(module).__name__ != "Conv1D" or not type(module).__module__.startswith("transformers."):
        return None
    weight = module.get_parameter("weight").detach().t().contiguous()
    linear = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    linear.weight, linear.bias = nn.Parameter(weight), module.get_parameter("bias")
    return linear


BLOCK, NESTED_BLOCK = 64, 256
LEVELS = (
    -1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0, 0.0795803, 0.1609302, 0.2461123,
    0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0,
)  # fmt: skip


@torch.library.custom_op("ckpt_ft::dequantize_nf4", mutates_args=())
def dequantize(packed: Tensor, absmax: Tensor, levels: Tensor, out_features: int, dtype: torch.dtype) -> Tensor:
    """Unpack NF4: the (out_features, in_features) weight in `dtype`, n elements.

    packed: n / 2 bytes, as (n / 2, 1) of uint8 or fewer elements of a wider dtype. absmax: (n / 64,) float32. Both
    are rounded up.
    """
    packed = packed.view(torch.uint8).view(-1)
    codes = torch.stack([packed >> 4, packed & 15], dim=1).view(-1)
    values = levels[codes.long()] * absmax.repeat_interleave(BLOCK)[: codes.numel()]
    return values[: codes.numel() // out_features * out_features].to(dtype).view(out_features, -1)


@dequantize.register_fake
def _(packed: Tensor, absmax: Tensor, levels: Tensor, out_features: int, dtype: torch.dtype) -> Tensor:
    return packed.new_empty(out_features, 2 * packed.nbytes // out_features, dtype=dtype)


@torch.library.custom_op("ckpt_ft::dequantize_absmax", mutates_args=())
def dequantize_absmax(packed: Tensor, absmax: Tensor, levels: Tensor) -> Tensor:
    """Unpack nested scales: (n,) float32 of `packed` (n,) uint8, `absmax` (n / 256,) and `levels` (256,) float32."""
    return levels[packed.long()] * absmax.repeat_interleave(NESTED_BLOCK)[: packed.numel()]


@dequantize_absmax.register_fake
def _(packed: Tensor, absmax: Tensor, levels: Tensor) -> Tensor:
    return torch.empty_like(packed, dtype=torch.float32)


class _NF4Matmul(torch.autograd.Function):
    """x @ weight.T with a frozen weight: only x gets a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: NF4Linear) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.dequantized(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return torch.matmul(grad, ctx.layer.dequantize().to(grad.dtype)), None, None


class NF4Linear(nn.Linear):
    """`nn.Linear` with a frozen 4-bit weight.

    Attributes:
        nested: whether the scales are in 8 bits (double quantisation).
        packed_from: the dtype of the weight before it was packed.
        clones: whether forward returns a copy, as PEFT's layer around bitsandbytes' does (peft/tuners/lora/bnb.py).

    Args:
        storage: the dtype of the packed tensor.
    """

    clones = True

    def __init__(
        self,
        linear: nn.Linear,
        compute_dtype: torch.dtype,
        nested: bool = False,
        storage: torch.dtype = torch.uint8,
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.compute_dtype = (
            linear.in_features,
            linear.out_features,
            compute_dtype,
        )
        weight, device = linear.weight, linear.weight.device
        self.packed_from = weight.dtype
        blocks = F.pad(weight.detach().float().view(-1), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
        levels = torch.tensor(LEVELS, device=device)
        absmax = blocks.abs().amax(1)
        middles = (levels[1:] + levels[:-1]) / 2
        codes = torch.bucketize(blocks / absmax[:, None], middles).to(torch.uint8).view(-1, 2)
        packed = ((codes[:, :1] << 4) | codes[:, 1:]).view(-1)[: -(-weight.numel() // 2)].clone().view(storage)
        self.weight = nn.Parameter(packed.view(-1, 1), requires_grad=False)
        self.bias = linear.bias
        self.nested = nested
        if nested:
            self._nest(absmax)
        else:
            self.register_buffer("absmax", absmax)
        self.register_buffer("levels", levels)

    @property
    def W_q(self) -> Tensor:
        """PEFT calls `dequantize` on layers that have this attribute (HQQ's) when DoRA needs the weight."""
        return self.weight

    def dequantize(self) -> Tensor:
        """The weight in the dtype that it was packed from."""
        return self.dequantized(self.packed_from)

    def _nest(self, absmax: Tensor) -> None:
        """Quantise the scales to 8 bits, to levels that are spaced evenly around their mean."""
        offset = absmax.mean()
        rest = torch.nn.functional.pad(absmax - offset, (0, -absmax.numel() % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
        scales = rest.abs().amax(1)
        levels = torch.linspace(-1, 1, 256, device=absmax.device)
        codes = torch.bucketize(rest / scales[:, None], (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
        self.register_buffer("absmax", codes.view(-1)[: absmax.numel()].clone())
        self.register_buffer("nested_absmax", scales)
        self.register_buffer("nested_levels", levels)
        self.register_buffer("offset", offset)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight as a new (out_features, in_features) tensor in `dtype`."""
        absmax = self.absmax
        if self.nested:
            absmax = dequantize_absmax(absmax, self.nested_absmax, self.nested_levels)
            absmax += self.offset
        return dequantize(self.weight, absmax, self.levels, self.out_features, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features) in x's dtype, computed in `compute_dtype`."""
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        out = _NF4Matmul.apply(x.to(self.compute_dtype), bias, self).to(x.dtype)
        return out.clone() if self.clones else out


def to_nf4(
    model: nn.Module,
    compute_dtype: torch.dtype = torch.float16,
    skip: tuple[str, ...] | None = None,
    nested: bool = False,
    storage: torch.dtype = torch.uint8,
) -> nn.Module:
    """Quantise the linear layers of `model` to NF4 in place and freeze the model, as transformers loads it in 4 bits.

    Layers that `replace_linears` skips keep their dtype. Works on the meta device, too.
    """
    replace_linears(model, lambda linear: NF4Linear(linear, compute_dtype, nested, storage), skip)
    return model.requires_grad_(False)


def prepare_kbit(model: nn.Module) -> nn.Module:
    """Cast what is not packed (embeddings, norms, head) to float32, as peft.prepare_model_for_kbit_training does."""
    packed = {id(layer.weight) for layer in model.modules() if isinstance(layer, NF4Linear)}
    for parameter in model.parameters():
        if parameter.is_floating_point() and id(parameter) not in packed:
            parameter.data = parameter.data.float()
    return model


OUTLIER = 6.0  # transformers' llm_int8_threshold


@torch.library.custom_op("ckpt_ft::quantize_rows", mutates_args=())
def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise float16 (rows, n) to int8 (rows, n) and float32 scales (rows,)."""
    scales = x.abs().amax(1).float()
    return (x * (127 / scales[:, None])).round().to(torch.int8), scales


@quantize_rows.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=torch.int8), x.new_empty(x.shape[0], dtype=torch.float32)


@torch.library.custom_op("ckpt_ft::int8_matmul", mutates_args=())
def int8_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """int8 (rows, n) @ int8 (m, n).T: int32 (rows, m)."""
    return x.int() @ weight.int().t()


@int8_matmul.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.int32)


@register_flop_formula(torch.ops.ckpt_ft.int8_matmul)
def _flops(x_shape: tuple[int, int], weight_shape: tuple[int, int], *args: Any, **kwargs: Any) -> int:
    return 2 * x_shape[0] * x_shape[1] * weight_shape[0]


@torch.library.custom_op("ckpt_ft::dequantize_product", mutates_args=())
def dequantize_product(product: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Scale int32 (rows, m) to float16, whatever the layer's dtype: bitsandbytes' kernel has no other output."""
    return (product * (rows[:, None] * columns / 127**2)).to(torch.float16)


@dequantize_product.register_fake
def _(product: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    return torch.empty_like(product, dtype=torch.float16)


class _Int8Matmul(torch.autograd.Function):
    """x @ weight.T with a frozen weight: only x gets a gradient."""

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
        ctx.layer, ctx.x = layer, flat  # an attribute: bitsandbytes saves x where no saved-tensor hook sees it
        return out.to(x.dtype).view(*x.shape[:-1], -1)  # the int32 product is still allocated here

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
        """PEFT calls `dequantize` on layers that have this attribute (HQQ's) when DoRA needs the weight."""
        return self.weight

    def dequantize(self) -> Tensor:
        """The weight in float32, as bitsandbytes unpacks it."""
        return self.weight.float().mul_(self.scales[:, None].mul(1 / 127))

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features) in x's dtype."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        out: Tensor = _Int8Matmul.apply(x, bias, self)
        return out


def to_int8(model: nn.Module, skip: tuple[str, ...] | None = None) -> nn.Module:
    """Quantise the linear layers of `model` to 8 bits in place and freeze the model, as transformers loads it so.

    Layers that `replace_linears` skips keep their dtype. Works on the meta device, too.
    """
    replace_linears(model, Int8Linear, skip)
    return model.requires_grad_(False)
