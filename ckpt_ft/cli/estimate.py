"""Estimate: what `ckpt-ft estimate` answers, printed, as JSON or on a page."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_ft.export.holders import Holder
from ckpt_ft.planning.results import Suggestions
from ckpt_ft.reading import Bytes, Count, Seconds, read_json


@dataclass(frozen=True)
class Estimate:
    """What `ckpt-ft estimate` answers; bytes and seconds, all predicted."""

    model: str
    policy: str
    device: str
    batch_size: Count
    accumulation: Count
    shape: dict[str, int]
    peak_allocated: Bytes
    peak_reserved: Bytes
    peaks: dict[str, Bytes]
    at_peak: dict[str, Bytes]
    holders: list[Holder]
    seconds: Seconds | None
    seconds_parts: dict[str, float]  # by what they go to
    bound: str  # what the step could not be faster than
    capacity: Bytes | None
    context: Bytes
    notes: list[str]
    launch: str = ""
    answer: Suggestions | None = None  # where it does not fit

    @property
    def headroom(self) -> int | None:
        """Bytes left on the device; negative where the step does not fit. None without a capacity."""
        return None if self.capacity is None else self.capacity - self.context - self.peak_reserved

    @classmethod
    def from_json(cls, text: bytes, source: str) -> Estimate:
        """The estimate that was kept as JSON; raises UserError for what is none."""
        return read_json(cls, text, source, "an estimate")
