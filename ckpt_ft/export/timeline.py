"""Memory over a step, by category: the data of plots, and of a report that is read back.

A trace has tens of thousands of events. A Timeline splits the step into at most `POINTS` stretches and keeps the
moment of each with the most bytes, so no peak is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .holders import Holder, holder_line

if TYPE_CHECKING:
    from ckpt_ft.memory.record.trace import StepTrace

# The colour of each category on a light background and on a dark one, in the order of the stack: cool colours for
# resident memory, warm ones for what a step adds. Okabe and Ito's palette, which is safe for colour-blind readers.
CATEGORY_COLOURS = {
    "parameters": ("#0072b2", "#2f8fd0"),
    "buffers": ("#003d66", "#6d8fb0"),
    "gradients": ("#009e73", "#26b58c"),
    "optimizer": ("#56b4e9", "#7cc7f0"),
    "activations": ("#e69f00", "#eab040"),
    "temporary": ("#d55e00", "#e27a35"),
    "communication": ("#cc79a7", "#d795ba"),
    "workspace": ("#999999", "#8d949c"),
}
# Kinds of host memory: the device copies from pinned memory by itself, and CUDA moves managed memory to and fro.
HOST_COLOURS = {
    "pinned": ("#0072b2", "#2f8fd0"), "pageable": ("#56b4e9", "#7cc7f0"), "managed": ("#cc79a7", "#d795ba"),
}  # fmt: skip
PHASES = ("forward", "backward", "optimizer")  # of a step, in order
POINTS = 1500


@dataclass
class Timeline:
    """Bytes by category at moments of one step.

    moments: numbers of the allocation events, rising; series: category -> bytes at each moment.
    marks: (event, phase that begins there). peak: the event of the peak. holders: the largest holders at the peak.
    source: "measured" or "predicted".

    Raises:
        ValueError: there are no moments, or a series is not one of a known category with as many values.
    """

    moments: list[int]
    series: dict[str, list[int]]
    marks: list[tuple[int, str]]
    peak: int
    holders: list[Holder]
    source: str

    def __post_init__(self) -> None:
        if not self.moments or sorted(self.moments) != self.moments:
            raise ValueError("the moments of a timeline are rising numbers")
        for name, values in self.series.items():
            if name not in CATEGORY_COLOURS or len(values) != len(self.moments):
                raise ValueError(f"'{name}' is no category with {len(self.moments)} values")

    @classmethod
    def from_trace(cls, trace: StepTrace, points: int = POINTS) -> Timeline:
        """The measured step of `trace` at no more than `points` moments."""
        rows = trace.timeline() or [{}]  # a trace without events
        first = max(trace.start - 1, 0)  # the event after which rows[0] holds
        totals = [sum(row.values()) for row in rows]
        stretch = -(-len(rows) // points) or 1
        begins = range(0, len(rows), stretch)
        moments = [max(range(at, min(at + stretch, len(rows))), key=totals.__getitem__) for at in begins]
        used = [name for name in CATEGORY_COLOURS if any(rows[at].get(name) for at in moments)]
        series = {name: [rows[at][name] for at in moments] for name in used}
        marks = [(max(at - first, 0), name) for at, name in trace.phase_marks]
        return cls(moments, series, marks, trace.peak_at - first, trace.grouped_holders(), trace.source)

    @property
    def peak_bytes(self) -> int:
        return max(map(sum, zip(*self.series.values(), strict=True)), default=0)

    @property
    def peak_holders(self) -> list[str]:
        """The largest holders at the peak, one line of text each."""
        return [holder_line(holder) for holder in self.holders]

    def phases(self) -> Iterator[tuple[str, int, int]]:
        """Each phase with the moments at which it begins and ends."""
        ends = [at for at, _ in self.marks[1:]] + [max(self.moments[-1], 1)]
        for (at, phase), end in zip(self.marks, ends, strict=False):
            yield phase, at, end
