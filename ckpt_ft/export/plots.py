"""Draws memory over a step as PNG, SVG or PDF.

This is the only module that imports matplotlib. It uses the object interface and an Agg canvas, so it needs no
display, changes no global state and does not load the backend of $MPLBACKEND. A file is written whole or not at all.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_ft.errors import UserError, one_line
from ckpt_ft.files import write
from ckpt_ft.units import GIB, MIB, format_bytes

from .timeline import CATEGORY_COLOURS, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw_step(path: str | Path, timeline: Timeline, title: str = "") -> Path:
    """Draw memory over a step as stacked areas to `path`: PNG, SVG or PDF by its suffix.

    Raises:
        UserError: matplotlib is not installed, or the suffix is another one.
    """
    figure, axes = _figure()
    moments, peak = timeline.moments, timeline.peak_bytes
    unit, name = (GIB, "GiB") if peak >= GIB else (MIB, "MiB")
    shown = [category for category, values in timeline.series.items() if max(values) > peak / 500]
    values = [[nbytes / unit for nbytes in timeline.series[category]] for category in shown]
    colours = [CATEGORY_COLOURS[category][0] for category in shown]
    axes.stackplot(moments, *values, labels=shown, colors=colours, step="post", linewidth=0)
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
    axes.legend(reverse=True, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return _save(figure, path)


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


def _figure() -> tuple[Figure, Axes]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("plots need matplotlib: pip install 'ckpt_ft[plot]'") from error
    except ValueError as error:  # $MPLBACKEND is no backend that matplotlib knows
        raise UserError(f"matplotlib: {one_line(error, 100)}") from error
    figure = Figure(figsize=(10, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _save(figure: Figure, path: str | Path) -> Path:
    kinds: Mapping[str, str] = figure.canvas.get_supported_filetypes()
    if Path(path).suffix[1:].lower() not in kinds:
        raise UserError(f"{path}: a plot is a PNG, SVG or PDF by its suffix")
    return write(path, lambda partial: figure.savefig(partial, dpi=150))
