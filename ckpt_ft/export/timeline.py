"""Memory over a step as stacked areas, one per category: the data, and the SVG in notebooks and report pages.

A trace has tens of thousands of events. A Timeline splits the step into at most `POINTS` stretches and keeps the
moment of each with the most bytes, so no peak is lost.
"""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from ckpt_ft.units import format_bytes

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
_TOP, _LEFT, _RIGHT, _BOTTOM = 22, 70, 10, 8  # margins of the SVG
_DASHED = "stroke='currentColor' stroke-dasharray='3 4' stroke-opacity='.6'"


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

    def layers(self) -> Iterator[tuple[str, list[int], list[int]]]:
        """The stacked areas from bottom to top: category, and the bytes below and above it at each moment."""
        levels = [*accumulate(self.series.values(), _sums, initial=[0] * len(self.moments))]
        yield from zip(self.series, levels, levels[1:], strict=False)

    def phases(self) -> Iterator[tuple[str, int, int]]:
        """Each phase with the moments at which it begins and ends."""
        ends = [at for at, _ in self.marks[1:]] + [max(self.moments[-1], 1)]
        for (at, phase), end in zip(self.marks, ends, strict=False):
            yield phase, at, end

    def svg(self, width: int = 760, height: int = 240) -> str:
        """The areas as SVG with a legend below, as HTML without scripts."""
        last, high = max(self.moments[-1], 1), self.peak_bytes
        most = 1.1 * high or 1.0

        def x(moment: int) -> float:
            return _LEFT + moment / last * (width - _LEFT - _RIGHT)

        def y(nbytes: float) -> float:
            return height - _BOTTOM - nbytes / most * (height - _TOP - _BOTTOM)

        parts = []
        for name, low, top in self.layers():
            edge = [*zip(self.moments, top, strict=True), *reversed([*zip(self.moments, low, strict=True)])]
            points = " ".join(f"{x(moment):.1f},{y(nbytes):.1f}" for moment, nbytes in edge)
            parts.append(f"<polygon points='{points}' fill='{_fill(name)}'><title>{name}</title></polygon>")
        for phase, at, end in self.phases():
            parts.append(f"<line x1='{x(at):.1f}' x2='{x(at):.1f}' y1='4' y2='{height - _BOTTOM}' {_DASHED}/>")
            if x(end) - x(at) > 8 * len(phase):
                parts.append(_text(x(at) + 5, 14, phase))
        side = "end" if self.peak > last / 2 else "start"
        parts.append(_text(x(self.peak), y(high) - 5, f"peak {format_bytes(high)}", side))
        for share in (0, 0.5, 1):
            parts.append(_text(_LEFT - 6, y(share * high) + 4, format_bytes(round(share * high)), "end"))
        legend = "".join(
            f"<span style='margin-right:12px'><span style='color:{_fill(name)}'>■</span> {name}</span>"
            for name in self.series
        )
        label = html.escape(f"Memory over the step, {self.source}: peak {format_bytes(high)}")
        size = f"viewBox='0 0 {width} {height}' width='{width}' style='max-width:100%'"
        axis = f"data-left='{_LEFT}' data-right='{width - _RIGHT}'"  # where the pointer finds the moments
        picture = f"<svg {size} {axis} role='img' aria-label='{label}'>{''.join(parts)}</svg>"
        return f"{picture}<div>{legend}</div>"


def _sums(below: list[int], values: list[int]) -> list[int]:
    return [a + b for a, b in zip(below, values, strict=True)]


def _fill(category: str) -> str:
    """The page's colour of a category, which follows its theme; elsewhere the light one."""
    return f"var(--{category},{CATEGORY_COLOURS[category][0]})"


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' fill='currentColor' font-size='11'>"
        f"{html.escape(words)}</text>"
    )
