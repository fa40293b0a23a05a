"""What records a step is not compiled, where the model is: it runs between the model's own ops, not in its graph."""

from __future__ import annotations

import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

_RECORDS = ("ckpt_ft.memory.record", "ckpt_ft.memory.measure", "ckpt_ft.memory.fake")


def leave_uncompiled() -> None:
    """Have torch.compile pass over the tracker, once it is in use.

    Left to itself it compiles every function of a dispatch mode that it meets, again and again, until it gives up.
    """
    if "torch._dynamo" in sys.modules:
        _pass_over()
        # The hooks are the position's: whose forward runs. A compiled module's comes twice; once is enough to know.
        warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")


@cache
def _pass_over() -> None:
    from torch._dynamo import trace_rules

    for name in _RECORDS:
        trace_rules.add(name)


def run_eagerly() -> AbstractContextManager[Any]:
    """Runs compiled functions eagerly from this call on until the context ends.

    Under a dispatch mode `torch.compile` would give them up for the rest of the process, or refuse to run them
    (`fullgraph=True`, as in torchao's optimizers).
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
