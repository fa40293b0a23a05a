"""Cross entropy over deferred logits in chunks, whose gradients for the output layer's weights add up in fp32."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from ckpt_ft.units import MIB

from .projection import Projection

# Of fp32 logits in one chunk. About four tensors of that size are alive at once: logits, cast, log-softmax, gradient.
CHUNK_BYTES = 64 * MIB
_HALF = (torch.bfloat16, torch.float16)


class Deferred(Protocol):
    """Logits that are not computed yet (see logits.py), as far as their loss asks for them."""

    projection: Projection
    width: int

    def positions(self) -> torch.Tensor:
        """The layer's input."""

    def whole(self, reason: str) -> torch.Tensor:
        """All logits, with a warning."""


def cross_entropy(
    input: Deferred,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """`F.cross_entropy` of deferred logits [tokens, vocabulary]: chunk by chunk, and again so in backward.

    All chunks run within one call of the output layer, so that FSDP gathers its weight once. The hidden states are
    split, not sliced: a split has one backward node, which writes their gradient once.
    """
    loss = partial(F.cross_entropy, weight=weight, ignore_index=ignore_index, label_smoothing=label_smoothing)
    if reduction == "none" or target.ndim != 1 or size_average is not None or reduce is not None:
        return loss(input.whole("cross_entropy without a sum"), target, reduction=reduction)
    projection, hidden = input.projection, input.positions()
    rows = max(1, CHUNK_BYTES // (4 * input.width))
    if len(hidden) <= rows:
        return projection.layer.call(lambda hidden: loss(projection.rows(hidden), target, reduction=reduction), hidden)

    def sum_of_chunks(hidden: torch.Tensor) -> torch.Tensor:
        weights = Weights(projection)

        def chunk(hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return loss(projection.rows(hidden, weights.of_chunk()), target, reduction="sum")

        random = any(isinstance(module, nn.Dropout) and module.p for module in projection.layer.module.modules())
        losses = [
            checkpoint(chunk, *part, use_reentrant=False, preserve_rng_state=random)
            for part in zip(hidden.split(rows), target.split(rows), strict=True)
        ]
        weights.drop_copies()
        return torch.stack(losses).sum()

    total = projection.layer.call(sum_of_chunks, hidden)
    if reduction == "sum":
        return total
    counted = target != ignore_index
    return total / (counted.sum() if weight is None else (weight[target.clamp_min(0)] * counted).sum())


class Weights:
    """The output layer's parameters that its chunks must not use as they are.

    Half-precision gradients of hundreds of chunks, added up in half precision, lose what a single matmul's would not:
    each is added to an fp32 sum, which reaches the parameter once. fp32 weights that autocast would cast for every
    chunk, or once for all so that their gradients meet in half precision, are cast once in forward and in backward.
    """

    def __init__(self, projection: Projection) -> None:
        _, dtype, autocast = projection.autocast
        self.shared: dict[str, _Shared] = {}
        for prefix, module in projection.layer.module.named_modules():
            cast = autocast and type(module).forward is nn.Linear.forward
            for key, p in module.named_parameters(recurse=False):
                used_as = dtype if cast and p.dtype == torch.float32 else p.dtype
                if used_as != p.dtype or (p.requires_grad and p.dtype in _HALF):
                    self.shared[f"{prefix}.{key}".lstrip(".")] = _Shared(p, used_as)

    def of_chunk(self) -> dict[str, torch.Tensor]:
        """The parameters by name, as one chunk is to use them."""
        return {name: shared.of_chunk() for name, shared in self.shared.items()}

    def drop_copies(self) -> None:
        """Free what autocast would free at its end."""
        for shared in self.shared.values():
            shared.copy = None


class _Shared:
    """One parameter, the sum of its chunks' gradients, and its copy in the dtype that it is used in."""

    def __init__(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        self.parameter, self.dtype = parameter, dtype
        self.copy: torch.Tensor | None = None
        self.total: torch.Tensor | None = None
        self.begin = _Total.apply(parameter, self) if parameter.requires_grad else None

    def of_chunk(self) -> torch.Tensor:
        data = self.parameter.detach()  # read when it is used: FSDP and ZeRO take it away in between
        if self.dtype != data.dtype:
            if self.copy is None:
                self.copy = data.to(self.dtype)
            data = self.copy
        return data if self.begin is None else _Use.apply(self.begin, data, self)

    def add(self, gradient: torch.Tensor) -> None:
        self.total = gradient.float() if self.total is None else self.total.add_(gradient)


class _Total(torch.autograd.Function):
    """An empty tensor that all chunks' weights depend on; its backward runs after theirs and hands on their sum."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, shared: _Shared) -> torch.Tensor:
        ctx.shared = shared
        return torch.empty(0, device=parameter.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        shared: _Shared = ctx.shared
        total, shared.total, shared.copy = shared.total, None, None
        return None if total is None else total.to(shared.parameter.dtype), None


class _Use(torch.autograd.Function):
    """A parameter as one chunk uses it."""

    @staticmethod
    def forward(ctx: Any, begin: torch.Tensor, data: torch.Tensor, shared: _Shared) -> torch.Tensor:
        ctx.shared = shared
        return data.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.shared.add(gradient)
        return torch.empty(0, device=gradient.device), None, None
