"""Values of small tensors in a trace: masks, positions and labels that a step brings, and what follows from them.

They decide which attention kernel runs (is anything padded or packed?) and how large some results are (`nonzero`). An
op all of whose tensors are known is therefore also computed for real, beside the fake one. Of floating point only what
is made of constants is known (a mask of `torch.ones`), never the model's weights or what they are applied to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from .opinfo import tensors

aten = torch.ops.aten

_WHOLE = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_MOST, _MOST_FLOATS = 1 << 20, 1 << 16  # elements: a batch's tokens; not a mask of every pair of them
_NO_VALUE = ("aten::empty", "aten::new_empty")

UNKNOWN = object()


class _Unknown(Exception):
    pass


class Values:
    """The known values of fake tensors, each an attribute of its fake; views share storage as their fakes do."""

    def __init__(self) -> None:
        self._lost: dict[int, torch.UntypedStorage] = {}  # by address: since written to with what is not known

    def of(self, tensor: Tensor) -> Tensor | None:
        """The values of `tensor`, None where they are not known."""
        value = tensor.__dict__.get("_value") if type(tensor) is FakeTensor else None
        return None if value is None or value.untyped_storage()._cdata in self._lost else value

    def keep(self, fake: Tensor, real: Tensor) -> None:
        """`fake` stands for `real`, whose values are copied if they are few whole numbers."""
        if is_small(real):
            with _disable_current_modes():
                fake._value = real.detach().to("cpu", copy=True)  # type: ignore[attr-defined]

    def set(self, fake: Tensor, number: float) -> None:
        """Every element of `fake` is taken to be `number`."""
        with _disable_current_modes():
            fake._value = torch.tensor(number, dtype=fake.dtype).expand(fake.shape)  # type: ignore[attr-defined]

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Give `out`, just made by an op, its values where they follow from those of the arguments."""
        if _finds_nan(func, args):  # not in a model's numbers
            self.set(out, False)
            return
        if (type(out) is FakeTensor and not _is_few(out)) or (out is None and not func._schema.is_mutable):
            return
        if func is aten.lift_fresh.default:  # of torch.tensor(...): a real one
            self.keep(out, args[0])
            return
        real = self.compute(func, args, kwargs)
        if real is not UNKNOWN:
            _attach(out, real)
        elif func._schema.is_mutable:
            self._forget(func, args)

    def _forget(self, func: Any, args: tuple[Any, ...]) -> None:
        """What an op writes to is no longer known, nor are the tensors that share it."""
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tensors((value,)):
                    known = self.of(tensor)
                    if known is not None:
                        storage = known.untyped_storage()
                        self._lost[storage._cdata] = storage

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an op gives for known arguments, UNKNOWN where one is not known or the result has no values."""
        if func.namespace != "aten" or func._schema.name.startswith(_NO_VALUE):  # others may launch or communicate
            return UNKNOWN
        if torch.Tag.nondeterministic_seeded in func.tags:
            return UNKNOWN
        try:
            known, named = self._known(args), {name: self._known(value) for name, value in kwargs.items()}
            with _disable_current_modes():
                return func(*known, **named)
        except (_Unknown, RuntimeError, IndexError):
            return UNKNOWN

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

    def numbers(self, tensor: Tensor) -> list[Any] | None:
        """The elements of `tensor`, None where they are not known."""
        value = self.of(tensor)
        with _disable_current_modes():
            return None if value is None else value.tolist()

    def exactly(self, guess: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the op gives, as fake tensors; where that is not known, what `guess` says."""
        real = self.compute(func, args, kwargs)
        return guess(func, args, kwargs) if real is UNKNOWN else _as_fake(real)


def _finds_nan(func: Any, args: tuple[Any, ...]) -> bool:
    return func in (aten.isnan.default, aten.isinf.default) or (func is aten.ne.Tensor and args[0] is args[1])


def is_small(tensor: Tensor) -> bool:
    """Whether `tensor` holds few whole numbers, as masks, positions and labels do."""
    return tensor.dtype in _WHOLE and tensor.numel() <= _MOST and tensor.device.type != "meta"


def _is_few(tensor: Tensor) -> bool:
    """Whether values are followed this far; of floating point only constants come to have any."""
    return tensor.numel() <= (_MOST if tensor.dtype in _WHOLE else _MOST_FLOATS)


def _attach(fake: Any, real: Any) -> None:
    if isinstance(fake, (tuple, list)):
        for one, other in zip(fake, real, strict=True):
            _attach(one, other)
    elif type(fake) is FakeTensor and _is_few(real):
        fake._value = real  # type: ignore[attr-defined]


def _as_fake(real: Any) -> Any:
    if isinstance(real, Tensor):
        fake = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="cpu")
        _attach(fake, real)
        return fake
    return type(real)(_as_fake(item) for item in real) if isinstance(real, (tuple, list)) else real
