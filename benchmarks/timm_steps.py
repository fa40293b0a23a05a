"""Seconds of training steps of timm's models on an RTX 3090, beside those that timm publishes.

    pip install timm                          # it needs torchvision
    python benchmarks/timm_steps.py           # prints, and writes its section of docs/vision.md; about ten minutes
    python benchmarks/timm_steps.py --no-write --only resnet

The step is that of timm's benchmark.py: fp32 weights under fp16 autocast, cross entropy, SGD with Nesterov momentum
and one kernel for each tensor (torch 1.12's default), attention by matmuls (torch 1.12 had no fused attention). The
rules of convolutions were looked at on a third of one half of the models; the other half was not looked at.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vision import table, write_section  # type: ignore[import-not-found]

from ckpt_ft import trace_step
from ckpt_ft.errors import run

ROWS = Path(__file__).parent / "data" / "timm_steps_rtx3090.csv"
DEVICE = "rtx-3090"
TITLE = """## timm's models on an RTX 3090

Seconds of a training step, predicted by `trace_step` and published by timm (benchmark-train-amp, torch 1.12, CUDA
11.3, cuDNN's benchmark mode; fp16 autocast). {count} steps; the models that today's timm does not have are left out.
"Grouped": some convolution has several groups of more than one channel (ResNeXt, RegNet). The rules were looked at on
a third of the first half of the models (by a hash of the name), the second half not before this table was made.
"""
GROUPED = """
The steps with grouped convolutions in channels last are far too fast here: cuDNN of that time ran most of them at 1
to 4 TFLOP/s, slower than in channels first (`repvgg_b2g4`: 3.8 s against 1.3 s), but those of ResNeXt's 32 narrow
groups at full speed. Nothing is fitted to that.
"""


@dataclass(frozen=True)
class Row:
    """One published step, and its prediction. `half`: 0 if its model is of the first half, else 1."""

    model: str
    layout: str
    half: int
    grouped: bool
    published: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def build(name: str, side: int) -> nn.Module:
    """The model on "meta" for images of `side` pixels. Raises RuntimeError if timm does not have it."""
    import timm  # type: ignore[import-not-found]

    with torch.device("meta"):
        try:
            return timm.create_model(name, img_size=side).train()
        except TypeError:  # a CNN
            return timm.create_model(name).train()


def is_grouped(model: nn.Module) -> bool:
    """Whether any convolution has several groups of more than one channel."""
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    return any(1 < conv.groups < conv.in_channels for conv in convolutions)


def seconds(model: nn.Module, batch: int, side: int, last: bool) -> float:
    """The predicted seconds of one step; `last`: in channels last."""
    order = torch.channels_last if last else torch.contiguous_format
    images = torch.empty(batch, 3, side, side, device="meta").to(memory_format=order)
    labels = torch.zeros(batch, dtype=torch.long, device="meta")

    def step(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            output = model(images)
        output = output[0] if isinstance(output, tuple) else output
        nn.functional.cross_entropy(output, labels).backward()
        optimizer.step()

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, nesterov=True, foreach=False)

    ordered: nn.Module = model.to(memory_format=order)  # type: ignore[call-overload]
    return trace_step(ordered, step, make_optimizer=optimizer, device=DEVICE).seconds


def rows(only: str) -> Iterator[Row]:
    with ROWS.open(encoding="utf-8") as file:
        for published in csv.DictReader(file):
            name, side = published["model"], int(published["image"])
            if only not in name:
                continue
            try:
                model = build(name, side)
            except RuntimeError as error:
                print(f"{name}: left out ({error})", file=sys.stderr)
                continue
            predicted = seconds(model, int(published["batch"]), side, published["layout"] == "nhwc")
            half, measured = zlib.crc32(name.encode()) % 2, float(published["step_ms"]) / 1000
            row = Row(name, published["layout"], half, is_grouped(model), measured, predicted)
            print(
                f"{name:34s} {row.layout} {measured:7.3f} s, predicted {predicted:7.3f} s ({row.error:+.1%})",
                flush=True,
            )
            yield row


def summary(found: list[Row]) -> str:
    """Errors by layout, kind of convolution and half."""
    lines = []
    for layout, order in (("nchw", "channels first"), ("nhwc", "channels last")):
        for grouped in (False, True):
            for half, called in enumerate(("first", "second")):
                some = [row for row in found if (row.layout, row.grouped, row.half) == (layout, grouped, half)]
                if not some:
                    continue
                errors = sorted(abs(row.error) for row in some)
                worst = max(some, key=lambda row: abs(row.error))
                within = sum(error <= 0.25 for error in errors) / len(errors)
                lines.append(
                    [
                        f"{order}{', grouped' if grouped else ''}, {called} half",
                        str(len(some)),
                        f"{statistics.median(row.error for row in some):+.1%}",
                        f"{statistics.median(errors):.1%}",
                        f"{within:.0%}",
                        f"{worst.error:+.0%} ({worst.model})",
                    ]
                )
    return table(["steps", "n", "median", "median, absolute", "within 25 %", "worst"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--no-write", action="store_true", help="print only")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ.setdefault("TIMM_FUSED_ATTN", "0")
    found = list(rows(given.only))
    text = TITLE.format(count=len(found)) + "\n" + summary(found) + GROUPED
    print(text)
    if not given.no_write:
        write_section("timm", text)


if __name__ == "__main__":
    run(main)
