"""What CPU kernels take in a trace of fake tensors: each call is made once for real, on zeros of its shapes.

Scratch is the kernel's answer on this machine, as record/scratch.py has it from a real step; so is the workspace that
an LSTM's backward is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from ckpt_ft.memory.record.casts import AFTER as CASTS
from ckpt_ft.memory.record.opinfo import After, Rule
from ckpt_ft.memory.record.scratch import KERNELS, MATMULS, observed, takes_scratch
from ckpt_ft.memory.record.tracker import Tracker

from .memo import call_key

aten = torch.ops.aten
_LONGEST = 2**34  # multiplications: about a second
_TRAINS = 15  # of mkldnn_rnn_layer's arguments
_known: dict[Any, int] = {}  # bytes, by call


def scratch(tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """Record what the kernel takes inside for arguments of these shapes, strides and dtypes."""
    if not takes_scratch(func, args) or (func in MATMULS and _multiplied(args) > _LONGEST):
        return
    nbytes = _asked(_scratch_of, func, args, kwargs)
    if nbytes:
        tracker.scratch(nbytes, str(func))


def lstm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The fake kernel gives backward a workspace without bytes. [torch/_meta_registrations.py, mkldnn_rnn_layer]"""
    *results, workspace = func(*args, **kwargs)
    nbytes = _asked(_workspace_of, func, args, kwargs) if args[_TRAINS] else 0
    return (*results, workspace.new_empty(nbytes))


def _scratch_of(call: Callable[[], Any]) -> int:
    return observed(call)[1]


def _workspace_of(call: Callable[[], Any]) -> int:
    nbytes: int = call()[-1].nbytes
    return nbytes


def _asked(bytes_of: Callable[[Callable[[], Any]], int], func: Any, args: Any, kwargs: Any) -> int:
    """`bytes_of` the call on real zeros."""
    key = bytes_of, func, call_key(args, kwargs), torch.get_num_threads(), torch.backends.mkldnn.enabled
    if key not in _known:
        with _disable_current_modes():
            real, named = tree_map_only(Tensor, _zeros, (args, kwargs))
            _known[key] = bytes_of(lambda: func(*real, **named))
    return _known[key]


def _multiplied(args: tuple[Any, ...]) -> int:
    """Multiplications of a matmul, whose operands are its last two arguments."""
    return int(args[-2].numel() * args[-1].shape[-1])


def _zeros(fake: Tensor) -> Tensor:
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype).zero_()


RULES: dict[Any, Rule] = {aten.mkldnn_rnn_layer.default: lstm}
AFTER: dict[Any, After] = {**CASTS, **dict.fromkeys(KERNELS, scratch)}
