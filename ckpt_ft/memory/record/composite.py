"""Composite ops, which are only others in a row (aten.linear): autograd calls those, inference mode the op itself."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode


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
