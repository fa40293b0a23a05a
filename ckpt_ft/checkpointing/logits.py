"""Logits that are not computed yet: what `head` lets an output layer return while a model works out its loss."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F

from .chunks import cross_entropy
from .projection import Projection, unchanged

_ELEMENTWISE = {"add", "clamp", "div", "mul", "sub", "tanh", "true_divide"}
_CASTS = {"float", "to", "type"}  # what they return may be the very tensor that they are given
_OPERATORS = {"__mul__": "mul", "__rmul__": "mul", "__truediv__": "div", "__add__": "add", "__radd__": "add"}
_OPERATORS |= {"__sub__": "sub", "__imul__": "mul_", "__itruediv__": "div_", "__iadd__": "add_", "__isub__": "sub_"}
_WHOLE = (
    "rsub",
    "rtruediv",
    "pow",
    "neg",
    "abs",
    "matmul",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "iter",
    "bool",
    "float",
)
_OPERATORS |= {f"__{name}__": f"__{name}__" for name in _WHOLE}


class Logits:
    """An output layer's result before it is computed: [..., hidden] is there, [..., vocabulary] to come.

    It is no tensor, and operators reach it through `__torch_function__`. It answers for shape, dtype and device,
    passes views and indexing of leading dimensions on to its input, and notes elementwise operations that are the same
    for every token. Anything else computes it whole, with a warning; so does a write into logits that others may be
    views of. From then on all of these are tensors, and views of one another as the model asked for.

    Attributes:
        relatives: what is alive of the logits that may share their memory, these included, by id.
        tensor: once computed.
    """

    def __init__(self, projection: Projection, hidden: torch.Tensor, width: int, like: Logits | None = None) -> None:
        self.projection, self.hidden, self.width = projection, hidden, width
        self.version = hidden._version
        self.tensor: torch.Tensor | None = None
        self.relatives: WeakValueDictionary[int, Logits]
        self.made: _Made
        if like is None:
            self._begin()
        else:
            self.relatives, self.made = like.relatives, like.made
            self.relatives[id(self)] = self

    def _begin(self) -> None:
        """Memory of its own."""
        self.relatives = WeakValueDictionary({id(self): self})
        self.made = _Made(partial(self.projection.whole, self.hidden, self.version))

    @property
    def shape(self) -> torch.Size:
        """The shape that the logits would have."""
        return torch.Size((*self.hidden.shape[:-1], self.width))

    @property
    def device(self) -> torch.device:
        """Where they would be."""
        return self.hidden.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that they would have: that of no rows of them."""
        if self.tensor is not None:
            return self.tensor.dtype
        with torch.no_grad():
            return self.projection.layer.call(self.projection.rows, self.hidden.flatten(0, -2)[:0]).dtype

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

    def __len__(self) -> int:
        return len(self.hidden)

    def contiguous(self) -> Any:
        """As `Tensor.contiguous`."""
        return self._derive(torch.Tensor.contiguous, self.hidden)

    def view(self, *shape: Any) -> Any:
        """As `Tensor.view` to sizes; deferred where the last dimension stays whole."""
        return self._reshape(torch.Tensor.view, shape)

    def reshape(self, *shape: Any) -> Any:
        """As `Tensor.reshape`; deferred where the last dimension stays whole."""
        return self._reshape(torch.Tensor.reshape, shape)

    def _reshape(self, function: Any, shape: tuple[Any, ...]) -> Any:
        sizes = shape if all(isinstance(size, int) for size in shape) else tuple(shape[0])
        if sizes[-1] == self.width:
            hidden = self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1])
            return self._derive(lambda logits: function(logits, sizes), hidden)
        return function(self.whole(function.__name__), sizes)

    def __getitem__(self, index: Any) -> Any:
        whole_rows = index[-1:] == (slice(None),) if isinstance(index, tuple) else index is not Ellipsis
        if whole_rows and self.ndim > 1:
            return self._derive(lambda logits: logits[index], self.hidden[index])
        return self.whole("indexing")[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.whole("an assignment to some of them")[index] = value

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
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, Logits) and first.tensor is None:
            deferred = first._defer(func, args, kwargs)
            if deferred is not None:
                return deferred
        name = getattr(func, "__name__", str(func))
        plain = [value.whole(name) if isinstance(value, Logits) else value for value in args]
        result = func(*plain, **{k: v.whole(name) if isinstance(v, Logits) else v for k, v in kwargs.items()})
        return first if isinstance(first, Logits) and result is first.tensor else result

    def _defer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `func` returns without computing the logits; None where that cannot be."""
        if func is F.cross_entropy:
            return cross_entropy(*args, **kwargs) if self.ndim == 2 else None
        if not all(_same_for_all_rows(value) for value in (*args[1:], *kwargs.values())):
            return None
        rest = [value.reshape(value.shape[-1:]) if isinstance(value, torch.Tensor) else value for value in args[1:]]
        name = getattr(func, "__name__", "")
        if name in _ELEMENTWISE:
            return Logits(self._then(func, rest, kwargs), self.positions(), self.width)
        if name in _CASTS:
            cast = self._derive(lambda logits: func(logits, *rest, **kwargs), self.hidden)
            cast.projection = cast._then(func, rest, kwargs)
            return cast
        if name.endswith("_") and name[:-1] in _ELEMENTWISE and list(self.relatives) == [id(self)]:
            self.projection = self._then(func, rest, kwargs)
            self._begin()
            return self
        return None

    def _then(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Projection:
        return replace(self.projection, steps=(*self.projection.steps, (function, args, kwargs)))

    def _derive(self, function: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor) -> Any:
        """What `function` makes of these logits: a view of them, or a copy where a tensor's would be one."""
        if self.tensor is not None:
            return function(self.tensor)
        self.positions()
        derived, made = Logits(self.projection, hidden, self.width, like=self), self.made
        derived.made = _Made(lambda: function(made.tensor()))
        return derived

    def positions(self) -> torch.Tensor:
        """The layer's input; WorkFailed where it has been written to since."""
        return unchanged(self.hidden, self.version)

    def whole(self, reason: str) -> torch.Tensor:
        """All logits as a tensor, for an operation that has no chunked form.

        What may share its memory becomes a tensor with it, so that a write into one is seen by the others.
        """
        if self.tensor is None:
            warnings.warn(
                f"policy 'head': the logits are computed whole, as the model's loss calls {reason}", stacklevel=3
            )
            for relative in list(self.relatives.values()):
                relative.tensor = relative.made.tensor()
        assert self.tensor is not None
        return self.tensor


class _Made:
    """A tensor that is made when it is first asked for."""

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        self.make: Callable[[], torch.Tensor] | None = make

    def tensor(self) -> torch.Tensor:
        if self.make is not None:
            with torch.enable_grad():
                self.made, self.make = self.make(), None
        return self.made


def _same_for_all_rows(value: Any) -> bool:
    """A number, or a tensor over the vocabulary alone (a bias)."""
    if isinstance(value, torch.Tensor):
        return value.numel() == value.shape[-1:].numel()
    return not isinstance(value, Logits)


def _operator(name: str) -> Any:
    function = getattr(torch.Tensor, name)
    return lambda self, *args: Logits.__torch_function__(function, (), (self, *args))


for _name, _function in _OPERATORS.items():
    setattr(Logits, _name, _operator(_function))
Logits.__hash__ = object.__hash__  # type: ignore[method-assign]
