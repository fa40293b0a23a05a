"""The plot of a plan. matplotlib is imported here only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_ft.units import GIB

if TYPE_CHECKING:
    from .plan import Plan


def plot_plan(plan: Plan, path: Path) -> Path:
    """Predicted samples a second against GiB reserved, the frontier as a line, the limit as another."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    line = sorted(plan.frontier, key=lambda row: row.reserved)
    axes.step(
        [r.reserved / GIB for r in line], [r.samples_per_second for r in line], where="post", color="tab:blue", lw=1
    )
    for row in plan.rows:
        at = (row.reserved / GIB, row.samples_per_second)
        axes.plot(*at, "o", color="tab:red" if row is plan.best else "tab:blue")
        axes.annotate(f"{row.policy}, batch {row.batch}", at, xytext=(4, 4), textcoords="offset points", fontsize=8)
    axes.axvline(plan.room.limit / GIB, color="black", ls="--", lw=1)
    axes.set_xlabel("predicted bytes reserved (GiB); dashed: budget less context and margin")
    axes.set_ylabel("predicted samples/s" if plan.device != "cpu" else "nominal samples/s")
    axes.set_title(f"{plan.model} on {plan.device}")
    axes.margins(x=0.15, y=0.15)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path
