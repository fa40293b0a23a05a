"""What a memory report holds: the figures of each process, a prediction beside them, and where they come from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ckpt_ft.export.holders import Holder
from ckpt_ft.export.timeline import Timeline
from ckpt_ft.memory.record.events import PHASES
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.reading import Bytes, Seconds

STRETCHES = 200  # of a history, at most; even
FIGURES = ("allocated", "reserved", "active")  # of torch's allocator; on CPU only the first exists


@dataclass
class History:
    """Peaks over a run, in stretches of measured steps: each with its highest, so that a long run stays short.

    steps: the first step of each stretch. allocated: phase -> bytes; reserved: bytes, empty on CPU.
    every: how many measured steps a stretch has; filled: how many the last one has so far.
    """

    steps: list[Bytes] = field(default_factory=list)
    allocated: dict[str, list[Bytes]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    reserved: list[Bytes] = field(default_factory=list)
    every: Bytes = 1
    filled: Bytes = 0

    def add(self, step: int, peaks: dict[str, dict[str, int]]) -> None:
        """Note the peaks (phase -> figure -> bytes) of a measured step."""
        reserved = [figures["reserved"] for figures in peaks.values() if "reserved" in figures]
        values = {phase: peaks.get(phase, {}).get("allocated", 0) for phase in PHASES}
        if self.steps and self.filled < self.every:
            self.filled += 1
            for phase, column in self.allocated.items():
                column[-1] = max(column[-1], values[phase])
            self.reserved[-1:] = [max(self.reserved[-1:] + reserved)] if reserved else []
            return
        if len(self.steps) == STRETCHES:
            self._halve()
        self.steps.append(step)
        self.filled = 1
        for phase, column in self.allocated.items():
            column.append(values[phase])
        self.reserved += [max(reserved)] if reserved else []

    def _halve(self) -> None:
        """Two stretches become one."""
        self.every *= 2
        self.steps = self.steps[::2]
        self.allocated = {phase: _pairs(column) for phase, column in self.allocated.items()}
        self.reserved = _pairs(self.reserved)


def _pairs(values: list[int]) -> list[int]:
    return [max(values[i : i + 2]) for i in range(0, len(values), 2)]


@dataclass
class RankMemory:
    """What one process measured.

    device: "cpu", or the GPU's name. steps: optimizer steps, of which `sampled` were measured.
    peaks: phase -> figure ("allocated", on CUDA also "reserved" and "active") -> bytes, the most in any measured step.
    at_peak: category -> bytes when the most was allocated; holders: the largest groups of it. Empty where unknown.
    seconds: per step, those slowed by the measurement left out; None when there were no others.
    retries, ooms: CUDA allocations that first had to give cached memory back, and that failed.
    history: peaks over the measured steps.
    predicted: of a trace of this process's own step.
    """

    rank: Bytes
    device: str
    steps: Bytes
    sampled: Bytes
    peaks: dict[str, dict[str, Bytes]]
    at_peak: dict[str, Bytes] = field(default_factory=dict)
    holders: list[Holder] = field(default_factory=list)
    seconds: Seconds | None = None
    retries: Bytes = 0
    ooms: Bytes = 0
    history: History = field(default_factory=History)
    predicted: Prediction | None = None

    def peak(self, figure: str = "allocated") -> int | None:
        """The most bytes over all phases; None for a figure that was not measured."""
        return max((phase[figure] for phase in self.peaks.values() if figure in phase), default=None)


@dataclass
class Prediction:
    """The figures of a trace. Bytes; `reserved` and `seconds` are None on "cpu", where there are none."""

    device: str
    allocated: Bytes
    peaks: dict[str, Bytes]
    reserved: Bytes | None = None
    seconds: Seconds | None = None
    seconds_parts: dict[str, Seconds] = field(default_factory=dict)
    bound: str = ""

    @classmethod
    def from_trace(cls, trace: StepTrace) -> Prediction:
        """The measured step of `trace`."""
        if trace.device == "cpu":
            return cls(trace.device, trace.peak_allocated, trace.peaks)
        took = trace.seconds_parts
        allocated, reserved = trace.peak_allocated, trace.peak_reserved
        return cls(trace.device, allocated, trace.peaks, reserved, took.total, took.parts, took.bound)


@dataclass
class MaxBatch:
    """The largest batch that fits a device: as predicted, and as proved by running it (None: not tried)."""

    device: str
    predicted: Bytes
    proved: Bytes | None = None


@dataclass
class PolicyRow:
    """Another policy for the same step: predicted peak in bytes and seconds per step."""

    policy: str
    peak: Bytes
    seconds: Seconds | None = None


@dataclass
class Facts:
    """What is read from a report's provenance; it may hold more."""

    command: str = ""
    machine: str = ""
    policy: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class RunMemory:
    """What a run needed; every part but the ranks is optional.

    provenance: what `report.provenance()` returns. timeline: of rank 0's fullest measured step, or predicted.
    """

    provenance: dict[str, Any]
    ranks: list[RankMemory]
    max_batch: MaxBatch | None = None
    next_policies: list[PolicyRow] = field(default_factory=list)
    timeline: Timeline | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def fullest(self) -> RankMemory:
        """The rank whose peak is highest."""
        return max(self.ranks, key=lambda rank: rank.peak() or 0)


def merge_peaks(into: dict[str, dict[str, int]], step: dict[str, dict[str, int]]) -> None:
    """Raise the peaks in `into` to those of one more `step`."""
    for phase in PHASES:
        for figure, nbytes in step.get(phase, {}).items():
            known = into.setdefault(phase, {})
            known[figure] = max(known.get(figure, 0), nbytes)
