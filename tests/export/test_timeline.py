"""The stacked areas of a step that every format draws, and the columns of a trace's JSON."""

from __future__ import annotations

import dataclasses
import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from sample_traces import HOSTILE, layered

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


def test_layers_are_stacked() -> None:
    assert list(SMALL.layers()) == [("parameters", [0, 0, 0], [4, 4, 4]), ("activations", [4, 4, 4], [4, 7, 5])]
    assert SMALL.peak_bytes == 7
    assert list(SMALL.phases()) == [("forward", 0, 2), ("backward", 2, 3)]


def test_shortened_timeline_keeps_the_peak() -> None:
    trace = layered(6)
    for points in (7, 1500):
        timeline = Timeline.from_trace(trace, points)
        assert timeline.peak_bytes == trace.peak_allocated
        *_, (_, _, top) = timeline.layers()
        assert max(top) == trace.peak_allocated
        assert len(timeline.moments) <= points


def test_svg_draws_each_layer_to_scale() -> None:
    svg = SMALL.svg(180, 130)  # 100 wide and 100 high within the margins
    polygons = re.findall(r"<polygon points='([^']+)'[^>]*><title>(\w+)", svg)
    assert [name for _, name in polygons] == ["parameters", "activations"]
    corners = [tuple(map(float, corner.split(","))) for corner in polygons[1][0].split()]
    high = 1.1 * 7
    assert corners[1] == (70 + round(100 * 2 / 3, 1), round(122 - 100 * 7 / high, 1))  # x of moment 2, y of 7 bytes
    assert corners[-1] == (70, round(122 - 100 * 4 / high, 1))
    assert "aria-label='Memory over the step, measured: peak 7 B'" in svg


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


def test_texts_of_an_svg_are_escaped() -> None:
    svg = dataclasses.replace(SMALL, source=HOSTILE, marks=[(0, HOSTILE * 2)]).svg(2000, 100)
    assert HOSTILE not in svg
    assert html.escape(HOSTILE) in svg


def test_trace_without_events_has_a_chart() -> None:
    trace = StepTrace("cpu", [], [])
    assert "peak 0 B" in trace._repr_html_()


def test_every_category_has_a_colour_in_stack_order() -> None:
    assert tuple(CATEGORY_COLOURS) == CATEGORIES


def test_json_columns_are_the_fields() -> None:
    for columns, kind in ((STORAGE_COLUMNS, Storage), (OP_COLUMNS, Op)):
        fields = {field.name: str(field.type).partition("[")[0] for field in dataclasses.fields(kind)}
        assert {name: column.__name__ for name, column in columns.items()} == fields
