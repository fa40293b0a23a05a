"""Values of small whole-number tensors in a trace: masks, positions and labels that a step brings, and what follows.

They decide which attention kernel runs (is anything padded or packed?) and how large some results are (`nonzero`). An
op all of whose tensors are known is therefore also computed for real, beside the fake one. Floating point is never
known: that is the model's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

_WHOLE = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_MOST = 1 << 20  # elements: a batch's tokens; not a mask of every pair of them
_NO_VALUE = ("aten::empty", "aten::new_empty")


class _Unknown(Exception):
    pass


class Values:
    """The known values of fake tensors, each an attribute of its fake; views share storage as their fakes do."""

    def __init__(self) -> None:
        self._lost: dict[int, torch.UntypedStorage] = {}  # by address: since written to with what is not known

    def of(self, tensor: Tensor) -> Tensor | None:
        """The values of `tensor`, None where they are not known."""
        if type(tensor) is not FakeTensor:
            return tensor if is_small(tensor) else None
        value = tensor.__dict__.get("_value")
        if value is None:
            return tensor.constant if tensor.constant is not None and is_small(tensor.constant) else None
        return None if value.untyped_storage()._cdata in self._lost else value

    def keep(self, fake: Tensor, real: Tensor) -> None:
        """`fake` stands for `real`, whose values are copied if they are few whole numbers."""
        if is_small(real):
            with _disable_current_modes():
                fake._value = real.detach().to("cpu", copy=True)  # type: ignore[attr-defined]

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Give `out`, just made by an op, its values where they follow from those of the arguments."""
        if not isinstance(out, (tuple, list)) and (type(out) is not FakeTensor or not is_small(out)):
            return
        real = self.compute(func, args, kwargs)
        if real is not None:
            _attach(out, real)
        elif type(out) is FakeTensor and args and out is args[0] and "_value" in out.__dict__:
            storage = out.__dict__["_value"].untyped_storage()
            self._lost[storage._cdata] = storage

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an op gives for known arguments, None where one is not known or the result has no values."""
        if torch.Tag.nondeterministic_seeded in func.tags or func._schema.name.startswith(_NO_VALUE):
            return None
        try:
            with _disable_current_modes():
                return func(*self._known(args), **{name: self._known(value) for name, value in kwargs.items()})
        except (_Unknown, RuntimeError, IndexError):
            return None

    def _known(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            known = self.of(value)
            if known is None:
                raise _Unknown
            return known
        if isinstance(value, (tuple, list)):
            return type(value)(self._known(item) for item in value)
        return value

    def count(self, mask: Tensor) -> int | None:
        """How many elements of `mask` are not zero, None where they are not known."""
        value = self.of(mask)
        with _disable_current_modes():
            return None if value is None else int(value.count_nonzero())

    def exactly(self, guess: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the op gives, as fake tensors; where that is not known, what `guess` says."""
        real = self.compute(func, args, kwargs)
        return guess(func, args, kwargs) if real is None else _as_fake(real)


def is_small(tensor: Tensor) -> bool:
    """Whether `tensor` holds few whole numbers, as masks, positions and labels do."""
    return tensor.dtype in _WHOLE and tensor.numel() <= _MOST and tensor.device.type != "meta"


def _attach(fake: Any, real: Any) -> None:
    if isinstance(fake, (tuple, list)):
        for one, other in zip(fake, real, strict=True):
            _attach(one, other)
    elif type(fake) is FakeTensor and is_small(real):
        fake._value = real  # type: ignore[attr-defined]


def _as_fake(real: Any) -> Any:
    if isinstance(real, Tensor):
        fake = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="cpu")
        _attach(fake, real)
        return fake
    return type(real)(_as_fake(item) for item in real) if isinstance(real, (tuple, list)) else real
