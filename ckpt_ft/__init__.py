"""ckpt_ft: fit fine-tuning into memory, with activation checkpointing that is predicted, chosen and proved."""

from ckpt_ft.checkpointing.apply import AppliedPolicy, apply_policy
from ckpt_ft.checkpointing.parity import check_parity
from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.memory.measure.profiler import MemoryProfiler
from ckpt_ft.planning.batch_size import find_max_batch_size
from ckpt_ft.planning.plan import plan

from .policy import Policy

__all__ = [
    "AppliedPolicy",
    "MemoryProfiler",
    "Policy",
    "apply_policy",
    "check_parity",
    "find_max_batch_size",
    "plan",
    "trace_step",
]
