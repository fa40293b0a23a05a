"""Shared by resnet50.py and vit.py: traced and, on CUDA, measured steps; largest batches; docs/vision.md."""

from __future__ import annotations

import datetime
import os
import platform
import re
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckpt_ft.memory.allocator.replay import replay
from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.memory.measure.report import provenance
from ckpt_ft.memory.record.trace import StepTrace

PAGE = Path(__file__).parents[1] / "docs" / "vision.md"
TITLE = "# Vision: ResNet-50 and ViT-L/16\n"
Step = Callable[[nn.Module, Any], None]
WARM_UP, TIMED = 3, 10


@dataclass(frozen=True)
class Measured:
    """A step on this machine's GPU: `torch.cuda.max_memory_allocated` in bytes and the median of its seconds."""

    allocated: int
    seconds: float


def measure(
    make_model: Callable[[], nn.Module], step: Step, make_optimizer: Callable[[nn.Module], Any] | None = None
) -> Measured | None:
    """Runs the step on CUDA after a warm-up; None without CUDA or if it runs out of memory."""
    if not torch.cuda.is_available():
        return None
    model = optimizer = None
    try:
        torch.cuda.empty_cache()
        model = make_model().cuda()
        optimizer = make_optimizer(model) if make_optimizer else None
        for _ in range(WARM_UP):
            step(model, optimizer)
        torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(TIMED):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step(model, optimizer)
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1000)
        return Measured(torch.cuda.max_memory_allocated(), statistics.median(seconds))
    except torch.OutOfMemoryError:
        return None
    finally:
        del model, optimizer
        torch.cuda.empty_cache()


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


def trace(
    model: nn.Module,
    step: Step,
    device: str,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
) -> StepTrace:
    """Returns `trace_step` of one step after a warm-up step."""
    return trace_step(model, step, make_optimizer=make_optimizer, device=device)


def table(header: list[str], rows: list[list[str]]) -> str:
    """Returns a Markdown table with right-aligned columns after the first."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def made_by() -> str:
    """Returns command, versions, machine and day as one line."""
    facts = provenance()
    versions = ", ".join(f"{name} {facts['versions'][name]}" for name in ("python", "torch", "transformers"))
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores, {gpu}"
    return f"Made by `python benchmarks/{facts['command']}` with {versions} on {machine}, {datetime.date.today()}."


def write_section(name: str, text: str) -> None:
    """Writes `text` into docs/vision.md as the section `name`, replacing the previous one."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    page = PAGE.read_text(encoding="utf-8") if PAGE.exists() else TITLE
    section = f"{begin}\n{text.strip()}\n\n{made_by()}\n{end}\n"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}\n", re.DOTALL)
    page = pattern.sub(lambda _: section, page) if pattern.search(page) else f"{page}\n{section}"
    PAGE.write_text(page, encoding="utf-8")
    print(f"wrote {PAGE.relative_to(PAGE.parents[1])}", file=sys.stderr)
