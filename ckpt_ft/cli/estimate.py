"""Estimate: what `ckpt-ft estimate` answers, printed, as JSON or on a page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_ft.memory.record.events import Holder

if TYPE_CHECKING:
    from ckpt_ft.planning.leaner import Answer


@dataclass(frozen=True)
class Estimate:
    """What `ckpt-ft estimate` answers; bytes and seconds, all predicted."""

    model: str
    policy: str
    device: str
    batch_size: int
    accumulation: int
    shape: dict[str, int]
    peak_allocated: int
    peak_reserved: int
    peaks: dict[str, int]
    at_peak: dict[str, int]
    holders: list[Holder]
    seconds: float | None
    seconds_parts: dict[str, float]  # by what they go to
    bound: str  # what the step could not be faster than
    capacity: int | None
    context: int
    notes: list[str]
    launch: str = ""
    answer: Answer | None = None  # where it does not fit

    @property
    def headroom(self) -> int | None:
        """Bytes left on the device; negative where the step does not fit. None without a capacity."""
        return None if self.capacity is None else self.capacity - self.context - self.peak_reserved
