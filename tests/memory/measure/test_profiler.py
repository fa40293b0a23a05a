"""MemoryProfiler: figures of a real CPU loop, sampling, phases from replayed CUDA counters, several ranks."""

from __future__ import annotations

import json
from collections import deque
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from forked_ranks import run_ranks
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ckpt_ft.errors import UserError
from ckpt_ft.memory.measure import profiler as profiler_module
from ckpt_ft.memory.measure.profiler import CpuMeter, CudaMeter, MemoryProfiler, resident_bytes
from ckpt_ft.memory.measure.report import MemoryReport
from ckpt_ft.memory.record.tracker import Tracker
from ckpt_ft.units import GIB

WIDTH, BATCH = 64, 32


def small():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train_step(model, optimizer, micro_batches=1):
    optimizer.zero_grad(set_to_none=True)
    for _ in range(micro_batches):
        model(torch.ones(BATCH, WIDTH)).sum().backward()
    optimizer.step()


def run(steps, **kwargs):
    model, optimizer = small()
    scalars = []
    with MemoryProfiler(model=model, optimizer=optimizer, **kwargs) as profiler:
        for _ in range(steps):
            train_step(model, optimizer)
            scalars.append(profiler.step())
    return profiler, scalars


def test_figures_equal_the_trackers():
    model, optimizer = small()
    train_step(model, optimizer)
    tracker = Tracker(model, optimizer)
    with tracker:
        tracker.start_step()
        train_step(model, optimizer)
    trace = tracker.trace()
    profiler, scalars = run(2)
    rank = profiler.report().fullest
    assert rank.peak() == trace.peak_allocated > 0
    assert {phase: figures["allocated"] for phase, figures in rank.peaks.items()} == trace.peaks
    assert rank.at_peak == trace.at_peak
    assert sum(rank.at_peak.values()) == rank.peak()
    assert rank.at_peak["parameters"] == rank.at_peak["optimizer"] == 4 * 2 * (WIDTH * WIDTH + WIDTH)
    assert scalars[1]["memory/allocated_gib"] == rank.peak() / GIB
    assert scalars[1]["memory/backward_gib"] == trace.peaks["backward"] / GIB


@pytest.mark.parametrize(
    ("kwargs", "measured"),
    [
        ({}, [0, 1]),
        ({"sample": 4}, [0, 1, 4, 8]),
        ({"total_steps": 10}, [0, 1, 9]),
        ({"sample": 1}, list(range(10))),
    ],
)
def test_sampled_steps(kwargs, measured):
    profiler, scalars = run(10, **kwargs)
    assert [i for i, figures in enumerate(scalars) if figures] == measured
    record = profiler.report().fullest
    assert (record.steps, record.sampled) == (10, len(measured))
    assert (record.seconds is None) == (kwargs.get("sample") == 1)  # a tracked step gives no time


def test_steps_beyond_total_steps_are_timed(monkeypatch):
    ticks = count()
    monkeypatch.setattr(profiler_module, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    profiler, scalars = run(5, total_steps=2)
    assert [bool(figures) for figures in scalars] == [True, True, False, False, False]
    assert profiler.report().fullest.seconds == 1.0


def test_sample_of_zero_steps_is_refused():
    with pytest.raises(UserError, match="sample=0"):
        MemoryProfiler(sample=0)


def test_micro_batches_are_one_step():
    model, optimizer = small()
    with MemoryProfiler(model=model, optimizer=optimizer) as profiler:
        train_step(model, optimizer, micro_batches=3)
        profiler.step()
    assert profiler.report().fullest.steps == 1
    assert profiler.batch.shapes == {"input 0": [BATCH, WIDTH]}


def test_context_without_step_calls_is_one_step():
    model, optimizer = small()
    with MemoryProfiler(model=model, optimizer=optimizer) as profiler:
        train_step(model, optimizer)
    assert profiler.report().fullest.sampled == 1


def test_hooks_are_removed_when_the_loop_fails():
    model, optimizer = small()
    profiler = MemoryProfiler(model=model, optimizer=optimizer)

    def fail():
        with profiler:
            model(torch.ones(BATCH, WIDTH))
            raise RuntimeError("loop")

    with pytest.raises(RuntimeError, match="loop"):
        fail()
    assert _get_current_dispatch_mode() is None
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert profiler.report().fullest.peaks == {}


def test_hooks_are_removed_when_measuring_cannot_start():
    model, optimizer = small()
    with pytest.raises(torch.OutOfMemoryError), MemoryProfiler(model=model, optimizer=optimizer, limit=1):
        pass
    assert _get_current_dispatch_mode() is None
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_holders_of_a_failed_step_are_known_after_the_context():
    model, optimizer = small()
    profiler = MemoryProfiler(model=model, optimizer=optimizer)
    while_open = []

    def fail():
        with profiler:
            out = model(torch.ones(BATCH, WIDTH))
            while_open.extend(profiler.holders())
            raise RuntimeError(f"loop at {out.shape}")

    with pytest.raises(RuntimeError, match="loop"):
        fail()
    assert _get_current_dispatch_mode() is None
    assert profiler.holders() == while_open
    assert "activations" in {holder.category for holder in while_open}
    with profiler:
        assert profiler.holders() != while_open


def test_cached_tensor_counts_in_every_step():
    """It counts also in a step that does not read it, because a result computed from it is cached."""

    class CachesResult(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.made = torch.ones(1 << 14), {}

        def forward(self, x):
            if not self.made:
                self.made["first"] = self.table[:WIDTH] * 2
            return x * self.made["first"]

    model, optimizer = small()
    model.append(CachesResult())
    train_step(model, optimizer)
    peaks = []
    for table in (torch.ones(1 << 14), None):
        model[-1].table = table
        meter = CpuMeter(model, optimizer)
        meter.begin()
        train_step(model, optimizer)
        peaks.append(meter.end()["forward"]["allocated"])
    assert peaks[0] - peaks[1] == 4 << 14


def test_allocations_between_steps_can_be_left_out():
    model, optimizer = small()
    with MemoryProfiler(model=model, optimizer=optimizer) as profiler:
        torch.zeros(2**20)  # 4 MiB that no step needs
        profiler.begin_step()
        train_step(model, optimizer)
        profiler.step()
    assert profiler.report().fullest.peak() < 2**20


def test_holders_are_known_inside_the_context():
    model, optimizer = small()
    with MemoryProfiler(model=model, optimizer=optimizer) as profiler:
        kept = model(torch.ones(BATCH, WIDTH))
        assert {holder.category for holder in profiler.holders()} >= {"parameters", "activations"}
        kept.sum().backward()


def test_report_is_written_and_read_back(tmp_path):
    profiler, _ = run(3)
    report = profiler.report(policy="full", batch_size=BATCH)
    assert report.provenance["shapes"] == {"input 0": [BATCH, WIDTH]}
    assert [path.name for path in report.write(tmp_path)] == [
        f"memory_report.{kind}" for kind in ("json", "md", "html", "png")
    ]
    assert MemoryReport.from_json(tmp_path / "memory_report.json") == report


class FakeCounters:
    """Replays torch.cuda's allocator counters: the peak of each phase, read when the phase ends."""

    def __init__(self, monkeypatch, peaks):
        self.peaks, self.resets = deque(peaks), 0
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", self.read)
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"num_alloc_retries": 2, "num_ooms": 1})
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")

    def reset(self, device):
        self.resets += 1

    def read(self, device):
        peak = self.peaks.popleft()
        figures = (("allocated", peak), ("reserved", 2 * peak), ("active", peak + 1))
        return {f"{figure}_bytes": {"all": {"peak": nbytes}} for figure, nbytes in figures}


def on_cuda(model, optimizer):
    profiler = MemoryProfiler(model=model, optimizer=optimizer)
    profiler.device, profiler.meter = torch.device("cuda"), CudaMeter(torch.device("cuda"))
    return profiler


def test_cuda_phase_ends_where_the_next_begins(monkeypatch):
    counters = FakeCounters(monkeypatch, [10, 30, 20, 40, 5])
    model, optimizer = small()
    with on_cuda(model, optimizer) as profiler:
        train_step(model, optimizer, micro_batches=2)  # forward, backward, forward, backward, optimizer
        scalars = profiler.step()
    rank = profiler.report().fullest
    assert {phase: figures["allocated"] for phase, figures in rank.peaks.items()} == {
        "forward": 20,
        "backward": 40,
        "optimizer": 5,
    }
    assert (rank.peak(), rank.peak("reserved"), rank.peak("active")) == (40, 80, 41)
    assert (rank.device, rank.retries, rank.ooms) == ("Tesla T4", 2, 1)
    assert scalars["memory/reserved_gib"] == 80 / GIB
    assert not counters.peaks
    assert counters.resets == 7  # at the start of each step and after each of 5 phases


def test_evaluation_is_not_counted_as_forward(monkeypatch):
    FakeCounters(monkeypatch, [10, 30])
    model, optimizer = small()
    with on_cuda(model, optimizer) as profiler:
        model(torch.ones(BATCH, WIDTH)).sum().backward()
        with torch.no_grad():
            model(torch.ones(BATCH, WIDTH))
        profiler.step()
    assert list(profiler.peaks) == ["forward", "backward"]


def test_resident_bytes_count_gpu_tensors_only():
    model, optimizer = small()
    train_step(model, optimizer)
    assert resident_bytes(model, optimizer) == {"parameters": 0, "buffers": 0, "optimizer": 0}


def profile_rank(rank, directory):
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with MemoryProfiler(accelerator, model, optimizer) as profiler:
        for _ in range(2):
            optimizer.zero_grad()
            accelerator.backward(model(torch.ones(32 * (1 + rank), 64)).sum())
            optimizer.step()
            profiler.step()
    report = profiler.report(policy="none")
    report.print()
    report.write(directory)


def test_report_has_the_peaks_of_every_rank(tmp_path, capfd):
    run_ranks(profile_rank, str(tmp_path))
    assert capfd.readouterr().out.count("Memory: policy none · 2 x cpu") == 1
    report = MemoryReport.from_json(tmp_path / "memory_report.json")
    peaks = [rank.peak() for rank in report.ranks]
    assert [rank.rank for rank in report.ranks] == [0, 1]
    assert peaks[1] - peaks[0] >= 32 * 64 * 4
    assert json.loads((tmp_path / "memory_report.json").read_text())["provenance"]["policy"] == "none"


@pytest.mark.gpu
def test_cuda_counters_of_a_real_step():
    model, optimizer = small()
    model.cuda()
    with MemoryProfiler(model=model, optimizer=optimizer) as profiler:
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            model(torch.ones(BATCH, WIDTH, device="cuda")).sum().backward()
            optimizer.step()
            profiler.step()
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2**50, device="cuda")
    rank = profiler.report().fullest
    assert set(rank.peaks) == {"forward", "backward", "optimizer"}
    assert rank.at_peak["parameters"] >= 4 * 2 * (WIDTH * WIDTH + WIDTH)
    assert rank.peak("reserved") >= rank.peak() >= sum(rank.at_peak.values())
    assert rank.ooms == 1
