"""The page of a plan in a browser."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import small_models
from page_helpers import overflowing

from ckpt_ft.export.plan_page import plan_page
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.planning.plan import PlanRequest, traced_plan
from ckpt_ft.planning.results import Plan
from ckpt_ft.units import MIB, format_bytes

if TYPE_CHECKING:
    from playwright.sync_api import Page

Show = Callable[[Path], "Page"]


@pytest.fixture(scope="module")
def made() -> tuple[Plan, StepTrace]:
    asked = PlanRequest(3 * MIB, batch_size=8, policies=["none", "full", "first:2"])
    return traced_plan(small_models.llama().workload("cpu"), asked)


@pytest.fixture
def page(made: tuple[Plan, StepTrace], show: Show, tmp_path: Path) -> Page:
    return show(plan_page(*made).write(tmp_path / "plan.html"))


def test_page_begins_with_the_pick(page: Page, made: tuple[Plan, StepTrace]) -> None:
    plan, best = made
    assert best.peak_reserved == plan.best.reserved
    said = page.locator(".answer").inner_text()
    assert said.startswith(f"{plan.best.policy} at batch 8 is best: {format_bytes(plan.best.reserved)} reserved")


def test_table_has_every_candidate(page: Page, made: tuple[Plan, StepTrace]) -> None:
    rows = page.locator("section", has_text="The plan").last.locator("tbody tr")
    policies = [candidate.policy for candidate in made[0].candidates]
    assert [row.split()[0] for row in rows.all_inner_texts()][: len(policies)] == policies


def test_plan_page_fits_a_phone(page: Page) -> None:
    assert overflowing(page) == []
