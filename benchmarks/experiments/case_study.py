"""The ResNet-50 case study on a Tesla T4: four strategies, largest batches, a training loop with AMP.

The loop has no optimizer that frees the gradients, so they are assumed to stay from one iteration to the next.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.pages import table
from ckpt_ft.memory.allocator.replay import replay
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.planning.budget import largest_fitting
from ckpt_ft.units import MIB

from .common import PUBLISHED, Case, Figure, Found, adamw, predict

SOURCE, GPU, CAPACITY, SEARCHED = "ResNet-50 case study, T4", "t4", 14_912 * MIB, 256
BATCH, SIDE = 32, 224
AMP_PEAK_MB = 1630.90


def resnet50(classes: int = 1000) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(num_labels=classes)).train()


def step(model: Any, optimizer: Any, batch: int = BATCH, amp: bool = False) -> None:
    """Forward and backward in fp32, without an optimizer; or with fp16 autocast, a scaled loss and AdamW.

    A GradScaler unscales in place: it allocates a few numbers only.
    """
    pixels, labels = torch.zeros(batch, 3, SIDE, SIDE), torch.zeros(batch, dtype=torch.long)
    if amp:
        optimizer.zero_grad()
    with torch.autocast("cuda", torch.float16, enabled=amp):
        loss = model(pixel_values=pixels, labels=labels).loss
    (loss * 2.0**16 if amp else loss).backward()
    if amp:
        optimizer.step()


def predicted(policy: str, batch: int = BATCH) -> StepTrace:
    return predict(Case(resnet50, partial(step, batch=batch)), policy, GPU)


def predicted_amp() -> StepTrace:
    return predict(Case(partial(resnet50, 10), partial(step, amp=True), adamw), "stages:3+4", GPU)


def largest_batch(policy: str) -> int:
    """The largest batch for whose warm-up and step the caching allocator finds `CAPACITY` bytes, up to `SEARCHED`."""

    def needs(batch: int) -> int:
        trace = predicted(policy, batch)
        sizes = [storage.nbytes for storage in trace.storages]
        out_of_memory = replay(sizes, trace.events, capacity=CAPACITY).oom_at is not None
        return max(trace.peak_allocated, CAPACITY + 1) if out_of_memory else trace.peak_allocated

    return largest_fitting(needs, CAPACITY, SEARCHED)


def resnet(images: Path) -> Found:
    """The four strategies, largest batches and AMP loop of the case study."""
    rows, figures = [], []
    for policy, (name, theirs, took, _) in PUBLISHED["resnet"].items():
        trace = predicted(policy)
        peak, ms = trace.peak_allocated / 1e6, 1e3 * trace.seconds
        figures.append(Figure(SOURCE, f"{name}: peak", f"{theirs:.2f}", peak, theirs))
        figures.append(Figure(SOURCE, f"{name}: ms per iteration", f"{took:.2f}", ms, took, "ms"))
        errors = [figure.error for figure in figures[-2:]]
        rows.append([f"`{policy}`", f"{theirs:.2f}", f"{peak:.2f}", errors[0], f"{took:.1f}", f"{ms:.1f}", errors[1]])
    for policy, (name, _, _, batch) in PUBLISHED["resnet"].items():
        if batch is not None:
            most = largest_batch(policy)
            capped = "the search's cap, as published" if most == SEARCHED == batch else ""
            figures.append(Figure(SOURCE, f"{name}: largest batch", str(batch), most, batch, "", capped))
    amp = predicted_amp().peak_allocated / 1e6
    what = "training loop with AMP, aggressive: peak"
    figures.append(Figure(SOURCE, what, f"{AMP_PEAK_MB:.2f}", amp, AMP_PEAK_MB))
    header = ["policy", "published MB", "predicted MB (T4)", "error", "published ms", "predicted ms", "error"]
    return Found({"table": table(header, rows), "capacity": f"{CAPACITY // MIB:,}", "searched": SEARCHED}, figures)
