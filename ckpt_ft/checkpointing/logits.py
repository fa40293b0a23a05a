"""Logits that are not computed yet: what `head` lets an output layer return, and cross entropy over them in chunks."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from ckpt_ft.errors import WorkFailed
from ckpt_ft.units import MIB

# Of fp32 logits in one chunk. About four tensors of that size are alive at once: logits, cast, log-softmax, gradient.
CHUNK_BYTES = 64 * MIB
_ELEMENTWISE = {"add", "clamp", "div", "float", "mul", "sub", "tanh", "to", "true_divide", "type"}


class _Local(threading.local):
    deferring = False


local = _Local()


class Logits:
    """An output layer's result before it is computed: [..., hidden] is there, [..., vocabulary] to come.

    It is no tensor, and operators reach it through `__torch_function__`. It answers for shape and device, passes views
    and indexing of leading dimensions on to its input, notes elementwise operations that are the same for every token,
    and computes itself whole, with a warning, for anything else.
    """

    def __init__(
        self, layer: Callable[..., torch.Tensor], hidden: torch.Tensor, width: int, steps: tuple[Any, ...] = ()
    ) -> None:
        self.layer, self.hidden, self.width, self.steps = layer, hidden, width, steps

    @property
    def shape(self) -> torch.Size:
        """The shape that the logits would have."""
        return torch.Size((*self.hidden.shape[:-1], self.width))

    @property
    def device(self) -> torch.device:
        """Where they would be."""
        return self.hidden.device

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self.hidden.ndim

    def size(self, dim: int | None = None) -> Any:
        """As `Tensor.size`."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """As `Tensor.dim`."""
        return self.hidden.ndim

    def contiguous(self) -> Logits:
        """Itself."""
        return self

    def view(self, *shape: Any) -> Any:
        """As `Tensor.view` to sizes; deferred where the last dimension stays whole."""
        sizes = shape if all(isinstance(size, int) for size in shape) else tuple(shape[0])
        if sizes[-1] == self.width:
            return self._of(self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1]))
        return self.whole("view").reshape(sizes)

    reshape = view

    def __getitem__(self, index: Any) -> Any:
        whole_rows = index[-1:] == (slice(None),) if isinstance(index, tuple) else index is not Ellipsis
        if whole_rows and self.ndim > 1:
            return self._of(self.hidden[index])
        return self.whole("indexing")[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        raise _cannot("an assignment to some of the logits")

    def __mul__(self, other: Any) -> Any:
        return self.__torch_function__(torch.mul, (), (self, other))

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self.__torch_function__(torch.div, (), (self, other))

    def __add__(self, other: Any) -> Any:
        return self.__torch_function__(torch.add, (), (self, other))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self.__torch_function__(torch.sub, (), (self, other))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        attribute = getattr(torch.Tensor, name)  # AttributeError where a tensor has none either
        if callable(attribute):
            return lambda *args, **kwargs: self.__torch_function__(attribute, (), (self, *args), kwargs)
        return getattr(self.whole(name), name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        first = args[0] if args else kwargs.get("input")
        if func is F.cross_entropy and isinstance(first, Logits) and first.ndim == 2:
            return cross_entropy(*args, **kwargs)
        if isinstance(first, Logits) and all(_same_for_all_rows(v) for v in (*args[1:], *kwargs.values())):
            rest = [v.reshape(v.shape[-1:]) if isinstance(v, torch.Tensor) else v for v in args[1:]]
            if name in _ELEMENTWISE:
                return cls(first.layer, first.hidden, first.width, (*first.steps, (func, rest, kwargs)))
            if name.endswith("_") and name[:-1] in _ELEMENTWISE:
                first.steps = (*first.steps, (getattr(torch.Tensor, name[:-1]), rest, kwargs))
                return first
        if name.endswith("_") and not name.endswith("__"):
            raise _cannot(f"the in-place operator {name}")
        plain = [value.whole(name) if isinstance(value, Logits) else value for value in args]
        return func(*plain, **{k: v.whole(name) if isinstance(v, Logits) else v for k, v in kwargs.items()})

    def whole(self, reason: str) -> torch.Tensor:
        """All logits as a tensor, for an operation that has no chunked form."""
        warnings.warn(
            f"policy 'head': the logits are computed whole, as the model's loss calls {reason}", stacklevel=3
        )
        return self.rows(self.hidden)

    def rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits [n, vocabulary] of some positions [n, hidden]."""
        before, local.deferring = local.deferring, False
        try:
            logits = self.layer(hidden)
        finally:
            local.deferring = before
        for function, args, kwargs in self.steps:
            logits = function(logits, *args, **kwargs)
        return logits

    def _of(self, hidden: torch.Tensor) -> Logits:
        return Logits(self.layer, hidden, self.width, self.steps)


def cross_entropy(
    input: Logits,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """`F.cross_entropy` of deferred logits [tokens, vocabulary]: chunk by chunk, and again so in backward.

    The hidden states are split, not sliced: a split has one backward node, which writes their gradient once.
    """
    loss = partial(F.cross_entropy, weight=weight, ignore_index=ignore_index, label_smoothing=label_smoothing)
    if reduction == "none" or target.ndim != 1 or size_average is not None or reduce is not None:
        return loss(input.whole("cross_entropy without a sum"), target, reduction=reduction)
    rows = max(1, CHUNK_BYTES // (4 * input.width))
    hidden, targets = input.hidden.split(rows), target.split(rows)
    if len(hidden) == 1:
        return loss(input.rows(input.hidden), target, reduction=reduction)

    def chunk(hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return loss(input.rows(hidden), target, reduction="sum")

    random = any(isinstance(m, torch.nn.Dropout) and m.p for m in _modules(input.layer))
    total = torch.stack(
        [
            checkpoint(chunk, *part, use_reentrant=False, preserve_rng_state=random)
            for part in zip(hidden, targets, strict=True)
        ]
    ).sum()
    if reduction == "sum":
        return total
    counted = target != ignore_index
    return total / (counted.sum() if weight is None else (weight[target.clamp_min(0)] * counted).sum())


def _same_for_all_rows(value: Any) -> bool:
    """A number, or a tensor over the vocabulary alone (a bias)."""
    if isinstance(value, torch.Tensor):
        return value.numel() == value.shape[-1:].numel()
    return not isinstance(value, Logits)


def _modules(layer: Any) -> Iterable[torch.nn.Module]:
    return layer.modules() if isinstance(layer, torch.nn.Module) else ()


def _cannot(what: str) -> WorkFailed:
    return WorkFailed(f"policy 'head': the model's loss needs {what}, which has no chunked form; leave 'head' out")
