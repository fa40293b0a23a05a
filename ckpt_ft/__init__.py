"""ckpt_ft: fit fine-tuning into memory, with activation checkpointing that is predicted, chosen and proved."""

from .checkpointing.apply import AppliedPolicy, apply_policy
from .checkpointing.parity import check_parity
from .memory.fake import trace_step
from .memory.profiler import MemoryProfiler
from .planning.batch_size import find_max_batch_size
from .planning.plan import plan
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
