"""ResNet-50 with the four strategies of the founding case study: peak memory, time, largest batch, a loop with AMP.

    python benchmarks/resnet50.py              # prints, and writes its section of docs/vision.md; about two minutes
    python benchmarks/resnet50.py --no-write

Predictions for a T4 by `trace_step`, compared with published figures, and measurements if there is CUDA. MB is 10**6
bytes, as published.
"""

from __future__ import annotations

import argparse
import warnings
from dataclasses import dataclass

import torch
from torch import nn
from vision import Measured, Step, largest_batch, measure, table, trace, write_section  # type: ignore[import-not-found]

from ckpt_ft import apply_policy
from ckpt_ft.errors import run
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.units import MIB

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


def plain_step(batch: int, drop_gradients: bool = False) -> Step:
    """Returns a step of forward and backward in fp32; without an optimizer, gradients stay from step to step."""

    def step(model: nn.Module, optimizer: None) -> None:
        device = "cuda" if next(model.parameters()).is_cuda else "cpu"
        pixels = torch.zeros(batch, 3, SIDE, SIDE, device=device)
        labels = torch.zeros(batch, dtype=torch.long, device=device)
        if drop_gradients:
            model.zero_grad(set_to_none=True)
        model(pixel_values=pixels, labels=labels).loss.backward()

    return step


def amp_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """fp16 autocast with a scaled loss, AdamW. A GradScaler unscales in place: it allocates a few numbers only."""
    device = "cuda" if next(model.parameters()).is_cuda else "cpu"
    pixels = torch.zeros(BATCH, 3, SIDE, SIDE, device=device)
    labels = torch.zeros(BATCH, dtype=torch.long, device=device)
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.float16):
        loss = model(pixel_values=pixels, labels=labels).loss
    (loss * 2.0**16).backward()
    optimizer.step()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def predicted(policy: str, step: Step) -> StepTrace:
    with torch.device("meta"):
        model = resnet50()
    apply_policy(model, policy)
    return trace(model, step, GPU)


def measured(policy: str) -> Measured | None:
    def model() -> nn.Module:
        made = resnet50()
        apply_policy(made, policy)
        return made

    return measure(model, plain_step(BATCH))


def percent(value: float) -> str:
    return f"{100 * value:+.1f} %"


def peaks() -> str:
    """The four strategies: peak, saving, seconds."""
    header = ["strategy", "policy", "published MB", "predicted MB", "error", "dropped MB", "error"]
    header += ["saved, published", "saved, predicted", "published ms", "predicted ms", "ratio"]
    on_this_gpu = {policy: measured(policy) for policy in PUBLISHED}
    if any(on_this_gpu.values()):
        header += [f"measured MB ({torch.cuda.get_device_name()})", "measured ms"]
    rows, base = [], 0.0
    for policy, known in PUBLISHED.items():
        found, dropped = (
            predicted(policy, plain_step(BATCH)),
            predicted(policy, plain_step(BATCH, drop_gradients=True)),
        )
        peak, other, ms = found.peak_allocated / 1e6, dropped.peak_allocated / 1e6, 1000 * found.seconds
        base = base or peak
        row = [known.name, f"`{policy}`", f"{known.peak_mb:.2f}", f"{peak:.2f}", percent(peak / known.peak_mb - 1)]
        row += [f"{other:.2f}", percent(other / known.peak_mb - 1)]
        row += [f"{100 * (1 - known.peak_mb / 3033.27):.1f} %", f"{100 * (1 - peak / base):.1f} %"]
        row += [f"{known.milliseconds:.1f}", f"{ms:.1f}", f"{ms / known.milliseconds:.2f}"]
        measurement = on_this_gpu[policy]
        if any(on_this_gpu.values()):
            row += (
                [f"{measurement.allocated / 1e6:.2f}", f"{1000 * measurement.seconds:.1f}"]
                if measurement
                else ["", ""]
            )
        rows.append(row)
    return table(header, rows)


def batches() -> str:
    """The largest batch of each strategy, searched up to the case study's 256."""
    rows, base = [], 0
    for policy, known in PUBLISHED.items():
        found = largest_batch(lambda size, p=policy: predicted(p, plain_step(size)), CAPACITY, SEARCHED)
        base = base or found
        published = known.largest_batch
        capped = " (the cap)" if found == SEARCHED else ""
        row = [known.name, f"{published}{' (the cap)' if published == SEARCHED else ''}" if published else "not given"]
        row += [f"{found}{capped}", f"{published / 177:.2f}" if published else "", f"{found / base:.2f}"]
        rows.append(row)
    return table(["strategy", "published", "predicted", "published ratio", "predicted ratio"], rows)


def amp() -> str:
    """The training loop: 10 classes, batch 32, aggressive."""
    with torch.device("meta"):
        model = resnet50(classes=10)
    apply_policy(model, "aggressive")
    peak = trace(model, amp_step, GPU, adamw).peak_allocated / 1e6
    return table(
        ["training loop", "published MB", "predicted MB", "error"],
        [["fp16 autocast, scaled loss, AdamW, 10 classes, `aggressive`", f"{AMP_PEAK_MB:.2f}", f"{peak:.2f}",
          f"{100 * (peak / AMP_PEAK_MB - 1):+.2f} %"]],
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-write", action="store_true", help="leave docs/vision.md as it is")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    text = f"""## ResNet-50 on a Tesla T4

The published figures are from a case study on one Tesla T4 (torch 2.9, fp32, batch {BATCH} x 3 x {SIDE} x {SIDE}, no
optimizer). The predictions are `trace_step`'s for transformers' ResNet-50 on a T4. MB is 10**6 bytes. The loop has no
optimizer that frees the gradients, so they are assumed to stay from one iteration to the next. The columns "dropped"
assume instead that each iteration frees them first.

{peaks()}
The remaining error is likely cuDNN's workspace: which of its algorithms it chose for a layer is not known.

### Largest batch

The search is in fp32 within {CAPACITY // MIB:,} MiB, up to {SEARCHED} as in the case study. Predicted is the largest
batch whose traced step, warm-up included, fits under the caching allocator's rules.

{batches()}
### Training with mixed precision

{amp()}"""
    print(text)
    if not arguments.no_write:
        write_section("resnet50", text)
    return 0


if __name__ == "__main__":
    run(main)
