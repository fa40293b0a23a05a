"""The stacked areas of a step that every format draws, and the columns of a trace's JSON."""

from __future__ import annotations

import dataclasses
import html
import json
from pathlib import Path
from typing import Any

import pytest
from sample_traces import HOSTILE, layered

from ckpt_ft.errors import UserError
from ckpt_ft.export.plots import step_svg
from ckpt_ft.export.timeline import CATEGORY_COLOURS, Timeline
from ckpt_ft.export.trace_json import OP_COLUMNS, STORAGE_COLUMNS
from ckpt_ft.memory.measure.report import MemoryReport
from ckpt_ft.memory.record.events import CATEGORIES, Op, Storage
from ckpt_ft.memory.record.trace import StepTrace

SMALL = Timeline(
    [0, 2, 3],
    {"parameters": [4, 4, 4], "activations": [0, 3, 1]},
    [(0, "forward"), (2, "backward")],
    2,
    [],
    "measured",
)


def test_peak_is_the_largest_sum_and_phases_end_where_the_next_begins() -> None:
    assert SMALL.peak_bytes == 7
    assert list(SMALL.phases()) == [("forward", 0, 2), ("backward", 2, 3)]


def test_shortened_timeline_keeps_the_peak() -> None:
    trace = layered(6)
    for points in (7, 1500):
        timeline = Timeline.from_trace(trace, points)
        assert timeline.peak_bytes == trace.peak_allocated
        assert max(map(sum, zip(*timeline.series.values(), strict=True))) == trace.peak_allocated
        assert len(timeline.moments) <= points


def test_picture_in_a_page_names_its_source_and_draws_each_category() -> None:
    svg = step_svg(SMALL)
    assert svg.startswith("<svg role='img' aria-label='Memory over the step, measured: peak 7 B'")
    colours = [CATEGORY_COLOURS[name][0] for name in ("parameters", "activations")]
    assert all(f"fill: {colour}" in svg for colour in colours)
    assert svg.count("<svg") == 1


@pytest.mark.parametrize(
    "damage",
    [{"moments": []}, {"moments": [0, 3, 2]}, {"series": {"parameters": [1]}}, {"series": {"<b>": [1, 2, 3]}}],
)
def test_damaged_timeline_of_a_report_is_refused(damage: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "memory_report.json"
    ranks = [{"rank": 0, "device": "cpu", "steps": 1, "sampled": 1, "peaks": {"forward": {"allocated": 7}}}]
    timeline = dataclasses.asdict(SMALL)
    path.write_text(json.dumps({"provenance": {}, "ranks": ranks, "timeline": timeline}), encoding="utf-8")
    assert "peak 7 B" in MemoryReport.from_json(path)._repr_html_()
    path.write_text(json.dumps({"provenance": {}, "ranks": ranks, "timeline": timeline | damage}), encoding="utf-8")
    with pytest.raises(UserError, match="not a memory report"):
        MemoryReport.from_json(path)


def test_texts_of_a_picture_are_escaped() -> None:
    svg = step_svg(dataclasses.replace(SMALL, source=HOSTILE, marks=[(0, HOSTILE * 2)]))
    assert HOSTILE not in svg
    assert html.escape(HOSTILE) in svg


def test_trace_without_events_is_shown() -> None:
    trace = StepTrace("cpu", [], [])
    assert "peak 0 B" in trace._repr_html_()


def test_every_category_has_a_colour_in_stack_order() -> None:
    assert tuple(CATEGORY_COLOURS) == CATEGORIES


def test_json_columns_are_the_fields() -> None:
    for columns, kind in ((STORAGE_COLUMNS, Storage), (OP_COLUMNS, Op)):
        fields = {field.name: str(field.type).partition("[")[0] for field in dataclasses.fields(kind)}
        assert {name: column.__name__ for name, column in columns.items()} == fields
