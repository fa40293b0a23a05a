"""The timeline of a step, and the columns of a trace's JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from sample_traces import layered

from ckpt_ft.errors import UserError
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


def test_phases_and_peak() -> None:
    assert SMALL.peak_bytes == 7
    assert list(SMALL.phases()) == [("forward", 0, 2), ("backward", 2, 3)]


def test_shortened_timeline_keeps_the_peak() -> None:
    trace = layered(6)
    for points in (7, 1500):
        timeline = Timeline.from_trace(trace, points)
        assert timeline.peak_bytes == trace.peak_allocated
        assert len(timeline.moments) <= points


@pytest.mark.parametrize(
    "damage",
    [{"moments": []}, {"moments": [0, 3, 2]}, {"series": {"parameters": [1]}}, {"series": {"<b>": [1, 2, 3]}}],
)
def test_damaged_timeline_of_a_report_is_refused(damage: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "memory_report.json"
    ranks = [{"rank": 0, "device": "cpu", "steps": 1, "sampled": 1, "peaks": {"forward": {"allocated": 7}}}]
    timeline = dataclasses.asdict(SMALL)
    path.write_text(json.dumps({"provenance": {}, "ranks": ranks, "timeline": timeline}), encoding="utf-8")
    assert MemoryReport.from_json(path).timeline == SMALL
    path.write_text(json.dumps({"provenance": {}, "ranks": ranks, "timeline": timeline | damage}), encoding="utf-8")
    with pytest.raises(UserError, match="not a memory report"):
        MemoryReport.from_json(path)


def test_trace_without_events_has_a_chart() -> None:
    trace = StepTrace("cpu", [], [])
    assert "peak 0 B" in trace._repr_html_()


def test_every_category_has_a_colour_in_stack_order() -> None:
    assert tuple(CATEGORY_COLOURS) == CATEGORIES


def test_json_columns_are_the_fields() -> None:
    for columns, kind in ((STORAGE_COLUMNS, Storage), (OP_COLUMNS, Op)):
        fields = {field.name: str(field.type).partition("[")[0] for field in dataclasses.fields(kind)}
        assert {name: column.__name__ for name, column in columns.items()} == fields
