"""How ops reach a dispatch mode, and how a call of one is described.

An op comes as a composite or as its parts, from autograd or from another Python dispatch, or under torch.compile.
"""

from __future__ import annotations

import sys
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

_CALL = OpOverload.__call__.__code__  # through which a Python dispatch calls the op again
_RECORDING = tuple(f"ckpt_ft.memory.{room}" for room in ("record", "measure", "fake", "rules"))


@cache
def is_composite(func: OpOverload) -> bool:
    """Whether an op only calls other ops, as aten.linear does.

    Autograd replaces such an op by its parts; under inference mode the op itself is dispatched.
    """
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def in_parts(mode: TorchDispatchMode, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a composite op so that `mode`, to which it was dispatched, sees its parts instead."""
    _push_mode(mode)
    try:
        return func.decompose(*args, **kwargs)
    finally:
        _pop_mode()


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


def leave_uncompiled() -> None:
    """Make torch.compile skip the tracker's own functions, if torch.compile is in use.

    Otherwise it compiles every function of a dispatch mode that it meets, again and again, until it gives up.
    """
    if "torch._dynamo" in sys.modules:
        _skip_recording()
        # The context's hooks tell which module runs. A compiled module's calls them twice; once is enough.
        warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")


@cache
def _skip_recording() -> None:
    from torch._dynamo import trace_rules

    for name in _RECORDING:
        trace_rules.add(name)


class Uncacheable(Exception):
    """A call's result depends on more than the shapes of its arguments."""


def call_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A hashable description of an op's arguments, or None where its result depends on more than that."""
    parts: list[Any] = [torch.get_default_dtype()]
    try:
        _describe(args, parts)
        for name, value in kwargs.items():
            parts.append(name)
            _describe((value,), parts)
    except Uncacheable:
        return None
    return tuple(parts)


def _describe(values: Any, parts: list[Any]) -> None:
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.is_sparse:
                raise Uncacheable
            parts += (value.shape, value.stride(), value.dtype, value.storage_offset())
        elif kind is list or kind is tuple:
            parts.append(len(value))
            _describe(value, parts)
        elif isinstance(value, Tensor) or kind.__hash__ is None:
            raise Uncacheable
        else:
            parts += (kind, value)  # the type too: 1, 1.0 and True are equal
