"""A survey: its picks are what `plan` says for those budgets."""

from __future__ import annotations

import pytest
import small_models

from ckpt_ft.planning.plan import plan
from ckpt_ft.planning.survey import OTHERS, Survey, survey
from ckpt_ft.units import MIB

FEW = {"batch_size": 8, "policies": ["none", "full", "first:2"]}


@pytest.fixture(scope="module")
def surveyed() -> Survey:
    return survey(small_models.llama().workload("cpu"), 3 * MIB, **FEW)


def test_every_pick_is_what_plan_says_for_that_budget(surveyed: Survey) -> None:
    budgets = [stop.room.budget for stop in surveyed.stops]
    assert budgets == sorted(set(budgets))
    assert 5 <= len(budgets) <= OTHERS + 1
    first = {stop.pick: stop for stop in reversed(surveyed.stops)}  # the smallest budget of each pick
    assert len(first) == 3
    for stop in first.values():
        alone = plan(small_models.llama().workload("cpu"), stop.room.budget, **FEW)
        assert alone.candidates == stop.candidates


def test_the_plan_is_the_one_that_was_asked_for(surveyed: Survey) -> None:
    asked = next(stop for stop in surveyed.stops if stop.room.budget == 3 * MIB)
    assert surveyed.plan.candidates == asked.candidates
    assert surveyed.stops[-1].room.budget == 6 * MIB  # on a CPU: twice the budget


def test_every_candidate_has_its_trace(surveyed: Survey) -> None:
    for stop in surveyed.stops:
        assert all(stop.room.fits(candidate) for candidate in stop.candidates)
        for candidate in stop.candidates:
            assert surveyed.traces[candidate].peak_reserved == candidate.reserved


@pytest.mark.slow
def test_picks_of_a_whole_search_are_what_plan_says() -> None:
    found = survey(small_models.llama().workload("cpu"), 3 * MIB, max_batch_size=16)
    for stop in found.stops[::2]:
        alone = plan(small_models.llama().workload("cpu"), stop.room.budget, max_batch_size=16)
        assert alone.candidates == stop.candidates
