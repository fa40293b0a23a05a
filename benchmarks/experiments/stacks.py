"""Where memory goes and what checkpointing does to it, on stacks of layers: breakdown, timeline, segments, depth, frequency."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

from ckpt_ft.memory.trace import StepTrace

from .common import MB, Case, Figure, Section, kept, line_plot, mb, measure, measure_cuda, policy_table, predict
from .models import case, feed_forwards, linear_stack, mean_step, relu_stack

LINEAR = "linear stack 8 x 4096 x 4096, batch 256, fp32, T4"


def breakdown(images: Path, quick: bool) -> Section:
    """Parameters, gradients, optimizer and activations against the batch size, and where activations overtake the rest."""
    section = Section("Where memory goes, against the batch size")
    section.text(
        "Ten linear layers of width 1024, each with a ReLU, fp32, AdamW: the most bytes of each category during the step,",
        "predicted for a T4, and the same stack of width 64 run on the CPU.",
    )
    batches = [2**n for n in ((0, 12) if quick else range(0, 18, 2))]
    names = ("parameters", "gradients", "optimizer", "activations", "temporary")
    rows: list[list[str]] = []
    shares: dict[str, list[float]] = {name: [] for name in names[:4]}
    crossover = None
    for batch in batches:
        trace = predict(case(relu_stack, batch, 1024, optimizer=True), "none", "t4")
        small = case(lambda: relu_stack(width=64), batch, 64, optimizer=True)
        tracked, fake = measure(small, "none"), predict(small, "none", "cpu")
        moments = trace.timeline()
        most = {name: max(moment[name] for moment in moments) for name in names}
        if crossover is None and most["activations"] > sum(most[name] for name in names[:3]):
            crossover = batch
        for name, series in shares.items():
            series.append(most[name] / MB)
        cells = [str(batch), *(mb(most[name]) for name in names), mb(trace.peak_allocated)]
        rows.append([*cells, str(fake.peak_allocated), str(tracked.peak_allocated)])
    header = ["batch", *(f"{name} MB" for name in names), "peak MB, predicted (T4)", "small on CPU: predicted bytes", "measured bytes"]
    section.table(header, rows)
    line_plot(images / "breakdown.png", {k: ([float(b) for b in batches], v) for k, v in shares.items()},
              ("batch size", "MB (predicted, T4)"), log=True)  # fmt: skip
    section.picture("breakdown.png", "bytes by category against the batch size")
    section.text(
        f"The crossover: from batch {crossover} on, activations take more than",
        "parameters, gradients and optimizer state together. Below it checkpointing has little to save.",
    )
    return section


def timeline(images: Path, quick: bool) -> Section:
    """The linear stack through forward, the peak in backward, and zero_grad."""
    section = Section("The timeline of the linear stack")
    depth, width, batch = (4, 256, 32) if quick else (8, 4096, 256)

    def build() -> nn.Module:
        return linear_stack(depth, width)

    trace = predict(case(build, batch, width), "none", "t4")
    trace.plot(images / "linear_stack.png")
    growth, before_backward, after_backward = _moments(trace)
    section.table(
        ["moment", "MB, predicted (T4)"],
        [["before the step", mb(trace.replay.allocated[trace.start - 1])],
         *[[f"after layer {n + 1}", mb(nbytes)] for n, nbytes in enumerate(growth)],
         ["before backward", mb(before_backward)], ["peak, in backward", mb(trace.peaks["backward"])],
         ["after backward", mb(after_backward)],
         ["after the next zero_grad", mb(trace.replay.allocated[trace.start - 1] - sum(_gradient_bytes(trace)))]],
    )  # fmt: skip
    section.picture("linear_stack.png", "the linear stack's memory over one step")
    steps = [after - before for before, after in zip(growth, growth[1:], strict=False)]
    section.figures += [
        Figure(LINEAR, "growth per layer in forward", "+4.2", max(steps) / MB, 4.2),
        Figure(LINEAR, "where the peak falls", "backward", None, note=f"predicted: {max(trace.peaks, key=trace.peaks.__getitem__)}"),
    ]
    section.text(f"Forward adds {mb(max(steps))} MB a layer; the peak comes in backward, where activations and gradients coexist.")
    return section


def _moments(trace: StepTrace) -> tuple[list[int], int, int]:
    """Allocated bytes after each layer's output in forward, when backward begins, and at the end of the step."""
    allocated, backward = trace.replay.allocated, next(at for at, name in trace.marks if name == "backward" and at >= trace.start)
    outputs = [
        at for at in range(trace.start, backward)
        if trace.events[at] >= 0 and trace.storages[trace.events[at]].op == "aten.addmm.default"
    ]  # fmt: skip
    return [allocated[at] for at in outputs], allocated[backward - 1], allocated[-1]


def _gradient_bytes(trace: StepTrace) -> list[int]:
    return [nbytes for storage, nbytes in trace.live_at(trace.start - 1) if storage.category == "gradients"]


def segments(images: Path, quick: bool) -> Section:
    """Per-layer against segment checkpointing of bare layers."""
    section = Section("Per-layer against segment checkpointing")
    section.text(
        "A bare linear layer keeps its input for backward, and so does a checkpoint around it: per-layer checkpointing saves",
        "nothing (a non-reentrant checkpoint stops once it has what backward needs, so it costs nothing either). A segment",
        "keeps one input for a run of layers.",
    )
    depth, width, batch = (4, 256, 32) if quick else (8, 4096, 256)
    traces = policy_table(
        section, ["none", "full", "segments:4", "segments:2", "sqrt"], case(lambda: linear_stack(depth, width), batch, width),
        case(lambda: linear_stack(depth, 64), 256, 64), "t4",
    )  # fmt: skip
    saved = 100 * (1 - kept(traces["full"]) / kept(traces["none"]))
    section.figures.append(
        Figure(LINEAR, "kept activations saved by per-layer checkpointing", "0 %", saved, 0.0, "%", note=f"segments:2 saves {100 * (1 - kept(traces['segments:2']) / kept(traces['none'])):.0f} %")
    )
    return section


def depth(images: Path, quick: bool) -> Section:
    """Savings against depth."""
    section = Section("Savings against depth")
    section.text(
        "Residual feed-forward blocks of width 1024, batch 512, fp32, no optimizer: activations that forward leaves, predicted",
        "for a T4; the tracked columns are the same stacks at width 32 and batch 64 run on the CPU.",
    )
    depths = [2, 4] if quick else list(range(10, 81, 10))
    rows = []
    saved: dict[str, list[float]] = {"full": [], "sqrt": []}
    for n in depths:
        full = {p: kept(predict(case(lambda n=n: feed_forwards(n, 1024), 512, 1024), p, "t4")) for p in ("none", *saved)}
        small = {p: kept(measure(case(lambda n=n: feed_forwards(n, 32), 64, 32), p)) for p in ("none", *saved)}
        cells = [str(n), *(mb(full[p]) for p in full)]
        for policy, series in saved.items():
            series.append(100 * (1 - full[policy] / full["none"]))
            cells += [f"{series[-1]:.1f} %", f"{100 * (1 - small[policy] / small['none']):.1f} %"]
        rows.append(cells)
    section.table(["depth", "`none` MB", "`full` MB", "`sqrt` MB", "`full` saves, predicted (T4)", "tracked on CPU",
                   "`sqrt` saves, predicted (T4)", "tracked on CPU"], rows)  # fmt: skip
    line_plot(images / "depth.png", {f"{p} (predicted, T4)": ([float(n) for n in depths], ys) for p, ys in saved.items()},
              ("blocks", "% of activations saved"))  # fmt: skip
    section.picture("depth.png", "share of the activations saved against the number of blocks")
    section.text("A checkpoint per block saves the same share at any depth; sqrt(L) segments save more the deeper the stack is.")
    return section


def frequency(images: Path, quick: bool) -> Section:
    """Memory and time against how often is checkpointed: 1, 2, 4, 8 and sqrt(L)."""
    blocks, width, batch = (4, 128, 32) if quick else (16, 1024, 2048)
    section = Section("Memory and time against checkpoint frequency")
    section.text(
        f"{blocks} residual feed-forward blocks of width {width}, batch {batch}, fp32, no optimizer. Two readings of",
        "\"every N\": `every:N` checkpoints each N-th block and leaves the others alone; `segments:L/N` makes every N blocks",
        "one checkpoint.",
    )
    steps = [n for n in (1, 2, 4, 8) if n <= blocks]
    policies = ["none", *(f"every:{n}" for n in steps), *(f"segments:{blocks // n}" for n in steps if n > 1), "sqrt"]
    traces = policy_table(section, policies, case(lambda: feed_forwards(blocks, width), batch, width),
                          case(lambda: feed_forwards(blocks, 32), 64, 32), "t4")  # fmt: skip
    base = traces["none"]
    cost = {p: t.peak_allocated / base.peak_allocated * t.seconds / base.seconds for p, t in traces.items()}
    best = min(cost, key=cost.__getitem__)
    points = {p: (1e3 * t.seconds, t.peak_allocated / MB) for p, t in traces.items()}
    groups = {name: [xy for p, xy in points.items() if p.startswith(name) or p == "none"] for name in ("every", "segments", "sqrt")}
    line_plot(images / "frequency.png", {k: ([x for x, _ in v], [y for _, y in v]) for k, v in groups.items()},
              ("ms per step (predicted, T4)", "peak MB (predicted, T4)"), star=(*points[best], f"sweet spot: {best}"))  # fmt: skip
    section.picture("frequency.png", "peak against step time for each frequency; the star is the sweet spot")
    section.text(f"The sweet spot, the least peak x time of these: `{best}` ({cost[best]:.2f} of `none`'s).")
    return section


class _Sequential(nn.Module):
    """A stack run by torch's checkpoint_sequential."""

    def __init__(self, blocks: nn.Sequential, segments: int) -> None:
        super().__init__()
        self.blocks, self.segments = blocks, segments

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint_sequential(self.blocks, self.segments, x, use_reentrant=False)
        return out


def sequential(images: Path, quick: bool) -> Section:
    """torch's checkpoint_sequential against `segments:N`: bytes and blocks run again."""
    section = Section("checkpoint_sequential against segments:N")
    blocks, width, batch = (4, 64, 16) if quick else (16, 1024, 1024)
    rows = []
    for n in (2,) if quick else (2, 4, 8, 16):
        torchs = Case(lambda n=n: _Sequential(feed_forwards(blocks, width), n), mean_step(batch, width))
        ours = case(lambda: feed_forwards(blocks, width), batch, width)
        small = (Case(lambda n=n: _Sequential(feed_forwards(blocks, 32), n), mean_step(64, 32)), case(lambda: feed_forwards(blocks, 32), 64, 32))
        for name, full, tiny, policy in (("checkpoint_sequential", torchs, small[0], "none"), ("`segments`", ours, small[1], f"segments:{n}")):
            trace, real, cuda = predict(full, policy, "t4"), measure(tiny, policy), measure_cuda(full, policy)
            row = [f"{name}, {n}", mb(kept(trace)), mb(trace.peak_allocated), str(_run_again(trace)), str(real.peak_allocated), str(_run_again(real))]
            rows.append([*row, *([mb(cuda.peak)] if cuda else [])])
    header = ["segments", "kept MB, predicted (T4)", "peak MB, predicted (T4)", "blocks run again", "small on CPU: measured bytes", "blocks run again there"]
    section.table(header + (["peak MB, measured on CUDA"] if torch.cuda.is_available() else []), rows)
    section.text(
        "`checkpoint_sequential` leaves its last segment plain: backward needs that one first, so keeping it costs nothing at",
        "the peak and saves running it again. `segments:N` re-runs the last segment too; the bytes at the peak are the same up",
        "to what is written in the rows.",
    )
    return section


def _run_again(trace: StepTrace) -> int:
    """Blocks whose forward ran in backward, by their GELUs."""
    return sum(op.name == "aten.gelu.default" and op.phase == "backward" and op.at >= trace.start for op in trace.ops)
