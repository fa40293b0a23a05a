"""Where memory goes in stacks of layers, and the effect of checkpointing."""

from __future__ import annotations

import itertools
from pathlib import Path

from torch import nn

from ckpt_ft.memory.record.trace import StepTrace

from .common import MB, Figure, Section, kept, line_plot, mb, measure, policy_table, predict
from .models import case, linear_stack, relu_stack

LINEAR = "linear stack 8 x 4096 x 4096, batch 256, fp32, T4"


def breakdown(images: Path, quick: bool) -> Section:
    """Bytes of each category by batch size, and the batch size from which activations dominate."""
    section = Section("Where memory goes, against the batch size")
    section.text(
        "The table has the most bytes of each category during a step of ten linear layers of width 1024, each with",
        "a ReLU, fp32, AdamW, predicted for a T4. The last columns are of the same stack of width 64, run on the CPU.",
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
    header = [
        "batch",
        *(f"{name} MB" for name in names),
        "peak MB, predicted (T4)",
        "small on CPU: predicted bytes",
        "measured bytes",
    ]
    section.table(header, rows)
    line_plot(
        images / "breakdown.png",
        {k: ([float(b) for b in batches], v) for k, v in shares.items()},
        ("batch size", "MB (predicted, T4)"),
        log=True,
    )
    section.picture("breakdown.png", "bytes by category against the batch size")
    section.text(
        f"The crossover: from batch {crossover} on, activations take more than parameters, gradients and optimizer",
        "state together. Below it checkpointing has little to save.",
    )
    return section


def timeline(images: Path, quick: bool) -> Section:
    """The linear stack over time: forward, the peak in backward, and zero_grad."""
    section = Section("The timeline of the linear stack")
    depth, width, batch = (4, 256, 32) if quick else (8, 4096, 256)

    def build() -> nn.Module:
        return linear_stack(depth, width)

    trace = predict(case(build, batch, width), "none", "t4")
    trace.plot(images / "linear_stack.png")
    allocated, growth, backward = trace.replay.allocated, *_forward(trace)
    moments = {"before the step, gradients of the last one still there": allocated[trace.start - 1]}
    moments["after zero_grad, with the batch"] = min(allocated[trace.start : growth[0]])
    moments |= {f"after layer {n + 1}": allocated[at] for n, at in enumerate(growth)}
    moments |= {"before backward": allocated[backward - 1], "peak, in backward": trace.peaks["backward"]}
    moments["after backward"] = allocated[-1]
    section.table(["moment", "MB, predicted (T4)"], [[name, mb(nbytes)] for name, nbytes in moments.items()])
    section.picture("linear_stack.png", "the linear stack's memory over one step")
    steps = [after - before for before, after in itertools.pairwise(allocated[at] for at in growth)]
    phase = max(trace.peaks, key=trace.peaks.__getitem__)
    section.figures += [
        Figure(LINEAR, "growth per layer in forward", "+4.2", max(steps) / MB, 4.2),
        Figure(LINEAR, "where the peak falls", "backward", None, unit="", note=f"predicted: {phase}"),
    ]
    section.text(
        f"Forward adds {mb(max(steps))} MB a layer; the peak comes in backward, where activations and gradients",
        "coexist.",
    )
    return section


def _forward(trace: StepTrace) -> tuple[list[int], int]:
    """Returns the events at which the layers of the measured step returned their outputs, and where backward began."""
    backward = next(at for at, name in trace.marks if name == "backward" and at >= trace.start)
    made = [(at, trace.storages[trace.events[at]].op) for at in range(trace.start, backward) if trace.events[at] >= 0]
    return [at for at, op in made if op == "aten.addmm.default"], backward


def segments(images: Path, quick: bool) -> Section:
    """Checkpointing of bare layers, one by one and in segments."""
    section = Section("Per-layer against segment checkpointing")
    section.text(
        "A bare linear layer keeps its input for backward, and so does a checkpoint around it. Per-layer",
        "checkpointing therefore saves nothing. It costs nothing either, because a non-reentrant checkpoint stops",
        "once it has the tensors that backward needs. A segment keeps one input for several layers.",
    )
    depth, width, batch = (4, 256, 32) if quick else (8, 4096, 256)
    traces = policy_table(
        section,
        ["none", "full", "segments:4", "segments:2", "sqrt"],
        case(lambda: linear_stack(depth, width), batch, width),
        case(lambda: linear_stack(depth, 64), 256, 64),
        "t4",
    )
    saved = 100 * (1 - kept(traces["full"]) / kept(traces["none"]))
    section.figures.append(
        Figure(
            LINEAR,
            "kept activations saved by per-layer checkpointing",
            "0 %",
            saved,
            0.0,
            "%",
            note=f"segments:2 saves {100 * (1 - kept(traces['segments:2']) / kept(traces['none'])):.0f} %",
        )
    )
    return section
