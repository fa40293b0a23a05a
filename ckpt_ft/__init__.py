"""ckpt_ft: fit fine-tuning into memory, with activation checkpointing that is predicted, chosen and verified.

The names below are the stable API; everything else may change. Each name is imported on first access (PEP 562), so
that `import ckpt_ft` is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt_ft.checkpointing.applied_policy import AppliedPolicy
    from ckpt_ft.checkpointing.apply import apply_policy
    from ckpt_ft.checkpointing.parity import check_parity
    from ckpt_ft.memory.fake.step import trace_step
    from ckpt_ft.memory.measure.profiler import MemoryProfiler
    from ckpt_ft.planning.batch_size import find_max_batch_size
    from ckpt_ft.planning.estimate import estimate
    from ckpt_ft.planning.max_length import find_max_length
    from ckpt_ft.planning.plan import plan
    from ckpt_ft.planning.results import Estimate
    from ckpt_ft.policy import Policy
    from ckpt_ft.spec.training_spec import TrainingSpec
    from ckpt_ft.training.arguments import ACArguments
    from ckpt_ft.training.callback import ACCallback
    from ckpt_ft.workloads.workload import Workload

    __version__: str

__all__ = [
    "ACArguments",
    "ACCallback",
    "AppliedPolicy",
    "Estimate",
    "MemoryProfiler",
    "Policy",
    "TrainingSpec",
    "Workload",
    "__version__",
    "apply_policy",
    "check_parity",
    "estimate",
    "find_max_batch_size",
    "find_max_length",
    "plan",
    "trace_step",
]

_HOMES = {
    "ACArguments": "training.arguments",
    "ACCallback": "training.callback",
    "AppliedPolicy": "checkpointing.applied_policy",
    "Estimate": "planning.results",
    "MemoryProfiler": "memory.measure.profiler",
    "Policy": "policy",
    "TrainingSpec": "spec.training_spec",
    "Workload": "workloads.workload",
    "apply_policy": "checkpointing.apply",
    "check_parity": "checkpointing.parity",
    "estimate": "planning.estimate",
    "find_max_batch_size": "planning.batch_size",
    "find_max_length": "planning.max_length",
    "plan": "planning.plan",
    "trace_step": "memory.fake.step",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        found: Any = version(__name__)
    elif name in _HOMES:
        found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
