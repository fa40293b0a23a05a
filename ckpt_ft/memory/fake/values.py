"""Known values of small tensors in a trace: masks, positions and labels of a batch, and what is computed from them.

They decide which attention kernel runs (is anything padded or packed?) and how large some results are (`nonzero`). So
an op whose tensors all have known values is also computed for real, besides the fake one. Floating-point values are
known only if they are made of constants (a mask of `torch.ones`); the model's weights and activations never are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ckpt_ft.compat.tensors import FakeTensor, no_modes, schema_of, storage_pointer
from ckpt_ft.memory.cost.op_work import tensors

aten = torch.ops.aten
_VALUE = "_ckpt_ft_value"  # in the attributes of a fake tensor

_WHOLE = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_MOST, _MOST_FLOATS = 1 << 20, 1 << 16  # elements: enough for a batch's tokens, not for a mask of all pairs
_MOST_SIZES = 8  # of one tensor
_COMPUTED = ("aten", "c10d")  # the fake process group leaves a rank's values as they are
_NO_VALUE = ("aten::empty", "aten::new_empty")
_LIFT, _NOT_EQUAL = aten.lift_fresh.default, aten.ne.Tensor  # isnan() is x != x
_IS_NUMBER = {aten.eq.Scalar: False, aten.ne.Scalar: True}  # no unknown float is taken to be exactly a number

UNKNOWN = object()


class Values:
    """Known values of fake tensors. Each is an attribute of its fake tensor; values share storage as the fakes do."""

    def __init__(self) -> None:
        self._lost: dict[int, torch.UntypedStorage] = {}  # by address: values that were overwritten with unknown ones

    def of(self, tensor: Tensor) -> Tensor | None:
        """The values of `tensor`, None if they are not known."""
        value = tensor.__dict__.get(_VALUE) if type(tensor) is FakeTensor else None
        return None if value is None or storage_pointer(value.untyped_storage()) in self._lost else value

    def keep(self, fake: Tensor, real: Tensor) -> None:
        """Copy the values of `real` to `fake`, which replaces it, if they are few integers."""
        if is_small(real):
            attach(fake, real)

    def set(self, fake: Tensor, number: float) -> None:
        """Assume that every element of `fake` is `number`."""
        with no_modes():
            vars(fake)[_VALUE] = torch.tensor(number, dtype=fake.dtype).expand(fake.shape)

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Set the values of `out`, the result of an op, if they follow from those of the arguments."""
        if args and type(args[0]) is FakeTensor and _VALUE not in args[0].__dict__:
            if type(out) is FakeTensor and out.dtype.is_floating_point:
                return  # nearly all of a model's ops, so this comes first
            if func in _IS_NUMBER and args[0].dtype.is_floating_point:  # an image that is all zeros is a padded one
                self.set(out, _IS_NUMBER[func])
            if _kind(func).needs_first:
                return
        kind = _kind(func)
        if kind.finds_nan or (func is _NOT_EQUAL and args[0] is args[1]):
            self.set(out, False)  # not in a model's numbers
            return
        if func is _LIFT:  # the argument is a real tensor, made by torch.tensor(...)
            self.keep(out, args[0])
            return
        if (type(out) is FakeTensor and not _is_few(out)) or (out is None and not kind.writes):
            return
        real = self.compute(func, args, kwargs)
        if real is not UNKNOWN:
            _attach(out, real)
        for index in kind.writes if real is UNKNOWN else ():
            self._forget(args[index : index + 1])

    def _forget(self, written: tuple[Any, ...]) -> None:
        """Forget the values of an overwritten tensor and of tensors that share its storage."""
        for known in map(self.of, tensors(written)):
            if known is not None:
                storage = known.untyped_storage()
                self._lost[storage_pointer(storage)] = storage

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The op's result for known arguments; UNKNOWN if an argument is not known or the result has no values."""
        if not _kind(func).has_values:
            return UNKNOWN
        try:
            known, named = self._known(args), {name: self._known(value) for name, value in kwargs.items()}
            with no_modes():
                return func(*known, **named)
        except (LookupError, RuntimeError):
            return UNKNOWN

    def _known(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if (known := self.of(value)) is None:
                raise LookupError
            return known
        return type(value)(self._known(item) for item in value) if isinstance(value, (tuple, list)) else value

    def count(self, mask: Tensor) -> int | None:
        """How many elements of `mask` are not zero, None if they are not known."""
        value = self.of(mask)
        with no_modes():
            return None if value is None else int(value.count_nonzero())

    def numbers(self, tensor: Tensor) -> list[Any] | None:
        """The elements of `tensor`, None if they are not known."""
        value = self.of(tensor)
        with no_modes():
            return None if value is None else value.tolist()

    def exactly(self, guess: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The op's result as fake tensors; if its arguments are not known, that of `guess`."""
        real = self.compute(func, args, kwargs)
        return guess(func, args, kwargs) if real is UNKNOWN else _as_fake(real)


class _Kind(NamedTuple):
    has_values: bool  # it can be computed on the host, with the same result each time
    needs_first: bool  # its result is unknown if its first argument is
    finds_nan: bool
    writes: tuple[int, ...]  # indices of arguments that it writes to


@cache
def _kind(func: Any) -> _Kind:
    random = torch.Tag.nondeterministic_seeded in func.tags
    finds_nan = func in (aten.isnan.default, aten.isinf.default)
    alias = [argument.alias_info for argument in schema_of(func).arguments]
    writes = tuple(index for index, info in enumerate(alias) if info is not None and info.is_write)
    return _Kind(
        has_values=func.namespace in _COMPUTED and not random and not schema_of(func).name.startswith(_NO_VALUE),
        needs_first=writes in ((), (0,)) and not (finds_nan or func in (_LIFT, _NOT_EQUAL)),
        finds_nan=finds_nan,
        writes=writes,
    )


def is_small(tensor: Tensor) -> bool:
    """Whether `tensor` holds few integers, like masks, positions and labels."""
    return tensor.dtype in _WHOLE and tensor.numel() <= _MOST and tensor.device.type != "meta"


def holds_sizes(tensor: Tensor) -> bool:
    """Whether `tensor`, held by a model, is a list of sizes that decide shapes (FRoD's sparse matrices have one)."""
    return is_small(tensor) and tensor.dtype is torch.int64 and tensor.dim() == 1 and tensor.numel() <= _MOST_SIZES


def attach(fake: Tensor, real: Tensor) -> None:
    with no_modes():
        vars(fake)[_VALUE] = real.detach().to("cpu", copy=True)


def _is_few(tensor: Tensor) -> bool:
    return tensor.numel() <= (_MOST if tensor.dtype in _WHOLE else _MOST_FLOATS)


def _attach(fake: Any, real: Any) -> None:
    if isinstance(fake, (tuple, list)):
        for one, other in zip(fake, real, strict=True):
            _attach(one, other)
    elif type(fake) is FakeTensor and _is_few(real):
        vars(fake)[_VALUE] = real


def _as_fake(real: Any) -> Any:
    if isinstance(real, Tensor):
        fake = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="cpu")
        _attach(fake, real)
        return fake
    return type(real)(_as_fake(item) for item in real) if isinstance(real, (tuple, list)) else real
