"""The step of a deep model, from traces of the same model with fewer blocks.

A trace of 80 blocks takes minutes under DeepSpeed, and a search for the longest sequence makes many traces. But blocks
repeat: with each further block, the bytes that are allocated while the first, the second, the last block or the head
runs grow by the same amount, and so does the time of the step. Traces at two depths show this amount.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.workloads.workload import Workload

from .budget import Candidate

UNITS = 4, 8  # of repeated blocks that the shallow models have
_ENDS = 2  # units at either end of a run whose bytes are extended; the bytes of the others are between theirs
# By which share of the bytes allocated a deep model leaves more unused than its copies: for adapters, and for all
# weights. The first are on the safe side, for figures that no trace of the whole model corrects.
_MORE_UNUSED = 0.02, 0.1
_MORE_UNUSED_USUALLY = 0.01, 0.1
_WHOLE = ("none", "full", "pointwise", "head", "tile", "offload")  # policies that treat all blocks alike
_PLAIN = (bool, int, float, str, type(None), torch.dtype)


def suits(policy: str) -> bool:
    """Whether `policy` treats all blocks alike."""
    return all(term.partition(":")[0] in _WHOLE for term in policy.split(","))


class ShortenedRun(NamedTuple):
    """A run that had `units` units of `period` blocks each, and of which the blocks with the names `left` remain."""

    units: int
    left: list[str]
    period: int

    def part_of(self, module: str, ends: int) -> object:
        """The unit that `module` is in, counted from the nearer end of the run; the module if it is outside.

        None for units that are not among the first or last `ends`.
        """
        for block, name in enumerate(self.left):
            if module == name or module.startswith(f"{name}."):
                unit, last = block // self.period, len(self.left) // self.period
                return unit if unit < ends else unit - last if unit >= last - ends else None
        return module


def shorten(model: nn.Module, units: int) -> ShortenedRun | None:
    """Remove blocks of the longest run that repeats until `units` units are left; None if it has no more.

    A unit is one block or, if kinds of blocks alternate (Gemma 3: five with a window of attention, one without), the
    shortest sequence of blocks that repeats.
    """
    lists = [(name, one) for name, one in model.named_modules() if isinstance(one, (nn.ModuleList, nn.Sequential))]
    runs = [(name, one, *_repeating(_kinds(one))) for name, one in lists]
    name, blocks, numbers, period = max(runs, key=lambda run: len(run[2]), default=("", None, range(0), 1))
    count, left = len(numbers) // period, range(numbers.start, numbers.start + units * period)
    if blocks is None or count <= units:
        return None
    del blocks[left.stop : numbers.stop]
    return ShortenedRun(count, [f"{name}.{number}".lstrip(".") for number in left], period)


def shortened(workload: Workload, units: int) -> tuple[Workload, ShortenedRun] | None:
    """A copy of the workload whose model has `units` units; None if it has no more, or real weights."""
    if not all(parameter.is_meta for parameter in workload.model.parameters()):
        return None
    fewer = replace(workload, model=copy.deepcopy(workload.model))
    run = shorten(fewer.model, units)
    return None if run is None else (fewer, run)


def _kinds(blocks: Iterable[nn.Module]) -> list[int]:
    """For each block, the number of the first one that is built like it."""
    described = [_described(block) for block in blocks]
    return [
        next(first for first in range(number + 1) if _alike(described[first], mine, (first, number)))
        for number, mine in enumerate(described)
    ]


def _described(block: nn.Module) -> list[Any]:
    """A block's modules, their settings and parameters."""
    found: list[Any] = []
    for name, module in block.named_modules():
        found += (name, type(module))
        found += ((key, value) for key, value in vars(module).items() if isinstance(value, _PLAIN))
        found += ((key, p.shape, p.dtype, p.requires_grad) for key, p in module.named_parameters(recurse=False))
    return found


def _alike(one: list[Any], other: list[Any], numbers: tuple[int, int]) -> bool:
    """Whether two blocks are described alike, but for settings that are their own numbers."""
    return len(one) == len(other) and all(
        a == b or (len(a) == 2 and a[0] == b[0] and (a[1], b[1]) == numbers) for a, b in zip(one, other, strict=True)
    )


def _repeating(kinds: Sequence[int]) -> tuple[range, int]:
    """The longest part of a list of blocks, of these kinds, that repeats a unit: its blocks, and a unit's length."""
    longest, length = range(0), 1
    for first in range(len(kinds)):
        for period in range(1, (len(kinds) - first) // 2 + 1):
            end = first + period
            while end < len(kinds) and kinds[end] == kinds[end - period]:
                end += 1
            blocks = range(first, end - (end - first) % period)
            if len(blocks) > max(len(longest), period):
                longest, length = blocks, period
    return longest, length


@dataclass(frozen=True)
class Shallow:
    """Two copies of a workload, with UNITS blocks each, and the deep model's figures from theirs.

    more_unused: the share of the bytes allocated that the deep model leaves unused beyond its copies.
    """

    runs: Sequence[ShortenedRun]
    workloads: Sequence[Workload]
    more_unused: float

    @classmethod
    def of(cls, workload: Workload, proved: bool = False) -> Shallow | None:
        """None if the model has few or unlike blocks, or real weights.

        proved: whether the whole model will be traced as well, so that figures need not be on the safe side.
        """
        fewer = [found for units in UNITS if (found := shortened(workload, units)) is not None]
        if len(fewer) < len(UNITS):
            return None
        trained = all(parameter.requires_grad for parameter in workload.model.parameters())
        workloads, runs = zip(*fewer, strict=True)
        return cls(runs, workloads, (_MORE_UNUSED_USUALLY if proved else _MORE_UNUSED)[trained])

    def candidate(self, policy: str, batch: int, traces: Sequence[StepTrace]) -> Candidate:
        """The candidate of the deep model, from the traces of both copies."""
        few, more = (Candidate.of(policy, batch, trace, self.workloads[0].accumulation) for trace in traces)
        peak, reserved = self.peaks(traces)
        host, seconds = int(self.extend(few.host, more.host)), self.extend(few.seconds, more.seconds)
        return replace(more, peak=peak, reserved=reserved, seconds=seconds, host=host)

    def peaks(self, traces: Sequence[StepTrace]) -> tuple[int, int]:
        """Bytes allocated and reserved by the deep model, from the traces of both copies.

        The allocator's unused bytes hardly grow with the depth: they are those of the copies and a small share.
        """
        low, high = (_highs(trace, run) for trace, run in zip(traces, self.runs, strict=True))
        peak = int(max(self.extend(low[key], high[key]) for key in low.keys() & high.keys()))
        unused = max(trace.peak_reserved - trace.peak_allocated for trace in traces)
        return peak, int(peak + unused + self.more_unused * peak)

    def extend(self, few: float, more: float) -> float:
        """A figure of the deep model from those of both copies."""
        return more + (more - few) * (self.runs[1].units - UNITS[1]) / (UNITS[1] - UNITS[0])


def _highs(trace: StepTrace, run: ShortenedRun) -> Mapping[Any, int]:
    """The most bytes allocated in the measured step while each part of the model runs, in each phase."""
    highs: dict[Any, int] = {}
    allocated, now = trace.replay.allocated, 0
    ops = [op for op in trace.ops if not op.name.startswith("event.")]
    parts = {module: run.part_of(module, _ENDS) for module in {op.module for op in ops}}
    for at in range(max(trace.start - 1, 0), len(allocated)):
        while now + 1 < len(ops) and ops[now + 1].at <= at:
            now += 1
        key = ops[now].phase, parts[ops[now].module]
        highs[key] = max(highs.get(key, 0), allocated[at])
    return highs
