"""The page of a run in a browser: predicted and measured bytes of each rank and phase, over the steps."""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from page_helpers import overflowing, wait_for_drawing
from sample_traces import HOSTILE, layered

from ckpt_ft.export.page import step_view
from ckpt_ft.export.report import report_page
from ckpt_ft.export.timeline import Timeline
from ckpt_ft.memory.measure.report import MAX_POINTS, History, MemoryReport, Prediction, RankMemory
from ckpt_ft.memory.record.events import PHASES
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    from playwright.sync_api import Page

Show = Callable[[Path], "Page"]


def report(trace: StepTrace | None = None) -> MemoryReport:
    """Returns a report of two ranks with 30 steps each; `trace` is its recorded step."""
    predicted = Prediction(
        "t4", 6 * GIB, {"forward": 5 * GIB, "backward": 6 * GIB, "optimizer": 3 * GIB}, 8 * GIB, 1.0
    )
    ranks = []
    for rank in range(2):
        history = History()
        for step in range(1, 31):
            history.add(step, {"forward": {"allocated": 5 * GIB + step}, "backward": {"allocated": (6 + rank) * GIB}})
        peaks = {
            "forward": {"allocated": 5 * GIB + 30, "reserved": 8 * GIB},
            "backward": {"allocated": (6 + rank) * GIB, "reserved": 8 * GIB},
        }
        ranks.append(RankMemory(rank, "Tesla T4", 30, 30, peaks, history=history, predicted=predicted))
    if trace is None:
        return MemoryReport({"policy": "full"}, ranks)
    return MemoryReport({"policy": "full"}, ranks, timeline=Timeline.from_trace(trace), step=step_view(trace))


def test_each_rank_and_phase_has_its_prediction(show: Show, tmp_path: Path) -> None:
    page = show(report().to_html(tmp_path / "report.html"))
    said = page.locator(".bar-row").evaluate_all("rows => rows.map((row) => row.getAttribute('aria-label'))")
    assert "backward, rank 1: 7.00 GiB measured, 6.00 GiB predicted" in said
    assert "reserved, rank 0: 8.00 GiB measured, 8.00 GiB predicted" in said
    assert "optimizer, rank 0: not measured, 3.00 GiB predicted" in said
    assert len(said) == 4 * 2
    assert page.locator(".bar-row", has_text="rank 1").nth(1).inner_text().endswith("-14.3 %")


def test_steps_of_a_rank_are_drawn(show: Show, tmp_path: Path) -> None:
    page = show(report().to_html(tmp_path / "report.html"))
    page.get_by_role("button", name="rank 1", exact=True).click()
    wait_for_drawing(page)
    picture = page.locator("svg[aria-label^='Peaks of rank 1']")
    assert picture.locator("polyline").count() == 2
    box = picture.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] - 20, box["y"] + 100)
    wait_for_drawing(page)
    tip = page.locator(".tooltip:not([hidden])").inner_text().split("\n")
    assert tip[0] == "step 30"
    assert "7.00 GiB" in tip


def test_report_shows_its_recorded_step(show: Show, tmp_path: Path) -> None:
    trace = layered(2)
    made = report(trace)
    page = show(made.to_html(tmp_path / "report.html"))
    assert page.locator("aside .here .big").inner_text() == format_bytes(trace.peak_allocated)
    made.to_json(tmp_path / "memory_report.json")
    loaded = MemoryReport.from_json(tmp_path / "memory_report.json")  # the JSON has a shortened timeline
    page = show(loaded.to_html(tmp_path / "again.html"))
    assert f"peak {format_bytes(trace.peak_allocated)}" in page.locator("svg[aria-label^='Memory over']").inner_html()


def test_page_of_a_report_begins_with_its_answer_and_names_the_model() -> None:
    made = report()
    made.provenance["model"] = "gpt2"
    page = report_page(made, None)
    assert page.title == "Memory report of gpt2"
    assert page.answer == "the step took 7.00 GiB at its peak, measured; predicted 6.00 GiB (-14.3%)"


def test_notebook_shows_a_report() -> None:
    made = report()
    made.provenance["policy"] = HOSTILE
    shown = made._repr_html_()
    assert "7.00 GiB" in shown
    assert HOSTILE not in shown
    assert '"kind":"step"' not in html.unescape(shown)  # no step was recorded
    assert '"kind":"step"' in html.unescape(report(layered(2))._repr_html_())


def test_steps_that_were_not_measured_are_gaps(show: Show, tmp_path: Path) -> None:
    made = report()
    history = History()
    for step in (1, 2, 3, 26, 50, 51):
        history.add(step, {"forward": {"allocated": GIB * step}})
    made.ranks[0] = replace(made.ranks[0], history=history, between={"evaluation": [20, 40], "saving": [50]})
    page = show(made.to_html(tmp_path / "report.html"))
    picture = page.locator("svg[aria-label^='Peaks of rank 0']")
    drawn = picture.locator("polyline").evaluate_all("lines => lines.map((line) => line.points.numberOfItems)")
    assert drawn == [3, 1, 2]
    assert picture.locator("circle").count() == 6
    assert picture.locator("line.between title").all_text_contents() == [
        "evaluation after step 20", "evaluation after step 40", "saving after step 50"
    ]  # fmt: skip


def test_history_of_a_long_run_is_thinned() -> None:
    history = History()
    for step in range(1, 10_001):
        history.add(step, {"forward": {"allocated": 1, "reserved": 2}, "backward": {"allocated": step % 777 * MIB}})
    assert MAX_POINTS / 2 <= len(history.steps) <= MAX_POINTS
    assert {len(history.allocated[phase]) for phase in PHASES} == {len(history.steps)} == {len(history.reserved)}
    assert history.steps[:2] == [1, 1 + history.every]
    assert history.ends[:2] == [history.every, 2 * history.every]
    assert max(history.allocated["backward"]) == 776 * MIB  # the peaks are kept
    first = [step % 777 * MIB for step in range(1, 1 + history.every)]
    assert history.allocated["backward"][0] == max(first)


@pytest.mark.parametrize("every", [1, 2])
def test_history_without_a_gpu_has_no_reserved_bytes(every: int) -> None:
    history = History()
    for step in range(1, MAX_POINTS * every + 1):
        history.add(step, {"forward": {"allocated": step}})
    assert history.every == every
    assert history.reserved == []


def test_report_page_fits_a_phone(show: Show, tmp_path: Path) -> None:
    assert overflowing(show(report(layered(2)).to_html(tmp_path / "report.html"))) == []
