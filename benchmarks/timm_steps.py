"""Predicted seconds of training steps of timm's models on an RTX 3090, compared with timm's published ones.

    pip install --target DIR --no-deps timm==0.6.7 torchvision     # the models as they were when they were timed
    PYTHONPATH=DIR python benchmarks/timm_steps.py                  # half an hour of one core
    PYTHONPATH=DIR python benchmarks/timm_steps.py --no-write --only resnet
    python benchmarks/timm_steps.py --from-results                  # docs/vision.md from results/timm_steps.csv

The step is that of timm's benchmark.py under torch 1.12: fp32 weights under fp16 autocast, cross entropy, gradients
that are set to zero and not dropped, SGD with Nesterov momentum and one kernel for each tensor, attention by matmuls.
Later versions of timm have other models under these names: since 0.8 the queries are scaled in place of the scores,
which is a pass over the scores less, and 1.0 builds ig_resnext101_32x8d for ig_resnext101_32x32d.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import statistics
import sys
import warnings
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.pages import DATA, table, write_section
from ckpt_ft import trace_step
from ckpt_ft.errors import UserError, run

ROWS, RESULTS = DATA / "timm_steps_rtx3090.csv", DATA.parent / "results" / "timm_steps.csv"
DEVICE, TIMM = "rtx-3090", "0.6.7"
PROSE = (DATA / "timm_steps.md").read_text(encoding="utf-8")


def _hash(model: str) -> int:
    return zlib.crc32(model.encode())


@dataclass(frozen=True)
class Row:
    """A published step and its prediction."""

    model: str
    layout: str
    grouped: bool
    published: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1

    @property
    def seen(self) -> bool:
        """Whether rules may be chosen with knowledge of it: true for half of the models, by name."""
        return _hash(self.model) % 2 == 0


def build(name: str) -> nn.Module:
    """Returns the model on "meta", or on the CPU if it needs values. Raises RuntimeError if this timm lacks it."""
    import timm  # type: ignore[import-not-found]

    linspace = torch.linspace

    def on_cpu(*args: Any, **kwargs: Any) -> Tensor:  # rates of stochastic depth, which are read as numbers
        return linspace(*args, **{"device": "cpu", **kwargs})

    with torch.device("meta"), patch.object(torch, "linspace", on_cpu):
        try:
            return timm.create_model(name).train()
        except NotImplementedError:  # positions that are computed from a buffer
            pass
    return timm.create_model(name).train()


def is_grouped(model: nn.Module) -> bool:
    """Whether any convolution has several groups of more than one channel."""
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    return any(1 < conv.groups < conv.in_channels for conv in convolutions)


def seconds(model: nn.Module, batch: int, side: int, last: bool) -> float:
    """Returns the predicted seconds of one step; `last`: in channels last."""
    order = torch.channels_last if last else torch.contiguous_format
    images = torch.empty((batch, 3, side, side), memory_format=order)
    labels = torch.zeros(batch, dtype=torch.long, device="meta")

    def step(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)
        with torch.autocast("cuda", torch.float16):
            output = model(images)
        output = output[0] if isinstance(output, tuple) else output
        nn.functional.cross_entropy(output, labels).backward()
        optimizer.step()

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, nesterov=True, foreach=False)

    ordered: nn.Module = model.to(memory_format=order)  # type: ignore[call-overload]
    return trace_step(ordered, step, make_optimizer=optimizer, device=DEVICE).seconds


def rows(only: str, models: int | None) -> Iterator[Row]:
    """Returns traces of the published steps whose model has `only` in its name, for `models` models by hash order."""
    import timm

    if timm.__version__ != TIMM:
        raise UserError(f"timm {timm.__version__}: the steps were timed with {TIMM}, and its models differ")
    with ROWS.open(encoding="utf-8") as file:
        steps = sorted(csv.DictReader(file), key=lambda row: _hash(row["model"]) // 2)
        drawn = list(dict.fromkeys(row["model"] for row in steps if only in row["model"]))[:models]
        for published in (row for row in steps if row["model"] in drawn):
            name, layout = published["model"], published["layout"]
            try:
                model = build(name)
            except RuntimeError as error:
                print(f"{name}: left out ({error})", file=sys.stderr)
                continue
            predicted = seconds(model, int(published["batch"]), int(published["image"]), layout == "nhwc")
            yield Row(name, layout, is_grouped(model), float(published["step_ms"]) / 1000, predicted)


def results() -> list[Row]:
    """Returns the rows of `RESULTS`."""
    with RESULTS.open(encoding="utf-8") as file:
        return [
            Row(model, layout, grouped == "True", float(published), float(predicted))
            for model, layout, grouped, published, predicted in list(csv.reader(file))[1:]
        ]


def summary(found: list[Row]) -> str:
    """Returns errors by layout, kind of convolution and half."""
    lines, orders = [], {"nchw": "channels first", "nhwc": "channels last"}
    for layout, grouped, seen in itertools.product(orders, (False, True), (True, False)):
        if some := [row for row in found if (row.layout, row.grouped, row.seen) == (layout, grouped, seen)]:
            kind = f"{orders[layout]}{', grouped' * grouped}, {'seen' if seen else 'unseen'}"
            lines.append([kind, *figures(some)])
    lines += [[f"all, {called}", *figures(half)] for called, half in halves(found).items()]
    return table(["steps", "n", "median", "median, absolute", "within 25 %", "worst"], lines)


def halves(found: Iterable[Row]) -> dict[str, list[Row]]:
    """Returns the rows of the models with which rules were chosen, and the others."""
    split: dict[str, list[Row]] = {"seen": [], "unseen": []}
    for row in found:
        split["seen" if row.seen else "unseen"].append(row)
    return {called: half for called, half in split.items() if half}


def figures(some: list[Row]) -> list[str]:
    """Returns count, median, absolute median, share within 25 %, worst."""
    errors = [abs(row.error) for row in some]
    worst = max(some, key=lambda row: abs(row.error))
    within = sum(error <= 0.25 for error in errors) / len(errors)
    middle = statistics.median(row.error for row in some)
    median = f"{statistics.median(errors):.1%}"
    return [str(len(some)), f"{middle:+.1%}", median, f"{within:.0%}", f"{worst.error:+.0%} ({worst.model})"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="models whose name contains this; writes nothing")
    parser.add_argument("--models", type=int, metavar="N", help="a sample: the N models of the smallest hashes")
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--from-results", action="store_true", help="trace nothing, read results/timm_steps.csv")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    found = results() if given.from_results else list(rows(given.only, given.models))
    text = PROSE.format(count=len(found), timm=TIMM, table=summary(found))
    print(text)
    if given.no_write or given.only:
        return
    if not given.from_results:
        with RESULTS.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([field.name for field in fields(Row)])
            writer.writerows((*astuple(row)[:3], *(f"{s:.6g}" for s in astuple(row)[3:])) for row in found)
    write_section("vision.md", "timm", text)


if __name__ == "__main__":
    run(main)
