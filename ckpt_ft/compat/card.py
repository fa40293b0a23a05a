"""What torch asks of a card besides its public functions."""

from __future__ import annotations

from . import Table

__getattr__ = Table(
    __name__,
    "torch 2.11 to 2.14",
    """
record_history: torch.cuda.memory._record_memory_history
    called by scripts that record their allocations; a dry run has none
""",
)
