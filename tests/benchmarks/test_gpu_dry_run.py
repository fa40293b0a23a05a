"""benchmarks/gpu.py on the CPU: the dry run completes, predictions equal measurements, and failures are results."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.on_gpu.isolated import call
from benchmarks.on_gpu.report import markdown, verdicts
from ckpt_ft.errors import UserError

ROOT = Path(__file__).parents[2]


def run_gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


@pytest.mark.slow
def test_dry_run_predicts_what_it_measures(tmp_path: Path) -> None:
    parts = ("numbers", "races", "peaks", "scripts", "overlap", "host time", "verification", "largest batch", "plan")
    done = run_gpu("--dry-run", "--output", str(tmp_path), "--only", *parts)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    cases = {(case["part"], case["name"]): case for case in results["cases"]}
    assert {case["status"] for case in results["cases"]} == {"ok"}, done.stderr
    for row in (case for case in results["cases"] if case["part"] in ("numbers", "races")):
        assert all(found["equal"] for found in row["value"].values()), row
    for name in ("none", "full", "pointwise"):
        row = cases["peaks", f"Llama-1B LoRA, {name}"]
        assert row["predicted"]["allocated"] == row["value"]["allocated"]
        assert len(row["value"]["history"]["reserved"]) == 10
    for row in (case for case in results["cases"] if case["part"] == "scripts"):
        assert row["value"]["equal"]
        assert row["value"]["predicted"]["allocated"] == pytest.approx(row["value"]["allocated"], rel=0.002)
    found = cases["largest batch", "Llama-1B LoRA, none"]["value"]
    assert found["proved"] == found["predicted"] > 1
    assert cases["plan", "Llama-1B LoRA"]["value"][0]["rate"] > 0
    assert "a dry run on the CPU" in (tmp_path / "results.md").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it says without a GPU")
def test_machine_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "PYTORCH_NVML_BASED_CUDA_CHECK"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # what the script sets ends with the test
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(UserError, match="no CUDA device here; --dry-run"):
        importlib.import_module("benchmarks.gpu").main()


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")


def asleep() -> None:
    __import__("time").sleep(60)


def killed() -> None:
    os._exit(9)


def wrong() -> None:
    raise KeyError("x")


@pytest.mark.parametrize(
    ("function", "status", "message"),
    [
        (out_of_memory, "oom", "Tried to allocate"),
        (asleep, "timeout", "over 3 s"),
        (killed, "error", "exit code 9"),
        (wrong, "error", "KeyError: 'x'"),
    ],
)
def test_failure_is_a_result(function, status: str, message: str) -> None:
    limit = 3 if function is asleep else 60
    outcome = call(function, limit=limit)
    assert (outcome.status, outcome.value) == (status, None)
    assert message in outcome.message


def case(part: str, name: str, value: dict, predicted: dict | None = None) -> dict:
    row = {"part": part, "name": name, "status": "ok", "message": "", "seconds": 1.0, "value": value}
    return {**row, "predicted": predicted} if predicted else row


def peak(name: str, predicted: float, measured: float) -> dict:
    figures = [{"allocated": number, "reserved": number, "seconds": number} for number in (predicted, measured)]
    return case("peaks", name, figures[1], figures[0])


def results_of(*cases: dict) -> dict:
    facts = {"command": "gpu.py", "versions": {}}
    return {"cases": list(cases), "dry_run": False, "date": "", "device": {"name": "a card"}, "provenance": facts}


def test_verdicts_of_claims() -> None:
    equal = {"full": {"equal": True}, "offload": {"equal": True}}
    good = results_of(
        case("numbers", "Llama", equal),
        peak("Llama-1B LoRA, none", 1000, 1001),
        peak("Llama-1B LoRA, full", 500, 500),
        peak("ResNet-50, none", 97, 100),
        case("host time", "llama", {"plain": 10.0, "pointwise": 16.0}),
    )
    said = {claim: verdict for claim, verdict, _ in verdicts(good)}
    assert list(said.values()).count("holds") == 6
    assert set(said.values()) == {"holds", "not measured"}
    bad = results_of(
        case("numbers", "Llama", {**equal, "swap:3": {"equal": False}}),
        peak("Llama-1B LoRA, none", 1000, 1020),
        peak("Llama-1B LoRA, full", 900, 1030),
        peak("ResNet-50, none", 90, 100),
        case("host time", "llama", {"plain": 10.0, "pointwise": 18.0}),
    )
    rows = [row for row in verdicts(bad) if row[1] != "not measured"]
    assert {verdict for _, verdict, _ in rows} == {"falls short"}
    assert rows[0][2] == "Llama swap:3"
    assert "worst 12.62 % (Llama-1B LoRA, full), 2 cases" in rows[1][2]


def test_out_of_memory_is_a_row_of_the_table() -> None:
    row = peak("SDXL full, none", 2**30, 2**30) | {
        "status": "oom",
        "message": "Tried to allocate 1 GiB",
        "value": None,
    }
    assert "| SDXL full, none | oom Tried to allocate 1 GiB | 1.0 |  |" in markdown(results_of(row))
