"""The ResNet-50 case study on a Tesla T4: four strategies, largest batches, a training loop with AMP.

The loop has no optimizer that frees the gradients, so they are assumed to stay from one iteration to the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckpt_ft.memory.allocator.replay import replay
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.units import MIB

from .common import Case, Figure, Section, predict

GPU, CAPACITY, SEARCHED = "t4", 14_912 * MIB, 256
BATCH, SIDE = 32, 224
AMP_PEAK_MB = 1630.90


@dataclass(frozen=True)
class Published:
    """The case study's figures for a strategy: Tesla T4, fp32, 32 x 3 x 224 x 224, torch 2.9."""

    name: str
    peak_mb: float
    milliseconds: float
    largest_batch: int | None


PUBLISHED = {
    "none": Published("none", 3033.27, 276.69, 177),
    "stages:3+4": Published("aggressive: stages 3 and 4, block by block", 2627.26, 316.66, 205),
    "stages": Published("per stage", 1765.28, 368.39, None),
    "full": Published("per block", 1360.01, 368.90, 256),
}


def resnet50(classes: int = 1000) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(num_labels=classes)).train()


def plain_step(batch: int) -> Callable[[nn.Module, Any], None]:
    """Returns a step of forward and backward in fp32; without an optimizer, gradients stay from step to step."""

    def step(model: nn.Module, optimizer: Any) -> None:
        pixels, labels = torch.zeros(batch, 3, SIDE, SIDE), torch.zeros(batch, dtype=torch.long)
        model(pixel_values=pixels, labels=labels).loss.backward()

    return step


def amp_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """fp16 autocast with a scaled loss, AdamW. A GradScaler unscales in place: it allocates a few numbers only."""
    pixels, labels = torch.zeros(BATCH, 3, SIDE, SIDE), torch.zeros(BATCH, dtype=torch.long)
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.float16):
        loss = model(pixel_values=pixels, labels=labels).loss
    (loss * 2.0**16).backward()
    optimizer.step()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def predicted(policy: str, batch: int) -> StepTrace:
    return predict(Case(resnet50, plain_step(batch)), policy, GPU)


def predicted_amp() -> StepTrace:
    return predict(Case(lambda: resnet50(classes=10), amp_step, adamw), "stages:3+4", GPU)


def fits(trace: StepTrace, capacity: int) -> bool:
    """Whether the caching allocator can serve warm-up and step within `capacity` bytes, releasing cached segments."""
    return replay([storage.nbytes for storage in trace.storages], trace.events, capacity=capacity).oom_at is None


def largest_batch(trace_of: Callable[[int], StepTrace], capacity: int, most: int) -> int:
    """Returns the largest batch up to `most` whose step fits, by bisection from a linear extrapolation of the peak."""
    low, high = (trace_of(size).peak_allocated for size in (8, 16))
    per_image = (high - low) / 8
    estimate = min(most, int((capacity - low) / per_image) + 8)
    if estimate == most and fits(trace_of(most), capacity):
        return most
    good, bad = 0, estimate + 1
    step = max(1, estimate // 64)
    while not good:  # downwards in growing steps to one that fits
        size, step = max(1, bad - step), 2 * step
        if fits(trace_of(size), capacity):
            good = size
        elif size == 1:
            return 0
        else:
            bad = size
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(trace_of(middle), capacity):
            good = middle
        else:
            bad = middle
    return good


def resnet(images: Path, quick: bool) -> Section:
    """The four strategies, largest batches and AMP loop of the case study."""
    section = Section("The ResNet-50 case study")
    source = "ResNet-50 case study, T4"
    section.text(
        "One Tesla T4, torch 2.9, fp32, batch 32 x 3 x 224 x 224, no optimizer. The prediction is for transformers'",
        "ResNet-50; nothing frees the gradients, so they stay from one iteration to the next. The remaining error is",
        "likely cuDNN's workspace: which of its algorithms it chose for a layer is not known. The largest batch is",
        f"that whose step, warm-up included, fits in {CAPACITY // MIB:,} MiB under the allocator's rules, up to",
        f"{SEARCHED}.",
    )
    rows = []
    for policy, known in list(PUBLISHED.items())[: 1 if quick else None]:
        trace = predicted(policy, 2 if quick else BATCH)
        peak, ms = trace.peak_allocated / 1e6, 1e3 * trace.seconds
        theirs, took = known.peak_mb, known.milliseconds
        section.figures += [
            Figure(source, f"{known.name}: peak", f"{theirs:.2f}", peak, theirs),
            Figure(source, f"{known.name}: ms per iteration", f"{took:.2f}", ms, took, "ms"),
        ]
        errors = [figure.error for figure in section.figures[-2:]]
        rows.append([f"`{policy}`", f"{theirs:.2f}", f"{peak:.2f}", errors[0], f"{took:.1f}", f"{ms:.1f}", errors[1]])
    header = ["policy", "published MB", "predicted MB (T4)", "error", "published ms", "predicted ms", "error"]
    section.table(header, rows)
    for policy, known in PUBLISHED.items() if not quick else ():
        if (batch := known.largest_batch) is not None:
            most = largest_batch(partial(predicted, policy), CAPACITY, SEARCHED)
            capped = "the search's cap, as published" if most == SEARCHED == batch else ""
            what = f"{known.name}: largest batch"
            section.figures.append(Figure(source, what, str(batch), most, batch, "", note=capped))
    amp = predicted_amp().peak_allocated / 1e6
    what = "training loop with AMP, aggressive: peak"
    section.figures.append(Figure(source, what, f"{AMP_PEAK_MB:.2f}", amp, AMP_PEAK_MB))
    return section
