"""Classifies an op for a dispatch mode: how to handle it, where the call came from, and how to describe it.

An op is called as a composite or as its parts, from autograd or from another Python dispatch, or under torch.compile.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ckpt_ft.compat.tensors import DispatchKey, FakeTensor, OpOverload, TorchDispatchMode, no_modes

_CALL = OpOverload.__call__.__code__  # through which a Python dispatch calls the op again
_RECORDING = tuple(f"ckpt_ft.memory.{room}" for room in ("record", "cost", "measure", "fake", "rules"))

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]  # (op, args, kwargs) -> result
After = Callable[[Any, Any, tuple[Any, ...], dict[str, Any], Any], None]  # (recorder, op, args, kwargs, result)


@dataclass(eq=False, slots=True)
class Handling:
    """How a tracker treats an op, worked out at its first call and looked up once per call: OpOverload's hash is slow.

    Attributes:
        rule: called in place of the op.
        after: called once its results are recorded.
        collective: it is one of torch.distributed's.
        silent: it has no tensors and does no work, like record_function: it is not recorded.
        calls: earlier calls on fake tensors, by `call_key`; None where results depend on more than shapes.
        answered: on fake tensors values.py or data_dependent_ops.py computes it.
        observe: called with what data_dependent_ops.py learns of a call: its arguments and its result.
        on_host: returns which of its results are on the host.
    """

    name: str
    rule: Rule | None = None
    after: After | None = None
    collective: bool = False
    silent: bool = False
    calls: Any = None
    answered: bool = False
    observe: Callable[[tuple[Any, ...], Any], None] | None = None
    on_host: Callable[[tuple[Any, ...]], tuple[int, ...]] | None = None


_is_wrapper = cache(lambda kind: hasattr(kind, "__tensor_flatten__"))
aten = torch.ops.aten


def wraps(types: Sequence[type]) -> bool:
    """Whether an op is called on tensor subclasses that wrap other tensors."""
    return any(map(_is_wrapper, types))


@cache
def is_composite(func: OpOverload) -> bool:
    """Whether an op only calls others, as aten.linear does: autograd replaces it by them, inference mode does not."""
    return func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)


def in_parts(mode: TorchDispatchMode, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a composite op so that `mode`, to which it was dispatched, sees its parts instead."""
    TorchDispatchMode.__enter__(mode)
    try:
        return func.decompose(*args, **kwargs)
    finally:
        TorchDispatchMode.__exit__(mode, None, None, None)


def from_python_dispatch() -> bool:
    """Whether the op being recorded was called by another Python dispatch: a mode's (SAC's) or a DTensor's."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name == "__torch_dispatch__":
        frame = frame.f_back  # type: ignore[assignment]
    return (
        frame is not None
        and frame.f_code is _CALL
        and frame.f_back is not None
        and frame.f_back.f_code.co_name == "__torch_dispatch__"
    )


@cache
def leave_uncompiled() -> None:
    """Make torch.compile skip the tracker's functions: it would compile each again and again, until it gives up."""
    from ckpt_ft.compat.compiler import trace_rules

    for name in _RECORDING:
        trace_rules.add(name)


def unrecorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose ops no dispatch mode sees: they are not the step's."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with no_modes():
            return function(*args, **kwargs)

    return call


class Uncacheable(Exception):
    """A call's result depends on more than the shapes of its arguments."""


def call_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A hashable description of an op's arguments, or None where its result depends on more than that."""
    parts: list[Any] = [torch.get_default_dtype(), *kwargs]
    try:
        _describe((*args, *kwargs.values()), parts)
    except Uncacheable:
        return None
    return tuple(parts)


def _describe(values: Any, parts: list[Any]) -> None:
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.layout is not torch.strided:
                raise Uncacheable
            parts += (value.shape, value.stride(), value.dtype, value.storage_offset())
        elif kind is list or kind is tuple:
            parts.append(len(value))
            _describe(value, parts)
        elif isinstance(value, Tensor) or kind.__hash__ is None:
            raise Uncacheable
        else:
            parts += (kind, value)  # the type too: 1, 1.0 and True are equal
