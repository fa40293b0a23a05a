"""Plots as PNG, SVG or PDF: memory over a step, and a plan's candidates by speed and memory.

This is the only module that imports matplotlib. It uses the object interface and an Agg canvas, so it needs no
display, changes no global state and ignores $MPLBACKEND. A file is written whole or not at all.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_ft.errors import UserError
from ckpt_ft.files import write
from ckpt_ft.units import GIB, MIB, format_bytes

from .timeline import CATEGORY_COLOURS, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ckpt_ft.planning.budget import Candidate

# The positions that are tried for a label: distances from its point in points, and directions.
_AWAY = (9, 22, 36, 52, 70)
_AROUND = ((1, 0), (-1, 0), (0, 1), (0, -1), (0.8, 0.8), (0.8, -0.8), (-0.8, 0.8), (-0.8, -0.8))


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_step(path: str | Path, timeline: Timeline, title: str = "") -> Path:
    """Draw memory over a step as stacked areas to `path`: PNG, SVG or PDF by its suffix.

    Raises:
        UserError: matplotlib is not installed, or the suffix is another one.
    """
    figure, axes = _figure(10, 5.5)
    moments, peak = timeline.moments, timeline.peak_bytes
    unit, name = _unit(peak)
    for category, low, top in timeline.layers():
        if max(timeline.series[category]) > peak / 500:
            below, above = ([nbytes / unit for nbytes in edge] for edge in (low, top))
            colour = CATEGORY_COLOURS[category][0]
            axes.fill_between(moments, below, above, label=category, color=colour, step="post", linewidth=0)
    axes.set(ylabel=f"{name} allocated ({timeline.source})", xlabel="allocations and frees of one step, in order")
    axes.set_xlim(moments[0], max(moments[-1], moments[0] + 1))
    axes.set_ylim(0, peak / unit * 1.3)
    axes.set_title(title, loc="left", fontsize=11)
    for phase, at, end in timeline.phases():
        _mark_phase(axes, phase, at, end, moments[-1])
    right = timeline.peak > (moments[0] + moments[-1]) / 2
    lines = [f"peak {format_bytes(peak)}", *timeline.peak_holders[:4]]
    _label_peak(axes, timeline.peak, peak / unit, lines, right)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return _save(figure, path)


def draw_plan(
    path: str | Path,
    candidates: Sequence[Candidate],
    frontier: Sequence[Candidate],
    *,
    limit: int,
    title: str,
    speed: str,
) -> Path:
    """Draw a plan's candidates, samples per second against GiB reserved, to `path`.

    The frontier is a line and the limit a dashed one. The first candidate is the pick; candidates beyond the limit are
    hollow. `speed` is the label of the speed axis.

    Raises:
        UserError: see `draw_step`.
    """
    figure, axes = _figure(8, 5)
    unit, name = _unit(max(limit, *(candidate.reserved for candidate in candidates)))
    line = sorted(frontier, key=lambda candidate: candidate.reserved)
    xs, ys = [candidate.reserved / unit for candidate in line], [candidate.samples_per_second for candidate in line]
    axes.step(xs, ys, where="post", color="tab:blue", lw=1)
    points = []
    for i, candidate in enumerate(candidates):
        at = (candidate.reserved / unit, candidate.samples_per_second)
        fits = candidate.reserved <= limit
        axes.plot(*at, "o", color="tab:blue" if i else "tab:red", fillstyle="full" if fits else "none")
        points.append((at, f"{candidate.policy}, batch {candidate.batch}"))
    axes.axvline(limit / unit, color="#444444", ls="--", lw=1)
    axes.set_xlabel(f"predicted bytes reserved ({name}); dashed: budget less context and margin")
    axes.set_ylabel(speed)
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.15, y=0.15)
    _label_points(figure, axes, points)
    return _save(figure, path)


def _label_points(figure: Figure, axes: Axes, points: Sequence[tuple[tuple[float, float], str]]) -> None:
    """Write a text beside each point where it covers no point and no other text; earlier points choose first."""
    from matplotlib.patheffects import withStroke
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()  # fixes the positions on the canvas
    renderer, frame = figure.canvas.get_renderer(), axes.get_window_extent()  # type: ignore[attr-defined]
    spots = [axes.transData.transform(point) for point, _ in points]
    taken = [Bbox.from_extents(x - 5, y - 5, x + 5, y + 5) for x, y in spots]
    for point, words in points:
        for distance, (right, up) in itertools.product(_AWAY, _AROUND):
            label = axes.annotate(
                words,
                point,
                xytext=(distance * right, distance * up),
                textcoords="offset points",
                ha=("right", "center", "left")[1 + round(right)],
                va="center",
                fontsize=8,
                path_effects=[withStroke(linewidth=3, foreground="white")],
                arrowprops={"arrowstyle": "-", "color": "#888888", "lw": 0.6} if distance > _AWAY[0] else None,
            )
            label.update_positions(renderer)
            box = Text.get_window_extent(label, renderer)  # the words without the line to the point
            inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
            if inside and not any(box.overlaps(other) for other in taken):
                break
            label.remove()
        else:
            continue  # no room: the candidate is in the table
        taken.append(box)


def _mark_phase(axes: Axes, phase: str, begin: int, end: int, last: int) -> None:
    """Draw a line where a phase begins, and its name where there is room for it."""
    if begin > 0.005 * last:
        axes.axvline(begin, color="#444444", linewidth=0.8, linestyle=(0, (4, 3)))
    if end - begin >= 0.02 * last:
        middle, upright = (begin + end) / 2, 90 if end - begin < 0.09 * last else 0
        where = axes.get_xaxis_transform()
        axes.text(middle, 0.985, phase, transform=where, ha="center", va="top", rotation=upright)


def _label_peak(axes: Axes, x: int, y: float, lines: Sequence[str], right: bool) -> None:
    short = [line if len(line) <= 72 else f"{line[:40]} … {line[-28:]}" for line in lines]
    axes.plot([x], [y], marker="v", color="black", markersize=6)
    axes.annotate(
        "\n".join(short),
        (x, y),
        xytext=(-8 if right else 8, 10),
        textcoords="offset points",
        ha="right" if right else "left",
        multialignment="left",
        va="bottom",
        fontsize=8,
        family="monospace",
    )


def _unit(most: int) -> tuple[int, str]:
    return (GIB, "GiB") if most >= GIB else (MIB, "MiB")


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    try:
        _import_matplotlib()
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("plots need matplotlib: pip install 'ckpt_ft[plot]'") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _import_matplotlib() -> None:
    """Import matplotlib without $MPLBACKEND: a backend that is not installed, as Jupyter's may be, fails the import.

    If the backend is installed, it is set afterwards for the user's own plots.
    """
    if "matplotlib" in sys.modules:
        return
    asked = os.environ.pop("MPLBACKEND", None)
    try:
        import matplotlib
    finally:
        if asked is not None:
            os.environ["MPLBACKEND"] = asked
    if asked:
        with contextlib.suppress(ValueError):
            matplotlib.rcParams["backend"] = asked


def _save(figure: Figure, path: str | Path) -> Path:
    kinds: Mapping[str, str] = figure.canvas.get_supported_filetypes()
    if Path(path).suffix[1:].lower() not in kinds:
        raise UserError(f"{path}: a plot is a PNG, SVG or PDF by its suffix")
    return write(path, lambda partial: figure.savefig(partial, dpi=150))
