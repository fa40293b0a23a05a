"""Traces in Chrome's trace format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sample_traces import layered, traced

from ckpt_ft.errors import UserError
from ckpt_ft.export.perfetto import DEVICE, HOST


def test_perfetto_events_match_the_trace(tmp_path: Path) -> None:
    trace = traced()
    document = json.loads(trace.to_perfetto(tmp_path / "step.json").read_text())
    events = document["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    issued = [event for event in slices if event["pid"] == HOST and event["tid"] == 1]
    assert len(issued) == sum(op.at >= trace.start and not op.name.startswith("prim.") for op in trace.ops)
    assert max(event["ts"] + event["dur"] for event in slices) == pytest.approx(1e6 * trace.seconds, abs=0.01)
    for name, level in (("allocated", trace.peak_allocated), ("reserved", max(trace.replay.reserved[trace.start :]))):
        counted = [event["args"]["bytes"] for event in events if event["ph"] == "C" and event["name"] == name]
        assert max(counted) == level
    kernels = [event for event in slices if event["pid"] == DEVICE]
    assert all(event["dur"] > 0 for event in kernels)
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {"host (predicted)", "t4 (predicted)", "ops issued", "phases and modules", "stream: computation"}


def test_perfetto_slices_are_nested(tmp_path: Path) -> None:
    """The format requires that two slices of one track are nested or disjoint."""
    document = json.loads(layered(3).to_perfetto(tmp_path / "step.json").read_text())
    tracks: dict[tuple[int, int], list[tuple[float, float, str]]] = {}
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            track = tracks.setdefault((event["pid"], event["tid"]), [])
            track.append((event["ts"], event["ts"] + event["dur"], event["name"]))
    assert len(tracks) == 3
    for track in tracks.values():
        standing: list[float] = []
        for begin, end, _ in sorted(track, key=lambda piece: (piece[0], -piece[1])):
            while standing and standing[-1] <= begin + 2e-3:
                standing.pop()
            assert not standing or end <= standing[-1] + 2e-3
            standing.append(end)
    assert {"forward", "backward", "layers", "q_proj"} <= {name for _, _, name in tracks[HOST, 2]}


def test_perfetto_of_a_cpu_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cpu"):
        layered(1, device="cpu").to_perfetto(tmp_path / "step.json")
    assert list(tmp_path.iterdir()) == []
