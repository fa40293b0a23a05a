"""The page of a step in a browser shows the numbers of the trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from page_helpers import overflowing, wait_for_drawing, wait_until
from sample_traces import HOSTILE, layered

from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.units import MIB, format_bytes

if TYPE_CHECKING:
    from playwright.sync_api import Page

Show = Callable[[Path], "Page"]
LEFT, TOP, HIGH = 68, 26, 390  # position and height of the stacked chart


@pytest.fixture(scope="module")
def trace() -> StepTrace:
    return layered(6)


@pytest.fixture
def page(trace: StepTrace, show: Show, tmp_path: Path) -> Page:
    return show(trace.to_html(tmp_path / "step.html", "a model"))


def point_at(page: Page, share: float, level: float) -> None:
    """Moves the pointer to a share of the chart's width and height."""
    box = page.locator(".chart canvas").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + share * box["width"], box["y"] + (1 - level) * box["height"])


def moment_of(page: Page) -> int:
    return int(page.locator("aside .here .muted").first.inner_text().split()[1].replace(",", ""))


def held_at(trace: StepTrace, moment: int) -> int:
    return trace.replay.allocated[trace.start + moment - 1]


def test_page_opens_at_the_peak(page: Page, trace: StepTrace) -> None:
    assert page.title() == "a model"
    assert page.locator("aside .here .big").inner_text() == format_bytes(trace.peak_allocated)
    assert moment_of(page) == trace.peak_at - trace.start + 1
    assert f"peak {format_bytes(trace.peak_allocated)}" in page.locator(".chart").inner_text()
    assert f"reserved {format_bytes(trace.peak_reserved)}" in page.locator(".chart").inner_text()


@pytest.mark.parametrize("share", [0.1, 0.35, 0.62, 0.9])
def test_hovered_moment_shows_the_bytes_of_the_trace(page: Page, trace: StepTrace, share: float) -> None:
    point_at(page, share, 0.5)
    wait_for_drawing(page)
    moment = moment_of(page)
    assert moment == pytest.approx(share * (len(trace.events) - trace.start), abs=3)
    assert page.locator("aside .here .big").inner_text() == format_bytes(held_at(trace, moment))
    by_category: dict[str, int] = {}
    for storage, nbytes in trace.live_at(trace.start + moment - 1):
        by_category[storage.category] = by_category.get(storage.category, 0) + nbytes
    for category, nbytes in by_category.items():
        row = page.locator("aside .here tr", has_text=category)
        assert row.locator(".number").first.inner_text() == format_bytes(nbytes)


def test_click_shows_the_lifetime(page: Page, trace: StepTrace) -> None:
    point_at(page, 0.5, 0.005)  # the lowest area of the stack is the first weight
    wait_for_drawing(page)
    tip = page.locator(".tooltip:not([hidden])").inner_text()
    assert [line for line in tip.splitlines() if line][:3] == [
        "2.0 MiB parameters",
        "model.layers.0.q_proj",
        "there before the step",
    ]
    page.mouse.down()
    page.mouse.up()
    wait_for_drawing(page)
    life = page.locator(".life").inner_text()
    assert "2.0 MiB" in life
    assert "not in this step" in life
    assert f"6, in total {format_bytes(12 * MIB)}" in life  # one in each of six layers
    assert page.locator("path.chosen").count() == 1


def test_wheel_and_drag_zoom(page: Page) -> None:
    def seen() -> float:
        return page.locator(".minimap .seen").bounding_box()["width"]  # type: ignore[index]

    whole = seen()
    point_at(page, 0.5, 0.5)
    page.mouse.wheel(0, -400)
    wait_until(page, lambda: seen() < 0.6 * whole)
    wait_for_drawing(page)
    closer = seen()
    point_at(page, 0.25, 0.5)
    page.mouse.down()
    point_at(page, 0.75, 0.5)
    page.mouse.up()
    wait_for_drawing(page)
    assert seen() == pytest.approx(closer / 2, rel=0.1)
    page.get_by_text("whole step", exact=True).click()
    wait_for_drawing(page)
    assert seen() == whole


def test_keys_move_the_moment_and_select_an_allocation(page: Page, trace: StepTrace) -> None:
    peak = trace.peak_at - trace.start + 1
    page.locator(".chart").focus()
    for key, moment in (("p", peak), ("ArrowRight", peak + 1), ("ArrowLeft", peak), ("Home", 0), ("End", None)):
        page.keyboard.press(key)
        wait_for_drawing(page)
        last = len(trace.events) - trace.start
        if moment != 0:
            assert moment_of(page) == (last if moment is None else moment)
        expected = format_bytes(held_at(trace, last if moment is None else moment))
        assert page.locator("aside .here .big").inner_text() == expected
    page.keyboard.press("ArrowUp")
    wait_for_drawing(page)
    assert "model.layers.0.q_proj" in page.locator(".life").inner_text()
    assert "model.layers.0.q_proj" in page.locator("[aria-live]").first.inner_text()  # screen readers read it too
    page.keyboard.press("Escape")
    wait_for_drawing(page)
    assert "Click an allocation" in page.locator(".life").inner_text()


def test_icicle_cells_add_up(page: Page, trace: StepTrace) -> None:
    said = page.locator(".cell").evaluate_all("cells => cells.map((cell) => cell.getAttribute('aria-label'))")
    assert said[0] == f"a model: {format_bytes(trace.peak_allocated)}"
    assert f"model.layers.*.q_proj: {format_bytes(6 * 3 * MIB)}" in said  # a weight and a saved activation
    page.get_by_text("merge repeated layers").click()
    wait_for_drawing(page)
    page.locator(".cell[aria-label^='model.layers.3:']").click()
    wait_for_drawing(page)
    shown = page.locator(".cell").first
    assert shown.get_attribute("aria-label") == f"model.layers.3: {format_bytes(7 * 3 * MIB)}"


def test_table_has_every_allocation(page: Page, trace: StepTrace) -> None:
    page.get_by_text("every allocation").click()
    wait_for_drawing(page)
    every = trace.lifetimes()
    assert f"{len(every)} of {len(every)} rows" in page.locator(".data-table .muted").inner_text()
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    page.get_by_text("copy as CSV").click()
    wait_for_drawing(page)
    lines = page.evaluate("window.copied").splitlines()
    assert len(lines) == 1 + len(every)
    assert sum(int(line.split(",")[0]) for line in lines[1:]) == sum(life.nbytes for life in every)
    page.get_by_role("searchbox").fill("layers.4 up_proj backward")
    wait_for_drawing(page)
    assert page.locator(".data-table tbody tr").count() == 1


def test_names_are_escaped(show: Show, tmp_path: Path) -> None:
    page = show(layered(1, prefix=HOSTILE).to_html(tmp_path / "step.html", f"</script>{HOSTILE}"))
    assert page.title() == f"</script>{HOSTILE}"
    assert page.locator("img").count() == 0
    page.get_by_text("every allocation").click()
    wait_for_drawing(page)
    assert HOSTILE in page.locator(".data-table tbody").inner_text()


def test_light_and_dark_theme(page: Page) -> None:
    def ground() -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    light = ground()
    page.get_by_text("light / dark").click()
    wait_for_drawing(page)
    dark = ground()
    page.emulate_media(color_scheme="dark")
    assert (light, dark) == ("rgb(255, 255, 255)", "rgb(17, 21, 26)")
    page.get_by_text("light / dark").click()
    wait_for_drawing(page)
    assert ground() == light


def test_step_page_fits_a_phone(page: Page) -> None:
    assert overflowing(page) == []
