"""A budget sweep picks at each budget what `plan` picks."""

from __future__ import annotations

import pytest
import small_models

from ckpt_ft.planning.plan import OTHERS, BudgetSweep, budget_sweep, plan
from ckpt_ft.units import MIB

FEW = {"batch_size": 8, "policies": ["none", "full", "first:2"]}


@pytest.fixture(scope="module")
def sweep() -> BudgetSweep:
    return budget_sweep(small_models.llama().workload("cpu"), 3 * MIB, **FEW)


@pytest.mark.slow
def test_every_pick_equals_the_plan_for_its_budget(sweep: BudgetSweep) -> None:
    budgets = [point.room.budget for point in sweep.points]
    assert budgets == sorted(set(budgets))
    assert 5 <= len(budgets) <= OTHERS + 1
    first = {point.pick: point for point in reversed(sweep.points)}  # the smallest budget of each pick
    assert len(first) == 3
    for point in first.values():
        alone = plan(small_models.llama().workload("cpu"), point.room.budget, **FEW)
        assert alone.candidates == point.candidates


def test_plan_is_for_the_given_budget(sweep: BudgetSweep) -> None:
    asked = next(point for point in sweep.points if point.room.budget == 3 * MIB)
    assert sweep.plan.candidates == asked.candidates
    assert sweep.points[-1].room.budget == 6 * MIB  # on a CPU: twice the budget


def test_every_candidate_has_a_trace(sweep: BudgetSweep) -> None:
    for point in sweep.points:
        assert all(point.room.fits(candidate) for candidate in point.candidates)
        for candidate in point.candidates:
            assert sweep.traces[candidate].peak_reserved == candidate.reserved


@pytest.mark.slow
def test_picks_of_an_unrestricted_search_equal_plans() -> None:
    found = budget_sweep(small_models.llama().workload("cpu"), 3 * MIB, max_batch_size=16)
    for point in found.points[::2]:
        alone = plan(small_models.llama().workload("cpu"), point.room.budget, max_batch_size=16)
        assert alone.candidates == point.candidates
