"""Caches what ops return for arguments of given shapes, so that a repeated op on fake tensors costs microseconds.

FakeTensorMode has a cache of its own, which spends most of its time on symbolic shapes and several devices. A trace
has one device and no symbols. What an op returns (new tensors, views of an argument, or the argument itself) depends
only on its arguments' shapes, strides and dtypes, and on the default dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ckpt_ft.memory.record.dispatch import Uncacheable

from .fakes import CPU, Fakes

_CHANGES_SHAPE = {"aten::set_", "aten::resize_", "aten::resize_as_", "aten::lift_fresh", "aten::_local_scalar_dense"}


_LARGEST = 100_000  # cached calls for one kind of device, about 100 MB
_Calls = dict[Any, tuple[Any, Any]]  # key -> recipe, and the `more` of `keep`
# By compute capability and whether fp32 may be rounded, for each op. Shared, as a plan traces one model many times.
_shared: dict[tuple[int, bool, bool], dict[Any, _Calls]] = {}


def forget() -> None:
    """Empty the cache, as in a new process."""
    _shared.clear()


class Memo:
    """Results of fake ops by op and arguments, shared by all traces for one compute capability (0: the CPU)."""

    def __init__(self, fakes: Fakes, arch: int) -> None:
        self.fakes = fakes
        rounds = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        self._known = _shared.setdefault((arch, *rounds), {})
        if sum(map(len, self._known.values())) > _LARGEST:
            self._known.clear()

    def of(self, func: Any) -> Remembered | None:
        """The cached calls of one op; None if its result depends on more than shapes."""
        schema = func._schema
        into_given = any(argument.is_out for argument in schema.arguments)  # `out=` is no new tensor
        if into_given or schema.name in _CHANGES_SHAPE or torch.Tag.inplace_view in func.tags:
            return None
        return Remembered(self.fakes, self._known.setdefault(func, {}))


class Remembered:
    """Results of one op."""

    def __init__(self, fakes: Fakes, known: _Calls) -> None:
        self._fakes, self._known = fakes, known

    def get(self, key: Any, args: tuple[Any, ...]) -> tuple[Any, Any] | None:
        """The result of a cached call, made anew, and the `more` that was kept with it; None if the call is new."""
        known = self._known.get(key)
        if known is None:
            return None
        return self._make(known[0], args), known[1]

    def keep(self, key: Any, args: tuple[Any, ...], out: Any, more: Any) -> None:
        """Cache how to make `out` again; does nothing if the result depends on more than shapes."""
        with suppress(Uncacheable):
            self._known[key] = _recipe(out, args, _homes(args)), more

    def _make(self, recipe: Any, args: tuple[Any, ...]) -> Any:
        kind = recipe[0]
        if kind == "tensor":
            _, source, shape, stride, offset, dtype = recipe
            if source is None:
                return self._fakes.new(shape, stride, dtype)
            return self._fakes.view(args[source], shape, stride, offset, dtype)
        if kind == "argument":
            return args[recipe[1]]
        if kind == "sequence":
            return recipe[1]([self._make(item, args) for item in recipe[2]])
        return recipe[1]


def _homes(args: tuple[Any, ...]) -> dict[int, int | None]:
    """For each storage among the arguments, by address, the index of the argument that has it; None within a list."""
    homes: dict[int, int | None] = {}
    for at, value in enumerate(args):
        for item, place in [(value, at)] if isinstance(value, Tensor) else [(item, None) for item in _listed(value)]:
            if type(item) is FakeTensor:
                homes.setdefault(item.untyped_storage()._cdata, place)
    return homes


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()


def _recipe(out: Any, args: tuple[Any, ...], homes: dict[int, int | None]) -> Any:
    if out is None or type(out) is int:  # attention returns lengths of sequences besides its output
        return "plain", out
    if isinstance(out, (tuple, list)):
        return "sequence", type(out), [_recipe(item, args, homes) for item in out]
    if (
        type(out) is not FakeTensor
        or out.constant is not None
        or out.fake_device != CPU
        or out.layout is not torch.strided
    ):
        raise Uncacheable
    storage = out.untyped_storage()
    if storage._cdata in homes:
        at = homes[storage._cdata]
        if at is None:
            raise Uncacheable
        same = next((place for place in range(at, len(args)) if args[place] is out), None)
        if same is not None:
            return "argument", same
        return "tensor", at, out.shape, out.stride(), out.storage_offset(), out.dtype
    span = 1 + sum((n - 1) * step for n, step in zip(out.shape, out.stride(), strict=True)) if out.numel() else 0
    if out.storage_offset() or storage.nbytes() != span * out.itemsize or out.is_conj() or out.is_neg():
        raise Uncacheable
    return "tensor", None, out.shape, out.stride(), 0, out.dtype
