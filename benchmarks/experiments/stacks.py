"""Stacks of layers: where memory goes, and what checkpoints by depth, by frequency and of chosen operators save."""

from __future__ import annotations

import gc
import itertools
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint_sequential

from benchmarks.pages import table
from ckpt_ft.memory.record.trace import StepTrace

from .common import (
    MB,
    Case,
    Figure,
    Found,
    case,
    feed_forwards,
    kept,
    line_plot,
    mb,
    measure,
    of_policies,
    predict,
    stack,
    transformer,
    under,
)  # fmt: skip

LINEAR = "linear stack 8 x 4096 x 4096, batch 256, fp32, T4"
POLICIES = [
    "none", "full", "save:matmul", "save:attention+matmul", "save:aten.addmm", "save:matmul/2", "save:attention",
    "modules:attention", "modules:mlp", "pointwise",
]  # fmt: skip


def linear_stack(depth: int = 8, width: int = 4096) -> nn.Sequential:
    """Linear layers in sequence, without activations."""
    return stack(lambda: nn.Linear(width, width), depth)


def relu_stack(width: int) -> nn.Sequential:
    return stack(lambda: nn.Sequential(nn.Linear(width, width), nn.ReLU()), 10)


def breakdown(images: Path) -> Found:
    """Bytes of each category by batch size, and the batch size from which activations dominate."""
    batches, names = [2**n for n in range(0, 18, 2)], ("parameters", "gradients", "optimizer", "activations")
    rows, crossover, shares = [], None, {name: list[float]() for name in names}
    for batch in batches:
        trace = predict(case(partial(relu_stack, 1024), batch, 1024, optimizer=True), "none", "t4")
        small = case(partial(relu_stack, 64), batch, 64, optimizer=True)
        moments = trace.timeline()
        most = {name: max(moment[name] for moment in moments) for name in (*names, "temporary")}
        if crossover is None and most["activations"] > sum(most[name] for name in names[:3]):
            crossover = batch
        for name, series in shares.items():
            series.append(most[name] / MB)
        bytes_ = trace.peak_allocated, predict(small, "none", "cpu"), measure(small, "none")
        rows.append([str(batch), *map(mb, most.values()), mb(bytes_[0]), *(str(t.peak_allocated) for t in bytes_[1:])])
    header = ["batch", *(f"{name} MB" for name in (*names, "temporary")), "peak MB, predicted (T4)"]
    axes = "batch size", "MB (predicted, T4)"
    line_plot(images / "breakdown.png", {k: ([*map(float, batches)], v) for k, v in shares.items()}, axes, log=True)
    made = table([*header, "small on CPU: predicted bytes", "measured bytes"], rows)
    return Found({"table": made, "crossover": crossover})


def timeline(images: Path) -> Found:
    """The linear stack over time: forward, the peak in backward, and zero_grad."""
    trace = predict(case(linear_stack, 256, 4096), "none", "t4")
    trace.plot(images / "linear_stack.png")
    allocated, growth, backward = trace.replay.allocated, *_forward(trace)
    moments = {"before the step, gradients of the last one still there": allocated[trace.start - 1]}
    moments["after zero_grad, with the batch"] = min(allocated[trace.start : growth[0]])
    moments |= {f"after layer {n + 1}": allocated[at] for n, at in enumerate(growth)}
    moments |= {"before backward": allocated[backward - 1], "peak, in backward": trace.peaks["backward"]}
    moments["after backward"] = allocated[-1]
    most = max(after - before for before, after in itertools.pairwise(allocated[at] for at in growth))
    phase = max(trace.peaks, key=trace.peaks.__getitem__)
    made = table(["moment", "MB, predicted (T4)"], [[name, mb(nbytes)] for name, nbytes in moments.items()])
    figures = [
        Figure(LINEAR, "growth per layer in forward", "+4.2", most / MB, 4.2),
        Figure(LINEAR, "where the peak falls", "backward", None, unit="", note=f"predicted: {phase}"),
    ]
    return Found({"table": made, "growth": mb(most)}, figures)


def _forward(trace: StepTrace) -> tuple[list[int], int]:
    """Returns the events at which the layers of the measured step returned their outputs, and where backward began."""
    backward = next(at for at, name in trace.marks if name == "backward" and at >= trace.start)
    made = [(at, trace.storages[trace.events[at]].op) for at in range(trace.start, backward) if trace.events[at] >= 0]
    return [at for at, op in made if op == "aten.addmm.default"], backward


def segments(images: Path) -> Found:
    """Checkpointing of bare layers, one by one and in segments."""
    policies = ["none", "full", "segments:4", "segments:2", "sqrt"]
    small = case(partial(linear_stack, 8, 64), 256, 64)
    made, traces = of_policies(policies, case(linear_stack, 256, 4096), small, "t4")
    saved, more = (100 * (1 - kept(traces[policy]) / kept(traces["none"])) for policy in ("full", "segments:2"))
    what, note = "kept activations saved by per-layer checkpointing", f"segments:2 saves {more:.0f} %"
    return Found({"table": made}, [Figure(LINEAR, what, "0 %", saved, 0.0, "%", note)])


def depth(images: Path) -> Found:
    """Savings by depth."""
    depths, rows, saved = list(range(10, 81, 10)), [], {"full": list[float](), "sqrt": list[float]()}
    for n in depths:
        large, small = case(partial(feed_forwards, n, 1024), 512, 1024), case(partial(feed_forwards, n, 32), 64, 32)
        full, tracked = {p: kept(predict(large, p, "t4")) for p in ("none", *saved)}, {}
        tracked = {p: kept(measure(small, p)) for p in full}
        cells = [str(n), *map(mb, full.values())]
        for policy, series in saved.items():
            series.append(100 * (1 - full[policy] / full["none"]))
            cells += [f"{series[-1]:.1f} %", f"{100 * (1 - tracked[policy] / tracked['none']):.1f} %"]
        rows.append(cells)
    header = ["depth", *(f"`{p}` MB" for p in ("none", *saved))]
    header += [name for p in saved for name in (f"`{p}` saves, predicted (T4)", "tracked on CPU")]
    lines = {f"{p} (predicted, T4)": ([*map(float, depths)], ys) for p, ys in saved.items()}
    line_plot(images / "depth.png", lines, ("blocks", "% of activations saved"))
    return Found({"table": table(header, rows)})


def frequency(images: Path) -> Found:
    """Memory and time by checkpointing frequency: every 1, 2, 4, 8 and sqrt(L) of 16 blocks."""
    policies = ["none", *(f"every:{n}" for n in (1, 2, 4, 8)), "segments:8", "segments:4", "segments:2", "sqrt"]
    large = case(partial(feed_forwards, 16, 1024), 2048, 1024)
    made, traces = of_policies(policies, large, case(partial(feed_forwards, 16, 32), 64, 32), "t4")
    base = traces["none"]
    cost = {p: t.peak_allocated / base.peak_allocated * t.seconds / base.seconds for p, t in traces.items()}
    best = min(cost, key=cost.__getitem__)
    points = {p: (1e3 * t.seconds, t.peak_allocated / MB) for p, t in traces.items()}
    lines = {}
    for name in ("every", "segments", "sqrt"):
        of = sorted(xy for p, xy in points.items() if p.startswith(name) or p == "none")
        lines[name] = [x for x, _ in of], [y for _, y in of]
    axes = "ms per step (predicted, T4)", "peak MB (predicted, T4)"
    line_plot(images / "frequency.png", lines, axes, star=(*points[best], f"sweet spot: {best}"))
    return Found({"table": made, "best": best, "cost": f"{cost[best]:.2f}"})


class _Sequential(nn.Module):
    """A stack run by torch's checkpoint_sequential."""

    def __init__(self, blocks: int, width: int, segments: int) -> None:
        super().__init__()
        self.blocks, self.segments = feed_forwards(blocks, width), segments

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint_sequential(self.blocks, self.segments, x, use_reentrant=False)
        return out


def sequential_rows(blocks: int, width: int, batch: int, segments: int) -> list[list[str]]:
    """The rows of torch's checkpoint_sequential and of `segments:N`."""
    rows = []
    for name, policy in (("checkpoint_sequential", "none"), ("`segments`", f"segments:{segments}")):
        make: Any = feed_forwards if policy != "none" else partial(_Sequential, segments=segments)
        trace = predict(case(partial(make, blocks, width), batch, width), policy, "t4")
        real = measure(case(partial(make, blocks, 32), 64, 32), policy)
        cells = [mb(kept(trace)), mb(trace.peak_allocated), str(_run_again(trace)), str(real.peak_allocated)]
        rows.append([f"{name}, {segments}", *cells, str(_run_again(real))])
    return rows


def _run_again(trace: StepTrace) -> int:
    """Returns the number of blocks whose forward ran in backward, counted by their GELUs."""
    return sum(op.name == "aten.gelu.default" and op.phase == "backward" and op.at >= trace.start for op in trace.ops)


def sequential(images: Path) -> Found:
    """torch's checkpoint_sequential against `segments:N`: bytes and blocks run again."""
    rows = [row for n in (2, 4, 8, 16) for row in sequential_rows(16, 1024, 1024, n)]
    header = ["segments", "kept MB, predicted (T4)", "peak MB, predicted (T4)", "blocks run again"]
    made = table([*header, "small on CPU: measured bytes", "blocks run again there"], rows)
    differing = sum(torchs[2] != ours[2] for torchs, ours in zip(rows[::2], rows[1::2], strict=True))
    return Found({"table": made, "differing": differing, "pairs": len(rows) // 2})


def selective(images: Path) -> Found:
    """SAC policies on feed-forward blocks and on transformer blocks."""
    without = [policy for policy in POLICIES if "attention" not in policy and policy != "modules:mlp"]
    large = case(lambda: feed_forwards(8, 1024).to(torch.bfloat16), 8, 1024, 1024)
    ffn, _ = of_policies(without, large, case(partial(feed_forwards, 4, 32), 2, 64, 32), "a100-40gb")
    large = case(lambda: transformer(8, 1024, 16).to(torch.bfloat16), 8, 1024, 1024)
    block, traces = of_policies(POLICIES, large, case(partial(transformer, 4, 32, 4), 2, 64, 32), "a100-40gb")
    order = sorted(traces, key=lambda policy: kept(traces[policy]))
    return Found({"ffn": ffn, "block": block, "order": ", ".join(f"`{policy}`" for policy in order)})


def budgets(images: Path) -> Found:
    """`budget:1.0 ... 0.0` under torch.compile: measured peaks, with non-monotonic points marked."""
    job, values = case(partial(transformer, 3, 64, 4), 8, 128, 64), [1.0, 0.7, 0.5, 0.3, 0.0]
    peaks = {value: peak_of(job, f"budget:{value}", compiled=True) for value in values}
    rows = [[f"`budget:{value:g}`, compiled", str(peak), f"{peak / peaks[1.0]:.3f}"] for value, peak in peaks.items()]
    for policy in ("none", "full"):
        peak = peak_of(job, policy)
        rows.append([f"`{policy}`, eager", str(peak), f"{peak / peaks[1.0]:.3f}"])
    line_plot(
        images / "budget.png", {"measured": (values, [*map(float, peaks.values())])}, ("budget", "peak bytes (CPU)")
    )
    pairs = [(high, low) for high, low in itertools.pairwise(values) if peaks[low] > peaks[high]]
    rising = "; ".join(f"{low:g} ({peaks[low]}) above {high:g} ({peaks[high]})" for high, low in pairs)
    made = table(["policy", "peak bytes, measured (CPU)", "/ budget:1"], rows)
    return Found({"table": made, "rising": rising or "here it does, elsewhere it need not"})


def peak_of(job: Case, policy: str, compiled: bool = False) -> int:
    """Returns the peak bytes of a step of `job`'s model under `policy`, by the profiler's memory events."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = job.build()
    with under(model, policy), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run: Any = torch.compile(model, dynamic=False) if compiled else model
        for _ in range(2):
            job.step(run, None)
        model.zero_grad(set_to_none=True)
        gc.collect()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            job.step(run, None)
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(0, *itertools.accumulate(sizes))
