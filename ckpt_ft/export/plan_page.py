"""The page of a plan: candidates by memory and speed, the pick for each budget, and two steps laid over each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_ft.tables import Table
from ckpt_ft.units import format_at_least, format_bytes, format_change, format_number

from .holders import holders_table, merge_layer_numbers, short_op
from .page import STEP_TITLE, Figure, Page, Section, StepView
from .timeline import Timeline

if TYPE_CHECKING:
    from ckpt_ft.memory.cost.schedule import Span
    from ckpt_ft.memory.record.trace import StepTrace
    from ckpt_ft.planning.budget import Candidate
    from ckpt_ft.planning.plan import BudgetSweep
    from ckpt_ft.planning.results import Plan

OUTLINE_MOMENTS = 400


@dataclass
class StepOutline:
    """A measured step with a model's repeated layers merged.

    microseconds: of each moment that is kept (see Timeline). series: category -> bytes at these moments.
    phases: (microseconds, phase that begins there). peak: bytes.
    held: (module, op, category, bytes, count) at the peak.
    backward: (module, op, kernels, microseconds) of each op that ran in backward, recomputed ones included.
    """

    microseconds: list[int]
    series: dict[str, list[int]]
    phases: list[tuple[int, str]]
    peak: int
    held: list[tuple[str, str, str, int, int]]
    backward: list[tuple[str, str, int, int]]

    @classmethod
    def from_trace(cls, trace: StepTrace, spans: Iterable[Span]) -> StepOutline:
        """The measured step of `trace`; `spans` is its schedule."""
        spans = list(spans)
        times, timeline = trace.moment_times(spans), Timeline.from_trace(trace, OUTLINE_MOMENTS)
        ran: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
        for span in spans:
            if span.op.phase == "backward" and span.end > span.start:
                entry = ran[merge_layer_numbers(span.op.module), short_op(span.op.name)]
                entry[0] += span.op.kernels or 1
                entry[1] += span.end - span.start
        return cls(
            microseconds=[round(1e6 * times[moment]) for moment in timeline.moments],
            series=timeline.series,
            phases=[(round(1e6 * times[at]), phase) for at, phase in timeline.marks],
            peak=trace.replay.peak_allocated(trace.start),
            held=[
                (held.module, short_op(held.op), held.category, held.nbytes, held.count)
                for held in trace.grouped_holders(len(trace.storages))
            ],
            backward=[(*key, int(kernels), round(1e6 * time)) for key, (kernels, time) in ran.items()],
        )


@dataclass(frozen=True)
class Point:
    """A candidate, the flags that train with it, and its step in outline."""

    policy: str
    batch: int
    peak: int
    reserved: int
    seconds: float
    speed: float
    flags: str
    outline: StepOutline


@dataclass(frozen=True)
class Pick:
    """The points that fit a budget, the pick first.

    left: bytes that the pick leaves free. flags: with these a recipe plans for this budget.
    """

    budget: int
    limit: int
    points: list[int]
    left: int
    flags: str


@dataclass(frozen=True)
class ChoiceView:
    """All candidates of a budget sweep, their frontier, and the picks at rising budgets, as positions in `points`.

    asked: the position of the requested budget in `picks`. unit: of the speeds.
    """

    points: list[Point]
    frontier: list[int]
    picks: list[Pick]
    asked: int
    unit: str


def choice_view(sweep: BudgetSweep) -> ChoiceView:
    """The data of the chart with a slider for the budget."""
    candidates = sorted(sweep.traces, key=lambda candidate: (candidate.policy, candidate.batch))
    number = {candidate: i for i, candidate in enumerate(candidates)}
    picks = [
        Pick(
            point.room.budget,
            point.room.limit,
            [number[candidate] for candidate in point.candidates],
            point.room.limit - point.pick.reserved,
            f"--ac_policy auto --ac_budget {_without_spaces(format_at_least(point.room.budget))}",
        )
        for point in sweep.points
    ]
    return ChoiceView(
        points=[_point(candidate, sweep) for candidate in candidates],
        frontier=[number[candidate] for candidate in sweep.frontier()],
        picks=picks,
        asked=next(i for i, pick in enumerate(picks) if pick.budget == sweep.plan.room.budget),
        unit=sweep.plan.speed,
    )


def plan_page(sweep: BudgetSweep) -> Page:
    """The page of `plan --html`: the candidates, the step of the pick, and the plan as tables."""
    plan = sweep.plan
    best = sweep.traces[plan.best]
    limit = None if best.device == "cpu" else plan.room.limit
    step = StepView.from_trace(best, f"{plan.best.policy}, batch {plan.best.batch}", limit)
    launched = f"each GPU of {plan.best.launch}" if plan.best.launch else ""
    asked = f"a plan for {format_bytes(plan.room.budget)}, all figures predicted"
    return Page(
        f"{plan.model} on {plan.device}",
        "; ".join(filter(None, (asked, launched, plan.data))),
        [
            Section("figures", "", _figures(plan)),
            Section("choice", "What fits, and how fast it is", choice_view(sweep)),
            Section("step", f"{STEP_TITLE}: the pick", step),
            Section("tables", "The plan", _tables(plan)),
        ],
        ", ".join(f"{name} {version}" for name, version in plan.versions.items()),
        f"{plan.best.policy} at batch {plan.best.batch} is best: {format_bytes(plan.best.reserved)} reserved, "
        f"{format_number(plan.best.samples_per_second)} {plan.speed}",
    )


def _point(candidate: Candidate, sweep: BudgetSweep) -> Point:
    return Point(
        candidate.policy,
        candidate.batch,
        candidate.peak,
        candidate.reserved,
        candidate.seconds,
        candidate.samples_per_second,
        f"--ac_policy {candidate.policy} --per_device_train_batch_size {candidate.batch}",
        StepOutline.from_trace(sweep.traces[candidate], sweep.schedule(candidate)),
    )


def _figures(plan: Plan) -> list[Figure]:
    best = plan.best
    return [
        Figure("pick", best.policy, f"batch {best.batch}"),
        Figure("reserved", format_bytes(best.reserved), f"of at most {format_bytes(plan.room.limit)}"),
        Figure(plan.speed, format_number(best.samples_per_second), f"{format_number(best.seconds)} s a step"),
        Figure("left over", format_bytes(plan.room.limit - best.reserved), f"of {format_bytes(plan.room.budget)}"),
    ]


def _tables(plan: Plan) -> list[Table]:
    fixes = [(fix.change, format_bytes(fix.saves), format_change(fix.slower)) for fix in plan.fixes]
    tables = [plan.candidates_table, holders_table(plan.holders, plan.best.peak)]
    if fixes:
        tables.append(Table("What else would help", ("change", "saves", "time a sample"), fixes))
    if plan.rejected:
        tables.append(Table("No candidates", ("policy", "why"), list(plan.rejected.items()), text=(0, 1)))
    if plan.notes:
        tables.append(Table("Notes", ("what is assumed",), [(note,) for note in plan.notes]))
    return tables


def _without_spaces(amount: str) -> str:
    return amount.replace(" ", "")
