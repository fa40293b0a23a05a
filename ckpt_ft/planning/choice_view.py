"""ChoiceView: a budget sweep as the page draws it: candidates by bytes and speed, the pick for each budget."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ckpt_ft.memory.gpus import gpu_of
from ckpt_ft.memory.record.holders import holders_table
from ckpt_ft.memory.record.views.outline import Outline
from ckpt_ft.memory.record.views.step_view import STEP_TITLE, StepView
from ckpt_ft.page.document import Figure, Page, Section
from ckpt_ft.tables import Table
from ckpt_ft.units import format_at_least, format_bytes, format_number

from .budget_sweep import BudgetSweep
from .candidate import Candidate, frontier, spans
from .results import Plan


@dataclass(frozen=True)
class Point:
    """A candidate, what to type for it, and its step in short."""

    policy: str
    batch: int
    peak: int
    reserved: int
    seconds: float
    speed: float
    flags: str
    outline: Outline


@dataclass(frozen=True)
class Pick:
    """What fits a budget: numbers of points, the pick first. `left`: bytes; `flags`: what plans for it in a recipe."""

    budget: int
    limit: int
    points: list[int]
    left: int
    flags: str


@dataclass(frozen=True)
class ChoiceView:
    """All candidates of a sweep, those that none beats in both bytes and speed, and the picks at rising budgets.

    asked: the number of the budget that was asked for. unit: of the speeds.
    """

    points: list[Point]
    frontier: list[int]
    picks: list[Pick]
    asked: int
    unit: str


def choice_view(sweep: BudgetSweep) -> ChoiceView:
    """What there is to choose from."""
    candidates = sorted(sweep.traces, key=lambda candidate: (candidate.policy, candidate.batch))
    number = {candidate: i for i, candidate in enumerate(candidates)}
    picks = [
        Pick(
            point.room.budget,
            point.room.limit,
            [number[candidate] for candidate in point.candidates],
            point.room.limit - point.pick.reserved,
            f"--ac_policy auto --ac_budget {_typed(format_at_least(point.room.budget))}",
        )
        for point in sweep.points
    ]
    return ChoiceView(
        points=[_point(candidate, sweep) for candidate in candidates],
        frontier=[number[candidate] for candidate in frontier(candidates)],
        picks=picks,
        asked=next(i for i, pick in enumerate(picks) if pick.budget == sweep.plan.room.budget),
        unit=sweep.plan.speed,
    )


def budget_sweep_page(sweep: BudgetSweep) -> Page:
    """The page of `plan --html`: the choice, the step of the pick, and the figures as tables."""
    plan = sweep.plan
    best = sweep.traces[plan.best]
    gpu = gpu_of(plan.device) if best.gpu is None else best.gpu
    step = StepView.from_trace(best, f"{plan.best.policy}, batch {plan.best.batch}", plan.room.limit if gpu else None)
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
    )


def write_budget_sweep(sweep: BudgetSweep, path: str | Path) -> Path:
    """Write the page of `sweep` to `path`: one file, to be opened in a browser."""
    return budget_sweep_page(sweep).write(path)


def _point(candidate: Candidate, sweep: BudgetSweep) -> Point:
    trace = sweep.traces[candidate]
    return Point(
        candidate.policy,
        candidate.batch,
        candidate.peak,
        candidate.reserved,
        candidate.seconds,
        candidate.samples_per_second,
        f"--ac_policy {candidate.policy} --per_device_train_batch_size {candidate.batch}",
        Outline.of(trace, spans(trace)),
    )


def _figures(plan: Plan) -> list[Figure]:
    best = plan.best
    return [
        Figure("pick", best.policy, f"batch {best.batch}"),
        Figure("reserved", format_bytes(best.reserved), f"of {format_bytes(plan.room.limit)} that may be"),
        Figure(plan.speed, format_number(best.samples_per_second), f"{format_number(best.seconds)} s a step"),
        Figure("left over", format_bytes(plan.room.limit - best.reserved), f"of {format_bytes(plan.room.budget)}"),
    ]


def _tables(plan: Plan) -> list[Table]:
    fixes = [(fix.change, format_bytes(fix.saves), f"{fix.slower:+.1%}") for fix in plan.fixes]
    tables = [plan.candidates_table, holders_table(plan.holders, plan.best.peak)]
    if fixes:
        tables.append(Table("What else would help", ("change", "saves", "time a sample"), fixes))
    if plan.rejected:
        tables.append(Table("No candidates", ("policy", "why"), list(plan.rejected.items()), text=(0, 1)))
    if plan.notes:
        tables.append(Table("Notes", ("what is assumed",), [(note,) for note in plan.notes]))
    return tables


def _typed(amount: str) -> str:
    return amount.replace(" ", "")
