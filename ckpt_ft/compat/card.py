"""What torch asks of a card besides its public functions."""

from __future__ import annotations

from . import Table

__getattr__ = Table(
    __name__,
    "torch 2.11 to 2.14",
    """
lazy_init: torch.cuda._lazy_init
lazy_call: torch.cuda._lazy_call
    initialise a card, which a dry run does not have
record_history: torch.cuda.memory._record_memory_history
    called by scripts that record their allocations; a dry run has none
""",
)
