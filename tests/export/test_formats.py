"""Traces in PyTorch's snapshot format and in Chrome's trace format."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch.cuda._memory_viz as memory_viz
from sample_traces import layered, traced

from ckpt_ft.errors import UserError
from ckpt_ft.export.perfetto import DEVICE, HOST
from ckpt_ft.memory.record.trace import StepTrace

CONFS = ["", "expandable_segments:True"]


@pytest.mark.parametrize("conf", CONFS)
def test_pytorch_reads_the_snapshot(conf: str, tmp_path: Path) -> None:
    trace = replace(layered(3), alloc_conf=conf)
    found = pickle.loads(trace.to_snapshot(tmp_path / "step.pickle").read_bytes())
    assert sum(segment["total_size"] for segment in found["segments"]) == trace.replay.reserved[-1]
    assert sum(segment["allocated_size"] for segment in found["segments"]) == trace.replay.allocated[-1]
    said = memory_viz.segsum(found)  # raises if blocks do not fill their segments
    assert f"segments: {len(found['segments'])}" in said
    assert "Device 0" in memory_viz.trace(found)
    lines = memory_viz.memory(found, format_flamegraph=lambda text: text).splitlines()
    assert any("model.layers.2.down_proj" in line for line in lines)
    assert "snapshot.pickle" in memory_viz.trace_plot(found)


def test_snapshot_has_the_events_of_the_step() -> None:
    trace = traced()
    found = snapshot_of(trace)
    entries = found["device_traces"][0]
    held = resident = sum(storage.nbytes for storage, _ in trace.live_at(trace.start - 1))
    levels = [held]
    for entry in entries:
        held += {"alloc": entry["size"], "free_completed": -entry["size"]}.get(entry["action"], 0)
        levels.append(held)
    requested = [resident]
    for event in trace.events[trace.start :]:
        nbytes = trace.storages[event if event >= 0 else ~event].nbytes
        requested.append(requested[-1] + (nbytes if event >= 0 else -nbytes))
    assert max(levels) == max(requested)
    assert levels[-1] == requested[-1]
    taken = sum(entry["size"] for entry in entries if entry["action"] == "segment_alloc")
    assert taken == trace.replay.reserved[-1] - trace.replay.reserved[trace.start - 1]
    times = [entry["time_us"] for entry in entries if "time_us" in entry]
    assert times == sorted(times)


def snapshot_of(trace: StepTrace) -> dict[str, list[list[dict[str, int]]]]:
    from ckpt_ft.export.memory_viz import snapshot

    return snapshot(trace)


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
