"""The step of a deep model, from traces of the same model with fewer blocks.

Under DeepSpeed every block is traced, which takes minutes for 80 of them. But blocks repeat: with
each further block, the bytes that are allocated while the first, the second, the last block or the head runs grow by
the same amount, and so does the time of the step. Traces at two depths show this amount.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckpt_ft.memory.fake.skipped_blocks import ShortenedRun, shorten
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.workloads.workload import Workload

from .budget import Candidate

UNITS = 4, 8  # of repeated blocks that the shallow models have
_ENDS = 2  # units at either end of a run whose bytes are extended; the bytes of the others are between theirs
_MORE_UNUSED = 0.02, 0.1  # share of the bytes allocated, for adapters and for training of all weights
_WHOLE = ("none", "full", "pointwise", "head", "tile", "offload")  # policies that treat all blocks alike


def suits(policy: str) -> bool:
    """Whether `policy` treats all blocks alike."""
    return all(term.partition(":")[0] in _WHOLE for term in policy.split(","))


@dataclass(frozen=True)
class Shallow:
    """Two copies of a workload, with UNITS blocks each, and the deep model's figures from theirs.

    Attributes:
        runs: the shortened run of blocks of each copy.
        all_weights: whether all weights are trained.
    """

    runs: Sequence[ShortenedRun]
    workloads: Sequence[Workload]
    all_weights: bool

    @classmethod
    def of(cls, workload: Workload) -> Shallow | None:
        """None if the model has few or unlike blocks, or real weights."""
        parameters = list(workload.model.parameters())
        if not all(parameter.is_meta for parameter in parameters):
            return None
        fewer = [replace(workload, model=copy.deepcopy(workload.model)) for _ in UNITS]
        runs = [shorten(one.model, units) for one, units in zip(fewer, UNITS, strict=True)]
        trained = all(parameter.requires_grad for parameter in parameters)
        return cls([run for run in runs if run], fewer, trained) if all(runs) else None

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
        return peak, int(peak + unused + _MORE_UNUSED[self.all_weights] * peak)

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
