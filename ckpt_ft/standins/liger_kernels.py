"""Liger's and other fused kernels, for traces: the memory that they read and write, save, and overwrite.

A Triton kernel takes no fake tensors and needs a GPU. Here every kernel is an operator that reads and writes tensors
of its caller, as the Triton kernel does, and computes nothing. The autograd functions around them allocate and save
what Liger's own do (liger-kernel 0.8.5, src/liger_kernel/ops):

| here | there |
|---|---|
| `RMSNorm` | rms_norm.py: LigerRMSNormFunction, rms_norm_forward, rms_norm_backward |
| `LayerNorm` | layer_norm.py: LigerLayerNormFunction |
| `GatedProduct` | swiglu.py: LigerSiLUMulFunction; geglu.py: LigerGELUMulFunction |
| `Rotation` | rope.py: LigerRopeFunction |
| `CrossEntropy` | cross_entropy.py: LigerCrossEntropyFunction |
| `FusedLinearCrossEntropy` | fused_linear_cross_entropy.py: fused_linear_cross_entropy_forward |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

IGNORED = -100  # label without a loss
_LIBRARY = torch.library.Library("ckpt_ft", "FRAGMENT")


@dataclass
class _Card:
    """What Liger asks of the card.

    Attributes:
        processors: streaming multiprocessors; norms sum the gradients of their weights in as many rows.
        adds_in_place: whether cuBLAS adds a product of half-precision matrices to a matrix (compute capability 8.0).
    """

    processors: int = 1
    adds_in_place: bool = True


_card = _Card()


def kernel(name: str, flops: Callable[[list[Tensor]], int] | None = None) -> Any:
    """Define the operator `ckpt_ft::<name>`(given, out=...): one kernel that reads `given` and writes `out`.

    flops: of its matrix products, from what is given.
    """
    _LIBRARY.define(f"{name}(Tensor[] given, *, Tensor(a!)[] out) -> ()")
    _LIBRARY.impl(name, lambda given, *, out: None, "Meta")
    operator = getattr(torch.ops.ckpt_ft, name)
    if flops is not None:
        register_flop_formula(operator, get_raw=True)(lambda given, *args, **kwargs: flops(given))
    return operator.default


def _product(given: list[Tensor]) -> int:
    """Flops of the product of the first matrix and the second one transposed."""
    return 2 * given[0].numel() * given[1].shape[0]


@contextmanager
def on_card(processors: int, compute_capability: int) -> Iterator[None]:
    """Sets the card that is traced: its streaming multiprocessors and its compute capability (80 for 8.0)."""
    with patch.multiple(_card, processors=processors, adds_in_place=compute_capability >= 80):
        yield


liger_rms_norm, liger_rms_norm_backward = kernel("liger_rms_norm"), kernel("liger_rms_norm_backward")
liger_layer_norm, liger_layer_norm_backward = kernel("liger_layer_norm"), kernel("liger_layer_norm_backward")
liger_gated_product = kernel("liger_gated_product")
liger_gated_product_backward = kernel("liger_gated_product_backward")
liger_rope = kernel("liger_rope")
liger_cross_entropy = kernel("liger_cross_entropy")  # writes gradients over the logits, which it reads twice
liger_scale = kernel("liger_scale")
cut_cross_entropy = kernel("cut_cross_entropy", _product)
cut_cross_entropy_backward = kernel("cut_cross_entropy_backward", lambda given: 3 * _product(given))


# -- autograd functions -----------------------------------------------------------------------------------------------


class RMSNorm(torch.autograd.Function):
    """Saves the input and one number per row; backward overwrites the gradient that it is given, if `in_place`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, casting: str = "llama", in_place: bool = True) -> Tensor:
        shape, x = x.shape, x.contiguous().view(-1, x.shape[-1])
        y = torch.empty_like(x)
        scale = torch.empty(len(x), dtype=x.dtype if casting == "none" else torch.float32, device=x.device)
        liger_rms_norm([x, *_given(weight)], out=[y, scale])
        ctx.save_for_backward(x, weight, scale)
        ctx.in_place = in_place
        return y.view(shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        shape, dy = dy.shape, dy.contiguous().view(-1, dy.shape[-1])
        dw = _partial_sums(weight) if weight is not None and ctx.needs_input_grad[1] else None
        dx = dy if ctx.in_place else torch.zeros_like(dy)
        liger_rms_norm_backward([dy, x, scale, *_given(weight)], out=[dx, *_given(dw)])
        total = None if dw is None else dw.sum(0).to(weight.dtype)
        return dx.view(shape), total, None, None


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        shape, x = x.shape, x.contiguous().view(-1, x.shape[-1])
        y = torch.empty_like(x)
        mean, scale = (torch.empty(len(x), dtype=torch.float32, device=x.device) for _ in range(2))
        liger_layer_norm([x, weight, bias], out=[y, mean, scale])
        ctx.save_for_backward(x, weight, bias, mean, scale)
        return y.view(shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, bias, mean, scale = ctx.saved_tensors
        shape, dy = dy.shape, dy.contiguous().view(-1, dy.shape[-1])
        dw, db, dx = _partial_sums(weight), _partial_sums(weight), torch.empty_like(x)
        liger_layer_norm_backward([dy, x, weight, mean, scale], out=[dx, dw, db])
        return dx.view(shape), dw.sum(0).to(weight.dtype), db.sum(0).to(bias.dtype)


class GatedProduct(torch.autograd.Function):
    """activation(gate) * up; backward overwrites gate and up with their gradients."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        product = torch.empty_like(gate)
        liger_gated_product([gate, up], out=[product])
        ctx.save_for_backward(gate, up)
        return product

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        liger_gated_product_backward([grad.contiguous(), gate, up], out=[gate, up])
        return gate, up


class Rotation(torch.autograd.Function):
    """Rotates query and key (B, H, T, D) in place if they are slices of (B, T, H, D), as projections leave them."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return Rotation.rotate(q, k, cos, sin)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return *Rotation.rotate(dq, dk, cos, sin), None, None

    @staticmethod
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q, k = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()
        liger_rope([cos, sin, q, k], out=[q, k])
        return q.transpose(1, 2), k.transpose(1, 2)


class CrossEntropy(torch.autograd.Function):
    """Cross entropy of logits (N, V), which forward overwrites with their gradients."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, reduction: str) -> Tensor:
        losses = torch.zeros(len(logits), dtype=logits.dtype, device=logits.device)
        _count_labels(target, reduction)
        grads = logits.requires_grad
        logits = logits if logits.stride(-1) == 1 else logits.contiguous()
        liger_cross_entropy([target, logits, logits], out=[logits, losses])
        if grads:
            ctx.save_for_backward(logits.detach())
        return torch.sum(losses)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        liger_scale([gradient, grad], out=[gradient])
        return gradient, None, None


class FusedLinearCrossEntropy(torch.autograd.Function):
    """Cross entropy of hidden (N, H) @ weight (V, H).T; forward computes the gradients, one chunk of logits at a time.

    The chunks hold about `times` as many bytes as `hidden`. The weight's gradient is added up in its dtype, with a
    temporary of its size in fp32 if cuBLAS cannot add to it (below compute capability 8.0, in mixed dtypes).
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, reduction: str, times: int = 1
    ) -> Tensor:
        (tokens, width), vocabulary = hidden.shape, len(weight)
        chunk = _chunk(tokens, times * width, vocabulary)
        grads = hidden.requires_grad
        to_hidden = torch.zeros_like(hidden)
        to_weight = torch.zeros_like(weight) if grads and weight.requires_grad else None
        to_bias = torch.zeros_like(bias) if grads and bias is not None else None
        losses = torch.zeros(tokens, dtype=torch.float32, device=hidden.device)
        _count_labels(target, reduction)
        same = hidden.dtype == weight.dtype and _autocast(hidden) in (None, hidden.dtype)
        storage = None
        if same and (bias is None or bias.dtype == hidden.dtype):
            storage = torch.empty((chunk, vocabulary), dtype=hidden.dtype, device=hidden.device)
        for start in range(0, tokens, chunk):
            rows = hidden[start : start + chunk]
            if storage is not None:
                logits = torch.mm(rows, weight.t(), out=storage[: len(rows)])
                if bias is not None:
                    logits.add_(bias)
            else:
                logits = rows @ weight.t()
                if bias is not None:
                    logits = logits + bias
            own, labels = losses[start : start + chunk], target[start : start + chunk]
            liger_cross_entropy([labels, logits, logits], out=[logits, own])
            if not grads:
                continue
            if same and logits.dtype == to_hidden.dtype:
                torch.mm(logits, weight, out=to_hidden[start : start + chunk])
            else:
                to_hidden[start : start + chunk] = logits @ weight
            if to_weight is not None:
                _add_product(to_weight, logits.t(), rows)
            if to_bias is not None:
                torch.add(to_bias, logits.sum(0), out=to_bias)
            del logits, rows
        del storage
        ctx.save_for_backward(to_hidden.detach(), *(None if t is None else t.detach() for t in (to_weight, to_bias)))
        return torch.sum(losses)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        made = ctx.saved_tensors
        for gradient in made:
            if gradient is not None:
                liger_scale([gradient, grad], out=[gradient])
        to_hidden, to_weight, to_bias = made
        return to_hidden, to_weight, None, to_bias, None, None


class CutCrossEntropy(torch.autograd.Function):
    """Cross entropy of hidden (N, H) @ weight (V, H).T; saves a number per token and per word of the vocabulary.

    Its kernels multiply hidden states and head tile by tile; logits never leave the chip.
    [cut_cross_entropy 25.1: cce.py, LinearCrossEntropyFunction; cce_lse_forward.py; cce_backward.py]
    Its backward computes logits again and skips tiles whose gradients round to zero; here none is skipped.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, bias: None, reduction: str) -> Tensor:
        hidden = hidden.to(_autocast(hidden) or hidden.dtype)
        lse, own = (torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device) for _ in range(2))
        mean = torch.zeros(len(weight), dtype=torch.float32, device=hidden.device)
        cut_cross_entropy([hidden, weight, target], out=[lse, own, mean])
        _count_labels(target, reduction)
        ctx.save_for_backward(hidden, weight, lse, target, mean)
        return own.add_(lse).sum() * 1.0  # by the share of a label

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, weight, lse, target, mean = ctx.saved_tensors
        order = torch.argsort(mean).to(torch.int32)
        out = [torch.zeros_like(hidden)]
        if ctx.needs_input_grad[1]:
            out.append(torch.zeros_like(weight, dtype=hidden.dtype))
        cut_cross_entropy_backward([hidden, weight, grad, lse, target], out=out)
        del order
        return out[0], out[1].to(weight.dtype) if len(out) > 1 else None, None, None, None


def _given(tensor: Tensor | None) -> list[Tensor]:
    return [] if tensor is None else [tensor]


def _partial_sums(weight: Tensor) -> Tensor:
    return torch.empty((_card.processors, weight.numel()), dtype=torch.float32, device=weight.device)


def _count_labels(target: Tensor, reduction: str) -> None:
    """A mean is over the labels that are not ignored; the host waits for their number."""
    if reduction == "mean":
        (target != IGNORED).sum().item()


def _chunk(tokens: int, width: int, vocabulary: int) -> int:
    least = -(-tokens // -(-vocabulary // width))
    return min(1 << (least - 1).bit_length(), tokens)  # a power of 2


def _autocast(x: Tensor) -> torch.dtype | None:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    half = left.dtype in (torch.float16, torch.bfloat16)
    if half and _card.adds_in_place and total.dtype in (torch.float32, left.dtype):
        right = right.to(left.dtype)
        if total.dtype is torch.float32:
            torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
        else:
            torch.addmm(total, left, right, out=total)
    else:
        total += torch.mm(left, right).float()
