"""MemoryReport: printed tables (golden files), written files, and files that are read back."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
from rich.console import Console

from ckpt_ft.errors import UserError
from ckpt_ft.export.holders import Holder
from ckpt_ft.export.report import lines, tables
from ckpt_ft.export.timeline import POINTS, Timeline
from ckpt_ft.memory.measure import report as report_module
from ckpt_ft.memory.measure.profiler import MemoryProfiler, merge_peaks
from ckpt_ft.memory.measure.report import (
    MaxBatch,
    MemoryReport,
    Prediction,
    RankMemory,
    provenance,
)
from ckpt_ft.memory.record.events import Storage
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.tables import DASH
from ckpt_ft.units import GIB, MIB

FACTS = {
    "command": "llm.py --ac_policy full",
    "machine": "Linux x86_64",
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
    "policy": "full",
    "shapes": {"input_ids": [4, 128], "labels": [4, 128]},
}


def small_trace() -> StepTrace:
    """A resident parameter of 4 MiB, an activation of 6 freed in backward, a gradient of 4, a temporary of 1."""
    storages = [
        Storage(4 * MIB, "parameters", "", "", ""),
        Storage(6 * MIB, "activations", "aten.mm.default", "layers.0.mlp", "forward"),
        Storage(1 * MIB, "temporary", "aten.add.Tensor", "layers.0", "forward"),
        Storage(4 * MIB, "gradients", "aten.mm.default", "layers.0.mlp", "backward"),
    ]
    marks = [(1, "step"), (1, "forward"), (4, "backward"), (6, "optimizer")]
    return StepTrace("cpu", storages, [0, 1, 2, ~2, 3, ~1], marks=marks)


PREDICTED = Prediction("cpu", 13 * MIB, {"forward": 11 * MIB, "backward": 13 * MIB, "optimizer": 8 * MIB})


def cpu_report(predicted: Prediction = PREDICTED) -> MemoryReport:
    trace = small_trace()
    peaks = {phase: {"allocated": nbytes} for phase, nbytes in trace.peaks.items()}
    rank = RankMemory(0, "cpu", 20, 3, peaks, trace.at_peak, trace.holders(), seconds=0.25, predicted=predicted)
    return MemoryReport(dict(FACTS), [rank], timeline=Timeline.from_trace(trace))


def test_where_in_the_run_the_peak_was() -> None:
    rank = replace(cpu_report().ranks[0], step=26, batch={"input_ids": [4, 1901], "labels": [4, 1901]}, median=[4, 45])
    rank = replace(rank, between={"evaluation": [10, 20], "saving": [5, 10, 15, 20, 25]})
    said = lines(replace(cpu_report(), ranks=[rank]))
    assert said[1:4] == [
        "Peak at step 26, input_ids 4x1901; median batch 4x45.",
        "Evaluation ran after steps 10 and 20.",
        "Saving ran after steps 5, 10, 15, ..., 25 (5 times).",
    ]
    evaluated = replace(rank, peaks={**rank.peaks, "evaluation": {"allocated": 99 * MIB}})
    assert "Peak in the evaluation; median batch 4x45." in lines(replace(cpu_report(), ranks=[evaluated]))


def gpu_report() -> MemoryReport:
    def rank(number: int, extra: int) -> RankMemory:
        peaks = {
            "forward": {"allocated": 5 * GIB + extra, "reserved": 6 * GIB, "active": 5 * GIB + extra},
            "backward": {"allocated": 6 * GIB + extra, "reserved": 7 * GIB + extra, "active": 6 * GIB + extra},
            "optimizer": {"allocated": 3 * GIB, "reserved": 7 * GIB + extra, "active": 3 * GIB},
        }
        at_peak = {"parameters": 2 * GIB, "optimizer": GIB, "gradients, activations and temporary": 3 * GIB + extra}
        highest = 6 * GIB + number * 256 * MIB
        phases = {"forward": 5 * GIB, "backward": highest, "optimizer": 3 * GIB}
        predicted = Prediction("t4", highest, phases, reserved=7 * GIB, seconds=1.2)
        seconds = 1.5 + number / 10
        return RankMemory(
            number, "Tesla T4", 8, 8, peaks, at_peak, seconds=seconds, retries=number, predicted=predicted
        )

    return MemoryReport(
        {**FACTS, "policy": "none"},
        [rank(0, 0), rank(1, 512 * MIB)],
        MaxBatch("t4", predicted=12, proved=11),
        notes=["The router's load is taken as balanced."],
    )


def printed(report: MemoryReport) -> str:
    out = io.StringIO()
    report.print(Console(file=out, width=80, color_system=None))
    return out.getvalue()


@pytest.mark.parametrize("make", [cpu_report, gpu_report])
def test_printed_and_markdown_reports_equal_golden_files(make, golden):
    report = make()
    golden(f"{make.__name__}.txt", printed(report))
    golden(f"{make.__name__}.md", report.to_markdown())


def test_report_prints_as_one_line():
    assert repr(cpu_report()) == (
        "MemoryReport(a model, policy full, 20 steps, peak allocated 14.0 MiB measured, 13.0 MiB predicted)"
    )


def test_breakdown_is_of_the_fullest_rank():
    report = gpu_report()
    assert (report.fullest.rank, report.fullest.peak(), report.fullest.peak("reserved")) == (1, 6.5 * GIB, 7.5 * GIB)
    assert sum(report.fullest.at_peak.values()) == report.fullest.peak()
    assert cpu_report().fullest.peak("reserved") is None


def test_prediction_for_another_device_is_not_compared():
    report = cpu_report(Prediction("t4", 6 * GIB, {}, reserved=7 * GIB, seconds=1.2))
    assert "-50" not in report.to_markdown()
    assert "| peak allocated | 6.00 GiB | - | - |" in report.to_markdown()


@pytest.mark.parametrize("make", [cpu_report, gpu_report])
def test_report_round_trips_through_json(make, tmp_path):
    report = make()
    text = report.to_json(tmp_path / "memory_report.json")
    loaded = MemoryReport.from_json(tmp_path / "memory_report.json")
    assert loaded == report
    assert loaded.to_json() == text
    assert json.loads(text)["ranks"][0]["peaks"]["backward"]["allocated"] == report.ranks[0].peak()


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format": 1, "ranks": [{"rank": 0}]}'])
def test_file_that_is_no_report_is_refused(text, tmp_path):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match="x.json: not a memory report"):
        MemoryReport.from_json(tmp_path / "x.json")
    with pytest.raises(UserError, match=r"nowhere.json: cannot be read \(No such file"):
        MemoryReport.from_json(tmp_path / "nowhere.json")


def test_failed_write_keeps_the_previous_files(tmp_path, monkeypatch):
    written = cpu_report().write(tmp_path / "out")
    assert [path.name for path in written] == [f"memory_report.{kind}" for kind in ("json", "md", "html", "png")]
    assert written[3].read_bytes().startswith(b"\x89PNG")

    before = written[1].read_text()
    monkeypatch.setattr(report_module.Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(UserError, match="cannot be written .No space left"):
        gpu_report().write(tmp_path / "out")
    assert written[1].read_text() == before
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(path.name for path in written)


def test_write_to_a_path_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(UserError, match="out: the memory report cannot be written"):
        cpu_report().write(tmp_path / "out")


def test_report_without_a_recorded_step_has_no_plot(tmp_path):
    assert gpu_report().plot(tmp_path / "x.png") is None
    assert [path.suffix for path in gpu_report().write(tmp_path)] == [".json", ".md", ".html"]


def test_only_the_main_process_prints_and_writes(tmp_path):
    report = replace(gpu_report(), main=False)
    assert printed(report) == ""
    assert report.write(tmp_path) == []


def test_prediction_is_drawn_if_no_step_was_recorded():
    trace = replace(small_trace(), source="predicted")
    report = MemoryProfiler().report(trace, notes=["One."], policy="full")
    assert report.ranks[0].predicted == Prediction(
        "cpu", 14 * MIB, {"forward": 11 * MIB, "backward": 14 * MIB, "optimizer": 8 * MIB}
    )
    assert report.timeline.source == "predicted"
    assert (report.notes, report.provenance["policy"]) == (["One."], "full")
    profiler = MemoryProfiler()
    with profiler:
        pass
    assert profiler.report(trace).timeline.source == "measured"
    with pytest.raises(FrozenInstanceError):
        report.notes = []


def test_zero_error_has_a_plus_sign():
    report = cpu_report(Prediction("cpu", 14 * MIB - 1, {}))
    assert "| peak allocated | 14.0 MiB | 14.0 MiB | +0.0% |" in report.to_markdown()


def test_timeline_has_the_events_of_the_trace():
    timeline = Timeline.from_trace(small_trace())
    assert timeline.moments == [0, 1, 2, 3, 4, 5]
    totals = [sum(values) for values in zip(*timeline.series.values(), strict=True)]
    assert totals == [n * MIB for n in (4, 10, 11, 10, 14, 8)]
    assert (timeline.marks, timeline.peak) == ([(1, "forward"), (4, "backward"), (6, "optimizer")], 4)
    assert [(h.category, h.nbytes) for h in timeline.holders[:2]] == [
        ("activations", 6 * MIB),
        ("parameters", 4 * MIB),
    ]


def test_shortened_timeline_of_a_report_keeps_its_peak():
    count = 4 * POINTS
    storages = [Storage(MIB, "activations", "aten.mm.default", f"layers.{i}.mlp", "forward") for i in range(count)]
    spike = Storage(512 * MIB, "temporary", "aten.add.Tensor", "", "forward")
    events = [*range(1000), count, ~count, *range(1000, count)]
    timeline = Timeline.from_trace(StepTrace("cpu", [*storages, spike], events, marks=[(0, "step"), (0, "forward")]))
    totals = [sum(values) for values in zip(*timeline.series.values(), strict=True)]
    assert len(totals) <= POINTS
    assert totals[timeline.moments.index(1000)] == 1512 * MIB
    assert timeline.holders == [Holder("layers.*.mlp", "aten.mm.default", "activations", count * MIB, count)]


def test_merged_peaks_are_the_maximum():
    peaks = {"forward": {"allocated": 5}}
    merge_peaks(peaks, {"forward": {"allocated": 3, "reserved": 9}, "backward": {"allocated": 7}})
    assert peaks == {"forward": {"allocated": 5, "reserved": 9}, "backward": {"allocated": 7}}


def test_provenance_names_versions(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/a/b/llm.py", "--output_dir", "my dir"])
    facts = provenance(policy="full")
    assert facts["command"] == "llm.py --output_dir 'my dir'"
    assert facts["policy"] == "full"
    assert {"python", "torch", "transformers", "accelerate"} <= facts["versions"].keys()


def test_trace_plots_with_matplotlib_only(tmp_path, monkeypatch):
    assert small_trace().plot(tmp_path / "step.svg").read_text().startswith("<?xml")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"plots need matplotlib: pip install 'ckpt_ft\[plot\]'"):
        small_trace().plot(tmp_path / "step.png")
    assert not (tmp_path / "step.png").exists()


def test_report_has_host_memory(tmp_path: Path) -> None:
    """Measured: resident and pinned memory of the process. Predicted: the step's host memory."""
    predicted = Prediction("t4", GIB, {"backward": GIB}, reserved=2 * GIB, host=3 * GIB, pinned=2 * GIB)
    rank = RankMemory(
        0, "Tesla T4", 4, 4, {"backward": {"allocated": GIB, "reserved": 2 * GIB}}, predicted=predicted,
        host={"resident": 5 * GIB, "pinned": 3 * GIB, "pinned blocks": 4 * GIB},
    )  # fmt: skip
    report = MemoryReport(provenance(policy="full,swap:8"), [rank])
    peaks, _, compared = tables(report)
    assert peaks.header[-2:] == ("host, resident", "host, pinned")
    assert peaks.rows[0][-2:] == ("5.00 GiB", "3.00 GiB")
    assert ("peak in host memory", "3.00 GiB", DASH, DASH) in compared.rows
    assert ("  pinned", "2.00 GiB", "3.00 GiB", "-33.3%") in compared.rows
    report.to_json(tmp_path / "report.json")
    assert MemoryReport.from_json(tmp_path / "report.json").ranks[0] == rank
