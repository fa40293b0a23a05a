"""The step of a deep model, from traces of the same model with fewer blocks.

On several processes every block is traced, which takes minutes for 80 of them. Blocks repeat: with each further block,
the bytes that are allocated while the first, the second, the last block or the head runs grow by the same amount, and
so does the time of the step. Two depths show by how much.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt_ft.memory.fake.skipped_blocks import ShortenedRun, shorten
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.workloads.workload import Workload

from .budget import Candidate
from .tracing import Traced

UNITS = 4, 8  # of repeated blocks that the shallow models have
_ENDS = 2  # units at either end of a run whose bytes are extended; those in between lie between them
_MORE_UNUSED = 0.02, 0.1  # share of the bytes allocated, for adapters and for training of all weights
_WHOLE = ("none", "full", "pointwise", "head", "tile", "offload")  # policies that treat all blocks alike


def shallow(workloads: list[Workload]) -> list[ShortenedRun] | None:
    """Remove blocks from two copies of a model until UNITS are left; None if it has few blocks, or unlike ones."""
    runs = [shorten(workload.model, units) for workload, units in zip(workloads, UNITS, strict=True)]
    return [run for run in runs if run] if all(runs) else None


def with_few_blocks(workload: Workload) -> Workload | None:
    """A copy of `workload` with the fewest of UNITS; None if its model has few or unlike blocks, or real weights."""
    if not all(parameter.is_meta for parameter in workload.model.parameters()):
        return None
    few = replace(workload, model=copy.deepcopy(workload.model))
    return few if shorten(few.model, UNITS[0]) else None


def suits(policy: str) -> bool:
    """Whether `policy` treats all blocks alike."""
    return all(term.partition(":")[0] in _WHOLE for term in policy.split(","))


def extended(
    runs: Sequence[ShortenedRun], traces: Sequence[Traced], few: Candidate, more: Candidate, all_weights: bool
) -> Candidate:
    """The candidate of the deep model, from the traces and candidates of two shallow ones.

    The allocator's unused bytes hardly grow with the depth: they are those of the shallow models and a small share.
    """
    low, high = (_highs(trace, run) for trace, run in zip(traces, runs, strict=True) if isinstance(trace, StepTrace))
    times = (runs[1].units - UNITS[1]) / (UNITS[1] - UNITS[0])

    def at_depth(before: float, after: float) -> float:
        return after + (after - before) * times

    peak = int(max(at_depth(low[key], high[key]) for key in low.keys() & high.keys()))
    unused = max(few.reserved - few.peak, more.reserved - more.peak) + _MORE_UNUSED[all_weights] * peak
    host, seconds = int(at_depth(few.host, more.host)), at_depth(few.seconds, more.seconds)
    return replace(more, peak=peak, reserved=int(peak + unused), seconds=seconds, host=host)


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
