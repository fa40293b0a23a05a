"""Scratch of CPU kernels in a trace of fake tensors: each call is made once for real, on zeros of its shapes.

What it takes is the kernel's answer on this machine, as record/scratch.py has it from a real step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from ckpt_ft.memory.record.casts import AFTER as CASTS
from ckpt_ft.memory.record.opinfo import After
from ckpt_ft.memory.record.scratch import KERNELS, MATMULS, observed, takes_scratch
from ckpt_ft.memory.record.tracker import Tracker

from .memo import call_key

_LONGEST = 2**34  # multiplications: about a second
_known: dict[Any, int] = {}  # bytes of scratch, by call


def scratch(tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """Record what the kernel takes inside for arguments of these shapes, strides and dtypes."""
    if not takes_scratch(func, args) or (func in MATMULS and _multiplied(args) > _LONGEST):
        return
    key = func, call_key(args, kwargs), torch.get_num_threads(), torch.backends.mkldnn.enabled
    if key not in _known:
        with _disable_current_modes():
            real, named = tree_map_only(Tensor, _zeros, (args, kwargs))
            _known[key] = observed(lambda: func(*real, **named))[1]
    if _known[key]:
        tracker.scratch(_known[key], str(func))


def _multiplied(args: tuple[Any, ...]) -> int:
    """Multiplications of a matmul, whose operands are its last two arguments."""
    return int(args[-2].numel() * args[-1].shape[-1])


def _zeros(fake: Tensor) -> Tensor:
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype).zero_()


AFTER: dict[Any, After] = {**CASTS, **dict.fromkeys(KERNELS, scratch)}
