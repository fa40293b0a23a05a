"""Memory over a step, stacked by category: the picture in a memory report and behind StepTrace.plot.

A trace has tens of thousands of events; a Timeline keeps at most `POINTS` of them, of each stretch the fullest moment,
so that no peak is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_ft.page.fragments import step_svg
from ckpt_ft.plots import draw_step

from .events import CATEGORIES, Holder
from .holders import holder_line
from .recorded import Recorded

POINTS = 1500


@dataclass
class Timeline:
    """Bytes by category at moments of one step.

    moments: numbers of the allocation events, rising; series: category -> bytes at each moment.
    marks: (event, phase that begins there). peak: the event of the peak. holders: what held it.
    source: "measured" or "predicted".
    """

    moments: list[int]
    series: dict[str, list[int]]
    marks: list[tuple[int, str]]
    peak: int
    holders: list[Holder]
    source: str

    @classmethod
    def from_trace(cls, trace: Recorded, points: int = POINTS) -> Timeline:
        """The measured step of `trace`, at no more than so many moments."""
        rows = trace.timeline()
        first = max(trace.start - 1, 0)  # the event after which rows[0] holds
        totals = [sum(row.values()) for row in rows]
        stretch = -(-len(rows) // points) or 1
        ends = range(0, len(rows), stretch)
        moments = [max(range(at, min(at + stretch, len(rows))), key=totals.__getitem__) for at in ends]
        used = [name for name in CATEGORIES if any(rows[at][name] for at in moments)]
        series = {name: [rows[at][name] for at in moments] for name in used}
        marks = [(max(at - first, 0), name) for at, name in trace.phase_marks]
        return cls(moments, series, marks, trace.peak_at - first, trace.grouped_holders(), trace.source)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Timeline:
        """What `dataclasses.asdict` made, JSON in between or not."""
        marks = [(at, name) for at, name in values["marks"]]
        return cls(**{**values, "marks": marks, "holders": [Holder(**holder) for holder in values["holders"]]})

    @property
    def held(self) -> list[str]:
        """What held the peak, a line each."""
        return [holder_line(holder) for holder in self.holders]

    def svg(self) -> str:
        """A small picture for a notebook."""
        return step_svg(self.moments, self.series, self.marks, self.peak)

    def draw(self, path: str | Path, title: str = "") -> Path:
        """Write the picture to `path`: PNG, SVG or PDF by its suffix.

        Raises:
            UserError: matplotlib is not installed.
        """
        return draw_step(path, self, title)
