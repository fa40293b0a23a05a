"""How an op comes to a dispatch mode: as the composite that it is, or handed on by another Python dispatch.

A composite op is only others in a row (aten.linear). Autograd calls those; under inference mode the op itself comes.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

_CALL = OpOverload.__call__.__code__  # by which a Python dispatch hands an op on


@cache
def is_composite(func: OpOverload) -> bool:
    """Whether an op is made of others."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def in_parts(mode: TorchDispatchMode, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a composite op so that `mode`, which was handed it, is handed the ops that it is made of."""
    _push_mode(mode)
    try:
        return func.decompose(*args, **kwargs)
    finally:
        _pop_mode()


def handed_on() -> bool:
    """Whether the op that is being recorded comes from another Python dispatch: a mode's (SAC's), a DTensor's."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name == "__torch_dispatch__":
        frame = frame.f_back  # type: ignore[assignment]
    return (
        frame is not None
        and frame.f_code is _CALL
        and frame.f_back is not None
        and frame.f_back.f_code.co_name == "__torch_dispatch__"
    )
