"""The views of StepTrace on a record that is small enough to compute by hand."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from ckpt_ft.errors import UserError
from ckpt_ft.export.holders import Holder
from ckpt_ft.export.timeline import Timeline
from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.memory.gpus import GPU, find_gpu
from ckpt_ft.memory.record.events import Op, Storage
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.memory.record.tracker import Tracker


def record(device: str = "cpu", gpu: GPU | None = None) -> StepTrace:
    """A parameter, a warm-up that peaks at 1900 bytes, and a step that allocates 300 and 1000 and frees both."""
    storages = [
        Storage(100, "parameters", "", "", ""),
        Storage(1800, "temporary", "aten.mm.default", "a", "forward"),
        Storage(200, "activations", "aten.mm.default", "a", "forward"),
        Storage(1000, "temporary", "aten.mm.default", "b", "backward"),
        Storage(50, "gradients", "aten.mm.default", "b", "backward"),
    ]
    ops = [
        Op("aten.mm.default", 10**9, 2000, "float32", "forward", "a", 1),
        Op("aten.t.default", 0, 0, "", "backward", "b", 4, 0),
    ]
    marks = [(1, "step"), (1, "forward"), (3, "step"), (3, "forward"), (4, "backward"), (7, "optimizer")]
    return StepTrace(device, storages, [0, 1, ~1, 2, 3, 4, ~3, ~2, ~4], ops, marks, ["a case"], gpu)


def test_peaks_are_those_of_the_measured_step() -> None:
    trace = record()
    assert trace.start == 3
    assert trace.peak_allocated == 100 + 200 + 1000 + 50
    assert trace.peak_reserved == 1900  # reserved bytes include the warm-up
    assert trace.peaks == {"forward": 300, "backward": 1350, "optimizer": 350}
    assert trace.at_peak == {
        "parameters": 100, "buffers": 0, "gradients": 50, "optimizer": 0, "activations": 200, "temporary": 1000,
        "communication": 0, "workspace": 0,
    }  # fmt: skip
    assert trace.holders(1) == [Holder("b", "aten.mm.default", "temporary", 1000, 1)]
    assert trace.module_activations() == {"a": 200}
    assert [sum(row.values()) for row in trace.timeline()] == [100, 300, 1300, 1350, 350, 150, 100]


def test_trace_prints_as_one_line() -> None:
    assert repr(record()) == str(record()) == "StepTrace(cpu: 2 ops, peak allocated 1.3 KiB)"


def test_gpu_trace_counts_allocator_blocks() -> None:
    trace = record("t4")
    assert trace.peak_allocated == 512 + 512 + 1024 + 512
    assert sum(trace.at_peak.values()) == trace.peak_allocated
    assert trace.peak_reserved == 2 * 2**20


@pytest.mark.parametrize("gpu", [None, GPU(**{**find_gpu("t4").__dict__, "name": "mine"})], ids=["named", "own"])
def test_json_round_trip(gpu: GPU | None) -> None:
    trace = record("mine" if gpu else "t4", gpu)
    loaded = StepTrace.from_json(trace.to_json())
    assert loaded == trace
    assert (loaded.peaks, loaded.seconds) == (trace.peaks, trace.seconds)
    assert loaded.seconds > 0


def test_cpu_trace_has_no_seconds() -> None:
    with pytest.raises(UserError, match="cpu"):
        _ = record().seconds


def test_empty_trace_has_no_peak() -> None:
    trace = StepTrace("cpu", [], [])
    assert (trace.peak_allocated, trace.holders(), trace.timeline(), sum(trace.at_peak.values())) == (0, [], [], 0)


def test_fake_trace_is_predicted_and_real_trace_measured(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)

    def step(model: nn.Module, optimizer: object) -> None:
        model(torch.ones(2, 4)).sum().backward()

    with Tracker(model) as tracker:
        step(model, None)
    fake = trace_step(model, step, device="cpu")
    assert (fake.source, tracker.trace().source) == ("predicted", "measured")
    assert StepTrace.from_json(fake.to_json()).source == Timeline.from_trace(fake).source == "predicted"


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = record().plot(tmp_path / "step.svg")
    text = path.read_text()
    assert "activations" in text or path.stat().st_size > 5000


def test_trace_from_another_process_is_equal() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    trace = trace_step(model, lambda model, _: model(torch.ones(2, 4)).sum().backward())
    for one in (trace, StepTrace("cpu", [], [])):
        unpickled = pickle.loads(pickle.dumps(one))
        assert unpickled == one
        assert unpickled.peak_reserved == one.peak_reserved
    assert trace.ops


def test_cpu_without_calibration_has_no_seconds(own_cache: Path) -> None:
    trace = record()
    for ask in (lambda: trace.seconds, trace.schedule):
        with pytest.raises(UserError, match="a trace for 'cpu' has no seconds: measure them by `ckpt-ft calibrate`"):
            ask()
