"""Shared by the experiments: a step that can be predicted and tracked, small models, and the parts of a section.

MB is 1e6 bytes here, as in the documents that the experiments are from.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.pages import DATA, table
from ckpt_ft.checkpointing.apply import apply_policy, remove_policy
from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.memory.record.tracker import Tracker

MB = 10**6
# strategies: policy, memory reduction %, compute overhead %; largest batches: our settings, without, with, saved %;
# resnet: by policy, name, peak MB, milliseconds, largest batch; homework: for each cell, models and the MB it printed
PUBLISHED = json.loads((DATA / "founding_published.json").read_text(encoding="utf-8"))
Step = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class Case:
    """A training step at one size: `build` makes the model on the default device, `step` its batch."""

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
    note: str = ""

    @property
    def error(self) -> str:
        """The signed error: relative, or in points if the figure is a percentage."""
        if self.ours is None or self.reference is None:
            return ""
        if self.unit == "%":
            return f"{self.ours - self.reference:+.0f} points"
        return f"{100 * (self.ours / self.reference - 1):+.1f} %"

    @property
    def line(self) -> list[str]:
        ours, unit = "", f" {self.unit}" if self.unit else ""
        if self.ours is not None:
            digits = 0 if self.unit in ("", "%") or self.ours >= 1000 else 1
            ours = f"{self.ours:.{digits}f}{unit} (predicted)"
        published = self.published if self.unit in self.published else self.published + unit
        return [self.source, self.what, published, ours, self.error, self.note]


@dataclass
class Found:
    """What an experiment found: the values in its section of data/founding.md, and its published figures."""

    values: dict[str, Any]
    figures: list[Figure] = field(default_factory=list)


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


def of_policies(policies: list[str], full: Case, small: Case, device: str) -> tuple[str, dict[str, StepTrace]]:
    """A table of policies, predicted at full size for `device`, predicted and measured at small size on the CPU.

    Returns the predictions at full size, too.
    """
    rows, traces = [], {policy: predict(full, policy, device) for policy in policies}
    for policy, trace in traces.items():
        fake, real = predict(small, policy, "cpu"), measure(small, policy)
        figures = [mb(kept(trace)), mb(trace.peak_allocated), f"{1e3 * trace.seconds:.1f}"]
        more = f"{flops(trace) / flops(traces[policies[0]]):.2f}", f"{fake.peak_allocated}", f"{real.peak_allocated}"
        rows.append([f"`{policy}`", *figures, *more])
    header = ["policy", "kept MB", f"peak MB, predicted ({device})", "ms, predicted", "FLOPs / first row"]
    return table([*header, "small on CPU: predicted bytes", "measured bytes"], rows), traces


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
    canvas.savefig(path, dpi=90)


# --- small models of the documents, and their step


class FeedForward(nn.Module):
    """Residual block: norm, linear to four times the width, GELU, linear back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class SelfAttention(nn.Module):
    """Residual block: norm, scaled-dot-product attention."""

    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal, self.norm = heads, causal, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: Tensor = x + self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.mlp = SelfAttention(width, heads), FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.attention(x))
        return out


def stack(make: Callable[[], nn.Module], depth: int) -> nn.Sequential:
    return nn.Sequential(*(make() for _ in range(depth)))


def feed_forwards(depth: int, width: int) -> nn.Sequential:
    return stack(lambda: FeedForward(width), depth)


def transformer(depth: int, width: int, heads: int) -> nn.Sequential:
    return stack(lambda: Block(width, heads), depth)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with PyTorch's defaults."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


def case(build: Callable[[], nn.Module], *shape: int, optimizer: bool = False) -> Case:
    """Returns a case whose step has random inputs of `shape` and the mean as loss."""

    def step(model: nn.Module, optimizer: Any) -> None:
        weight = next(model.parameters())
        x = torch.randn(*shape, device=weight.device, dtype=weight.dtype)
        model.zero_grad(set_to_none=True)
        model(x).mean().backward()
        if optimizer is not None:
            optimizer.step()

    return Case(build, step, adamw if optimizer else None)
