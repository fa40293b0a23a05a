"""A linear layer held in NF4, in bitsandbytes' layout: a stand-in that traces need no CUDA and no bitsandbytes for.

Two weights in a byte, one float32 scale (absmax) for every 64 of them. Under double quantisation the scale is a byte,
with a float32 scale for every 256 of those, a table of 256 levels and an offset of its own. Forward and backward each
make the whole weight, use it and drop it: forward in the compute type, backward in the type that it was packed from,
cast to the gradient's (bitsandbytes 0.50, autograd/_functions.py, MatMul4Bit, and backends/cuda/ops.py).
The sixteen levels are QLoRA's (Dettmers et al. 2023, appendix E).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .linears import replace_linears

BLOCK, NESTED_BLOCK = 64, 256
LEVELS = (
    -1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0, 0.0795803, 0.1609302, 0.2461123,
    0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0,
)  # fmt: skip


@torch.library.custom_op("ckpt_ft::dequantize_nf4", mutates_args=())
def dequantize(packed: Tensor, absmax: Tensor, levels: Tensor, out_features: int, dtype: torch.dtype) -> Tensor:
    """The (out_features, in_features) weight in `dtype`.

    packed: n / 2 bytes, as (n / 2, 1) of uint8 or fewer elements of another dtype; absmax: (n / 64,) float32; either
    rounded up.
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
    """The (n,) float32 scales; `packed` is (n,) uint8, `absmax` (n / 256,) float32, `levels` (256,) float32."""
    return levels[packed.long()] * absmax.repeat_interleave(NESTED_BLOCK)[: packed.numel()]


@dequantize_absmax.register_fake
def _(packed: Tensor, absmax: Tensor, levels: Tensor) -> Tensor:
    return torch.empty_like(packed, dtype=torch.float32)


class _Matmul(torch.autograd.Function):
    """x @ weight.T; the gradient goes to x alone, the weight is frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: NF4Linear) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.dequantized(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return torch.matmul(grad, ctx.layer.dequantize().to(grad.dtype)), None, None


class NF4Linear(nn.Linear):
    """`nn.Linear` with a frozen 4-bit weight.

    nested: under double quantisation. storage: the dtype that the packed bytes are held as. packed_from: that of the
    weight before.
    """

    clones = True  # what it returns, as PEFT's layer around bitsandbytes' does (peft/tuners/lora/bnb.py)

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
        """By which peft knows a layer (of HQQ) that makes its weight itself where DoRA asks for it."""
        return self.weight

    def dequantize(self) -> Tensor:
        """The weight in the type that it was packed from."""
        return self.dequantized(self.packed_from)

    def _nest(self, absmax: Tensor) -> None:
        """Hold the scales in 8 bits, between equally many levels on both sides of their mean."""
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
        """The weight as a new (out_features, in_features) tensor."""
        absmax = self.absmax
        if self.nested:
            absmax = dequantize_absmax(absmax, self.nested_absmax, self.nested_levels)
            absmax += self.offset
        return dequantize(self.weight, absmax, self.levels, self.out_features, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features) in x's dtype, computed in `compute_dtype`."""
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        out = _Matmul.apply(x.to(self.compute_dtype), bias, self).to(x.dtype)
        return out.clone() if self.clones else out


def to_nf4(
    model: nn.Module,
    compute_dtype: torch.dtype = torch.float16,
    skip: tuple[str, ...] | None = None,
    nested: bool = False,
    storage: torch.dtype = torch.uint8,
) -> nn.Module:
    """Hold the linear layers of `model` in NF4, but for those that `replace_linears` leaves, and freeze all of it.

    The rest stays in its dtype, as transformers loads a model in 4 bits. Works on "meta" too.
    """
    replace_linears(model, lambda linear: NF4Linear(linear, compute_dtype, nested, storage), skip)
    return model.requires_grad_(False)


def prepare_kbit(model: nn.Module) -> nn.Module:
    """What of `model` is not packed (embeddings, norms, head) to float32: peft.prepare_model_for_kbit_training."""
    packed = {id(layer.weight) for layer in model.modules() if isinstance(layer, NF4Linear)}
    for parameter in model.parameters():
        if parameter.is_floating_point() and id(parameter) not in packed:
            parameter.data = parameter.data.float()
    return model
