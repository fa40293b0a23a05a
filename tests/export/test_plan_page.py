"""The page of a plan in a browser: at each budget it shows the pick of `plan`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import small_models
from page_helpers import overflowing, wait_for_drawing

from ckpt_ft.export.plan_page import choice_view, plan_page
from ckpt_ft.planning.plan import BudgetSweep, budget_sweep
from ckpt_ft.units import MIB, format_bytes

if TYPE_CHECKING:
    from playwright.sync_api import Page

Show = Callable[[Path], "Page"]


@pytest.fixture(scope="module")
def sweep() -> BudgetSweep:
    """A sweep whose points equal plans, as tests/planning/test_budget_sweep.py shows."""
    return budget_sweep(
        small_models.llama().workload("cpu"), 3 * MIB, batch_size=8, policies=["none", "full", "first:2"]
    )


@pytest.fixture
def page(sweep: BudgetSweep, show: Show, tmp_path: Path) -> Page:
    return show(plan_page(sweep).write(tmp_path / "plan.html"))


def shown_pick(page: Page) -> list[str]:
    """Returns the budget, the pick and its batch size as the page shows them."""
    aside = page.locator("aside").first
    head = aside.locator("h3").first.inner_text()
    return [head.removeprefix("Pick for "), aside.locator(".big").inner_text(), aside.locator("dd").first.inner_text()]


def test_pick_follows_the_dragged_budget(page: Page, sweep: BudgetSweep) -> None:
    chart = page.locator("svg.choice").bounding_box()
    assert chart is not None
    most = 1.04 * sweep.points[-1].room.budget
    for point in [*sweep.points, *sweep.points[::-2]]:
        grip = page.locator(".budget rect").bounding_box()
        assert grip is not None
        page.mouse.move(grip["x"] + grip["width"] / 2, grip["y"] + 8)
        page.mouse.down()
        to = chart["x"] + 64 + point.room.budget / most * (chart["width"] - 64 - 20)
        page.mouse.move(to + 3, grip["y"] + 30, steps=2)
        page.mouse.up()
        wait_for_drawing(page)
        assert shown_pick(page) == [format_bytes(point.room.budget), point.pick.policy, str(point.pick.batch)]
        typed = f"--ac_policy {point.pick.policy} --per_device_train_batch_size {point.pick.batch}"
        assert page.locator("aside .code").first.inner_text().split("\n")[0].strip() == typed


def test_arrow_keys_move_the_budget(page: Page, sweep: BudgetSweep) -> None:
    handle = page.locator(".budget")
    handle.focus()
    page.keyboard.press("Home")
    for point in sweep.points:
        wait_for_drawing(page)
        assert shown_pick(page)[:2] == [format_bytes(point.room.budget), point.pick.policy]
        assert handle.get_attribute("aria-valuenow") == str(point.room.budget)
        page.keyboard.press("ArrowRight")


def test_copy_button_copies_the_flags(page: Page, sweep: BudgetSweep) -> None:
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    page.locator("aside .code button").first.click()
    wait_for_drawing(page)
    best = sweep.plan.best
    assert page.evaluate("window.copied") == f"--ac_policy {best.policy} --per_device_train_batch_size {best.batch}"


def test_two_points_are_compared(page: Page, sweep: BudgetSweep) -> None:
    view = choice_view(sweep)
    by_policy = {point.policy: point for point in view.points}
    first, second = by_policy["none"], by_policy["full"]
    for dot in page.locator(".dot[aria-pressed=true]").all():
        dot.press("Enter")
    wait_for_drawing(page)
    for point in (first, second):
        page.locator(f".dot[aria-label^='{point.policy}, batch {point.batch}']").press("Enter")
        wait_for_drawing(page)
    verdict = page.locator(".verdict").inner_text()
    assert f"full · 8 saves {format_bytes(first.peak - second.peak)} at the peak" in verdict
    ran = [{row[:2]: row[2] for row in point.outline.backward} for point in (first, second)]
    more_kernels = sum(max(0, kernels - ran[0].get(key, 0)) for key, kernels in ran[1].items())
    assert more_kernels > 100
    assert f"in backward it runs {more_kernels} more kernels" in verdict
    assert page.locator(".overlay path.side").count() == 2
    page.get_by_text("swap").click()
    wait_for_drawing(page)
    swapped = page.locator(".verdict").inner_text()
    assert f"none · 8 takes {format_bytes(first.peak - second.peak)} more" in swapped
    assert f"it runs {more_kernels} more kernels" not in swapped


def test_table_has_every_point(page: Page, sweep: BudgetSweep) -> None:
    points = page.locator("section", has_text="All points").last
    assert points.locator("tbody tr").count() == len(sweep.traces)
    assert page.locator(".dot").count() == len(sweep.traces)


def test_plan_page_fits_a_phone(page: Page) -> None:
    assert overflowing(page) == []
