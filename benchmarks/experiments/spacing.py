"""Savings by depth, memory and time by checkpointing frequency; torch's checkpoint_sequential and `segments:N`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

from ckpt_ft.memory.record.trace import StepTrace

from .common import MB, Case, Section, kept, line_plot, mb, measure, policy_table, predict
from .models import case, feed_forwards, mean_step


def depth(images: Path, quick: bool) -> Section:
    """Savings by depth."""
    section = Section("Savings against depth")
    section.text(
        "The table has the activations that the forward pass keeps for residual feed-forward blocks of width 1024,",
        "batch 512, fp32, no optimizer, predicted for a T4. The tracked columns are of the same stacks at width 32",
        "and batch 64, run on the CPU.",
    )
    depths = [2, 4] if quick else list(range(10, 81, 10))
    rows = []
    saved: dict[str, list[float]] = {"full": [], "sqrt": []}
    for n in depths:
        full = {p: kept(predict(case(partial(feed_forwards, n, 1024), 512, 1024), p, "t4")) for p in ("none", *saved)}
        small = {p: kept(measure(case(partial(feed_forwards, n, 32), 64, 32), p)) for p in ("none", *saved)}
        cells = [str(n), *(mb(full[p]) for p in full)]
        for policy, series in saved.items():
            series.append(100 * (1 - full[policy] / full["none"]))
            cells += [f"{series[-1]:.1f} %", f"{100 * (1 - small[policy] / small['none']):.1f} %"]
        rows.append(cells)
    section.table(
        [
            "depth",
            "`none` MB",
            "`full` MB",
            "`sqrt` MB",
            "`full` saves, predicted (T4)",
            "tracked on CPU",
            "`sqrt` saves, predicted (T4)",
            "tracked on CPU",
        ],
        rows,
    )
    line_plot(
        images / "depth.png",
        {f"{p} (predicted, T4)": ([float(n) for n in depths], ys) for p, ys in saved.items()},
        ("blocks", "% of activations saved"),
    )
    section.picture("depth.png", "share of the activations saved against the number of blocks")
    section.text(
        "A checkpoint per block saves the same share at any depth; sqrt(L) segments save more the deeper the",
        "stack is.",
    )
    return section


def frequency(images: Path, quick: bool) -> Section:
    """Memory and time by checkpointing frequency: every 1, 2, 4, 8 and sqrt(L) blocks."""
    blocks, width, batch = (4, 128, 32) if quick else (16, 1024, 2048)
    section = Section("Memory and time against checkpoint frequency")
    section.text(
        f"{blocks} residual feed-forward blocks of width {width}, batch {batch}, fp32, no optimizer. Two readings of",
        '"every N": `every:N` checkpoints each N-th block and leaves the others alone; `segments:L/N` makes every N',
        "blocks one checkpoint.",
    )
    steps = [n for n in (1, 2, 4, 8) if n <= blocks]
    policies = ["none", *(f"every:{n}" for n in steps), *(f"segments:{blocks // n}" for n in steps if n > 1), "sqrt"]
    traces = policy_table(
        section,
        policies,
        case(lambda: feed_forwards(blocks, width), batch, width),
        case(lambda: feed_forwards(blocks, 32), 64, 32),
        "t4",
    )
    base = traces["none"]
    cost = {p: t.peak_allocated / base.peak_allocated * t.seconds / base.seconds for p, t in traces.items()}
    best = min(cost, key=cost.__getitem__)
    points = {p: (1e3 * t.seconds, t.peak_allocated / MB) for p, t in traces.items()}
    groups = {
        name: sorted(xy for p, xy in points.items() if p.startswith(name) or p == "none")
        for name in ("every", "segments", "sqrt")
    }
    line_plot(
        images / "frequency.png",
        {k: ([x for x, _ in v], [y for _, y in v]) for k, v in groups.items()},
        ("ms per step (predicted, T4)", "peak MB (predicted, T4)"),
        star=(*points[best], f"sweet spot: {best}"),
    )
    section.picture("frequency.png", "peak against step time for each frequency; the star is the sweet spot")
    section.text(
        f"The lowest product of peak and time in this table is that of `{best}` ({cost[best]:.2f} of `none`'s)."
    )
    return section


class _Sequential(nn.Module):
    """A stack run by torch's checkpoint_sequential."""

    def __init__(self, depth: int, width: int, segments: int) -> None:
        super().__init__()
        self.blocks, self.segments = feed_forwards(depth, width), segments

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint_sequential(self.blocks, self.segments, x, use_reentrant=False)
        return out


def sequential(images: Path, quick: bool) -> Section:
    """torch's checkpoint_sequential against `segments:N`: bytes and blocks run again."""
    section = Section("checkpoint_sequential against segments:N")
    blocks, width, batch = (4, 64, 16) if quick else (16, 1024, 1024)
    rows = []
    for n in (2,) if quick else (2, 4, 8, 16):
        torchs = Case(partial(_Sequential, blocks, width, n), mean_step(batch, width))
        ours = case(lambda: feed_forwards(blocks, width), batch, width)
        small = (
            Case(partial(_Sequential, blocks, 32, n), mean_step(64, 32)),
            case(lambda: feed_forwards(blocks, 32), 64, 32),
        )
        for name, full, tiny, policy in (
            ("checkpoint_sequential", torchs, small[0], "none"),
            ("`segments`", ours, small[1], f"segments:{n}"),
        ):
            trace, real = predict(full, policy, "t4"), measure(tiny, policy)
            row = [
                f"{name}, {n}",
                mb(kept(trace)),
                mb(trace.peak_allocated),
                str(_run_again(trace)),
                str(real.peak_allocated),
                str(_run_again(real)),
            ]
            rows.append(row)
    header = [
        "segments",
        "kept MB, predicted (T4)",
        "peak MB, predicted (T4)",
        "blocks run again",
        "small on CPU: measured bytes",
        "blocks run again there",
    ]
    section.table(header, rows)
    differing = sum(torchs[2] != ours[2] for torchs, ours in zip(rows[::2], rows[1::2], strict=True))
    section.text(
        "`checkpoint_sequential` does not checkpoint its last segment: backward needs that one first, so keeping it",
        "costs nothing at the peak and saves a second run. `segments:N` runs the last segment again, too, which is",
        f"more recomputation. The peaks differ in {differing} of these {len(rows) // 2} pairs.",
    )
    return section


def _run_again(trace: StepTrace) -> int:
    """Returns the number of blocks whose forward ran in backward, counted by their GELUs."""
    return sum(op.name == "aten.gelu.default" and op.phase == "backward" and op.at >= trace.start for op in trace.ops)
