"""The page of a plan: the pick, every allocation of its step, and all candidates as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_ft.tables import Table
from ckpt_ft.units import format_bytes, format_change, format_number

from .holders import holders_table
from .page import STEP_TITLE, Figure, Page, Section, step_view

if TYPE_CHECKING:
    from ckpt_ft.memory.record.trace import StepTrace
    from ckpt_ft.planning.results import Plan


def plan_page(plan: Plan, best: StepTrace) -> Page:
    """The page of `plan --html`; `best` is the trace of the pick."""
    limit = None if best.device == "cpu" else plan.room.limit
    step = step_view(best, f"{plan.best.policy}, batch {plan.best.batch}", limit)
    launched = f"each GPU of {plan.best.launch}" if plan.best.launch else ""
    asked = f"a plan for {format_bytes(plan.room.budget)}, all figures predicted"
    return Page(
        f"{plan.model} on {plan.device}",
        "; ".join(filter(None, (asked, launched, plan.data))),
        [
            Section("figures", "", _figures(plan)),
            Section("step", f"{STEP_TITLE}: the pick", step),
            Section("tables", "The plan", _tables(plan)),
        ],
        ", ".join(f"{name} {version}" for name, version in plan.versions.items()),
        f"{plan.best.policy} at batch {plan.best.batch} is best: {format_bytes(plan.best.reserved)} reserved, "
        f"{format_number(plan.best.samples_per_second)} {plan.speed}",
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
