"""Shared by the experiments: a step that can be predicted and tracked, and the parts of a page.

MB is 1e6 bytes here, as in the documents that the experiments are from.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckpt_ft.checkpointing.apply import apply_policy, remove_policy
from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.memory.record.tracker import Tracker

MB = 10**6
Step = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class Case:
    """A training step at one size.

    Attributes:
        build: makes the model on the default device.
        step: (model, optimizer); makes its batch on the model's device.
        make_optimizer: None for a step without one.
    """

    build: Callable[[], nn.Module]
    step: Step
    make_optimizer: Callable[[nn.Module], Any] | None = None


@dataclass
class Figure:
    """A published figure and ours; if `ours` is None, `note` gives the reason."""

    source: str
    what: str
    published: str
    ours: float | None
    reference: float | None = None
    unit: str = "MB"
    kind: str = "predicted"
    note: str = ""

    @property
    def error(self) -> str:
        """The signed error: relative, or in points if the figure is a percentage."""
        if self.ours is None or self.reference is None:
            return ""
        if self.unit == "%":
            return f"{self.ours - self.reference:+.0f} points"
        return f"{100 * (self.ours / self.reference - 1):+.1f} %"


@dataclass
class Section:
    """The section of one experiment: paragraphs, tables and pictures in order, and its published figures."""

    title: str
    parts: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)

    def text(self, *lines: str) -> None:
        """Adds a paragraph."""
        self.parts.append(" ".join(lines))

    def table(self, header: list[str], rows: list[list[str]], words: bool = False) -> None:
        """Adds a table; the first column is text, the others are figures, or text too with `words`."""
        lines = [header, ["---", *["---" if words else "---:"] * (len(header) - 1)], *rows]
        self.parts.append("\n".join("| " + " | ".join(cells) + " |" for cells in lines))

    def picture(self, name: str, alt: str) -> None:
        """Adds a picture of docs/img."""
        self.parts.append(f"![{alt}](img/{name})")


@contextmanager
def under(model: nn.Module, policy: str) -> Iterator[nn.Module]:
    """Applies `policy` to `model` and returns it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        apply_policy(model, policy, verify="never")  # bytes of a step without verification
        try:
            yield model
        finally:
            remove_policy(model)


def predict(case: Case, policy: str, device: str) -> StepTrace:
    """Traces the step on fake tensors for `device` ("cpu" uses the CPU's rules)."""
    with torch.device("meta"):
        model = case.build()
    with under(model, policy):
        return trace_step(model, case.step, make_optimizer=case.make_optimizer, device=device)


def measure(case: Case, policy: str) -> StepTrace:
    """Runs the step on the CPU and tracks every storage."""
    model = case.build()
    optimizer = case.make_optimizer(model) if case.make_optimizer else None
    with under(model, policy), Tracker(model, optimizer) as tracker:
        for _ in range(2):
            tracker.start_step()
            case.step(model, optimizer)
    return tracker.trace()


def kept(trace: StepTrace) -> int:
    """Returns the bytes of activations that forward saves for backward."""
    return sum(trace.module_activations().values())


def flops(trace: StepTrace) -> int:
    """Returns the floating-point operations of the measured step's matmuls, convolutions and attention."""
    return sum(op.flops for op in trace.ops if op.at >= trace.start)


def mb(nbytes: float) -> str:
    """Formats `nbytes` in MB, with one decimal below 100."""
    return f"{nbytes / MB:.1f}" if nbytes < 100 * MB else f"{nbytes / MB:.0f}"


def policy_table(section: Section, policies: list[str], full: Case, small: Case, device: str) -> dict[str, StepTrace]:
    """Adds a table of policies: predicted at full size for `device`, predicted and measured at small size on the CPU.

    Returns the predictions at full size.
    """
    rows, traces = [], {}
    for policy in policies:
        trace = traces[policy] = predict(full, policy, device)
        base, fake, real = traces[policies[0]], predict(small, policy, "cpu"), measure(small, policy)
        figures = [mb(kept(trace)), mb(trace.peak_allocated), f"{1e3 * trace.seconds:.1f}"]
        more = [f"{flops(trace) / flops(base):.2f}", f"{fake.peak_allocated}", f"{real.peak_allocated}"]
        rows.append([f"`{policy}`", *figures, *more])
    header = ["policy", "kept MB", f"peak MB, predicted ({device})", "ms, predicted", "FLOPs / first row"]
    section.table([*header, "small on CPU: predicted bytes", "measured bytes"], rows)
    return traces


def line_plot(
    path: Path, series: dict[str, tuple[list[float], list[float]]], axes: tuple[str, str], **marks: Any
) -> None:
    """Draws lines of (x, y); `marks` may give `star=(x, y, text)` and `log=True` for both axes."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(6, 3.6), layout="constrained")
    plot = canvas.subplots()
    for name, (xs, ys) in series.items():
        plot.plot(xs, ys, marker="o", markersize=4, label=name)
    if "star" in marks:
        x, y, text = marks["star"]
        plot.plot([x], [y], marker="*", markersize=16, color="black", linestyle="none", label=text)
    if marks.get("log"):
        plot.set_xscale("log", base=2)
        plot.set_yscale("log", base=2)
    plot.set(xlabel=axes[0], ylabel=axes[1])
    plot.legend(fontsize=8)
    plot.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(path, dpi=90)
