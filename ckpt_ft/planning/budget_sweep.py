"""budget_sweep: the plans at several memory budgets, for the page of `plan --html`.

Each budget is searched as `plan` searches it, so the pick at a budget is what `plan` answers for that budget. The
searches share their traces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ckpt_ft.memory.cost.schedule import Span
from ckpt_ft.memory.gpus import gpu_of
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.units import GIB, MIB, format_bytes
from ckpt_ft.workloads.workload import Workload, or_loop

from .budget import MemoryBudget, memory_budget
from .candidate import Candidate, frontier, spans
from .estimates import Estimates
from .plan import PlanRequest, planned, searching
from .results import Plan
from .search import search
from .tracing import Report, Traced

OTHERS = 8  # maximum number of budgets besides the requested one
_ROUND = (1, 2, 5, 10, 20, 25, 50)


@dataclass(frozen=True)
class SweepPoint:
    """A budget and the candidates that fit it, the pick first."""

    room: MemoryBudget
    candidates: list[Candidate]

    @property
    def pick(self) -> Candidate:
        return self.candidates[0]


@dataclass(frozen=True)
class BudgetSweep:
    """The requested plan, and the candidates at rising budgets.

    Attributes:
        plan: the plan for the requested budget.
        points: one for each budget, in rising order, with the requested budget.
        traces: the trace of each candidate of a point.
    """

    plan: Plan
    points: list[SweepPoint]
    traces: dict[Candidate, StepTrace]

    def frontier(self) -> list[Candidate]:
        """The candidates that no other one beats in both memory and speed, fastest first."""
        return frontier(self.traces)

    def schedule(self, candidate: Candidate) -> Iterator[Span]:
        """When each op of a candidate's step runs; nominal on "cpu"."""
        return spans(self.traces[candidate])


@or_loop
def budget_sweep(
    workload: Workload,
    budget: str | int | None = None,
    *,
    batch_size: int | None = None,
    max_batch_size: int = 1024,
    target: str = "throughput",
    margin: str | float | None = None,
    policies: list[str] | None = None,
    jobs: int = 1,
    report: Report | None = None,
) -> BudgetSweep:
    """The plan for `budget`, and the picks for other budgets up to the GPU's memory (on "cpu" up to twice `budget`).

    Arguments and errors are those of `plan`. A sweep takes about three times as long as a plan.
    """
    question = PlanRequest(budget, batch_size, max_batch_size, target, margin, policies)
    say = report or (lambda line: None)
    with searching(workload, jobs, report) as tracer:
        asked, estimates = planned(tracer, question)
        points = [SweepPoint(asked.room, asked.candidates)]
        budgets = [nbytes for nbytes in _budgets(workload, estimates) if nbytes != asked.room.budget]
        for i, nbytes in enumerate(budgets, 1):
            say(f"planning for {format_bytes(nbytes)}, {i} of {len(budgets)} other budgets")
            room = memory_budget(nbytes, gpu_of(workload.device), margin, workload.launch)
            found = search(replace(estimates, room=room, anchors={}, rejected={}, bests={}), question.chosen)
            if found:
                points.append(SweepPoint(room, found))
        traced = tracer.traced
    candidates = [candidate for point in points for candidate in point.candidates]
    traces = {candidate: _trace(traced[candidate.policy, candidate.batch]) for candidate in candidates}
    return BudgetSweep(asked, sorted(points, key=lambda point: point.room.budget), traces)


def _trace(traced: Traced) -> StepTrace:
    assert isinstance(traced, StepTrace), "a candidate has a trace"
    return traced


def _budgets(workload: Workload, estimates: Estimates) -> list[int]:
    """Round budgets from the smallest that works up to all memory, and all memory."""
    gpu, room = gpu_of(workload.device), estimates.room
    highest = gpu.memory if gpu else 2 * room.budget
    lowest = room.needs(estimates.leanest())
    apart = _apart(highest - lowest)
    multiples = range(math.ceil(lowest / apart) * apart, highest, apart)
    return [*multiples, highest]


def _apart(span: int) -> int:
    """The smallest round distance that puts at most `OTHERS` budgets within `span` bytes."""
    unit = GIB if span >= 2 * GIB else MIB if span >= 2 * MIB else 1024
    share = span / (OTHERS - 1) / unit
    scale = 10 ** math.floor(math.log10(share)) if share >= 1 else 1 / 4
    return int(next(factor * scale for factor in _ROUND if factor * scale >= share) * unit)
