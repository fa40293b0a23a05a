"""Memory over a step, stacked by category: the picture in a memory report and behind StepTrace.plot.

A trace has tens of thousands of events; a Timeline keeps at most `POINTS` of them, of each stretch the fullest moment,
so that no peak is lost. It needs matplotlib only to draw.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_ft.errors import UserError
from ckpt_ft.units import GIB, MIB, format_bytes

from .events import CATEGORIES, PHASES, Holder
from .trace import StepTrace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = 1500
# Resident memory in cool colours, what a step adds in warm ones: Okabe and Ito's palette, safe for the colour-blind.
COLOURS = {
    "parameters": "#0072b2",
    "buffers": "#003d66",
    "optimizer": "#56b4e9",
    "gradients": "#009e73",
    "activations": "#e69f00",
    "temporary": "#d55e00",
    "workspace": "#999999",
}


def holders(trace: StepTrace, n: int = 10) -> list[Holder]:
    """The `n` largest holders of the peak with a model's repeated layers taken together, as "layers.*.mlp"."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for holder in trace.holders(len(trace.storages)):
        module = ".".join("*" if part.isdecimal() else part for part in holder.module.split("."))
        group = groups.setdefault((module, holder.op, holder.category), [0, 0])
        group[0] += holder.nbytes
        group[1] += holder.count
    rows = [Holder(*key, nbytes, count) for key, (nbytes, count) in groups.items()]
    return sorted(rows, key=lambda row: -row.nbytes)[:n]


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
    def from_trace(cls, trace: StepTrace, source: str) -> Timeline:
        """The measured step of `trace`."""
        rows = trace.timeline()
        first = max(trace.start - 1, 0)  # the event after which rows[0] holds
        totals = [sum(row.values()) for row in rows]
        stretch = -(-len(rows) // POINTS) or 1
        ends = range(0, len(rows), stretch)
        moments = [max(range(at, min(at + stretch, len(rows))), key=totals.__getitem__) for at in ends]
        used = [name for name in CATEGORIES if any(rows[at][name] for at in moments)]
        series = {name: [rows[at][name] for at in moments] for name in used}
        marks = [(max(at - first, 0), name) for at, name in trace.marks if at >= trace.start and name in PHASES]
        return cls(moments, series, marks, trace.peak_at - first, holders(trace), source)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Timeline:
        """What `dataclasses.asdict` made, JSON in between or not."""
        marks = [(at, name) for at, name in values["marks"]]
        return cls(**{**values, "marks": marks, "holders": [Holder(**holder) for holder in values["holders"]]})

    def draw(self, path: str | Path, title: str = "") -> Path:
        """Write the picture to `path`: PNG, SVG or PDF by its suffix.

        Raises:
            UserError: matplotlib is not installed.
        """
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError as error:
            raise UserError("plots need matplotlib: pip install 'ckpt_ft[plot]'") from error
        figure = Figure(figsize=(10, 5.5), layout="constrained")
        FigureCanvasAgg(figure)  # no display, no global state
        axes = figure.add_subplot()
        peak = max(map(sum, zip(*self.series.values(), strict=True)), default=0)
        unit, name = (GIB, "GiB") if peak >= GIB else (MIB, "MiB")
        visible = {category: values for category, values in self.series.items() if max(values) > peak / 500}
        stacks = [[nbytes / unit for nbytes in values] for values in visible.values()]
        colours = [COLOURS[category] for category in visible]
        axes.stackplot(self.moments, *stacks, labels=list(visible), colors=colours, step="post", linewidth=0)
        axes.set(ylabel=f"{name} allocated ({self.source})", xlabel="allocations and frees of one step, in order")
        axes.set_xlim(self.moments[0], self.moments[-1])
        axes.set_ylim(0, peak / unit * 1.3)
        axes.set_title(title, loc="left", fontsize=11)
        self._mark_phases(axes)
        self._label_peak(axes, peak, unit)
        axes.spines[["top", "right"]].set_visible(False)
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        figure.savefig(path, dpi=150)
        return Path(path)

    def _mark_phases(self, axes: Axes) -> None:
        last = self.moments[-1]
        ends = [at for at, _ in self.marks[1:]] + [last]
        for (at, phase), end in zip(self.marks, ends, strict=True):
            if at > 0.005 * last:
                axes.axvline(at, color="#444444", linewidth=0.8, linestyle=(0, (4, 3)))
            if end - at >= 0.02 * last:  # else there is no room for its name
                middle, upright = (at + end) / 2, 90 if end - at < 0.09 * last else 0
                where = axes.get_xaxis_transform()
                axes.text(middle, 0.985, phase, transform=where, ha="center", va="top", rotation=upright)

    def _label_peak(self, axes: Axes, peak: int, unit: int) -> None:
        lines = [f"peak {format_bytes(peak)}"]
        for holder in self.holders[:4]:
            what = " ".join(filter(None, (holder.category, holder.module, holder.op.removesuffix(".default"))))
            what = what if len(what) <= 60 else f"{what[:28]} … {what[-28:]}"
            lines.append(f"{format_bytes(holder.nbytes):>10}  {what}")
        right = self.peak > (self.moments[0] + self.moments[-1]) / 2
        axes.plot([self.peak], [peak / unit], marker="v", color="black", markersize=6)
        axes.annotate(
            "\n".join(lines),
            (self.peak, peak / unit),
            xytext=(-8 if right else 8, 10),
            textcoords="offset points",
            ha="right" if right else "left",
            va="bottom",
            fontsize=8,
            family="monospace",
        )
