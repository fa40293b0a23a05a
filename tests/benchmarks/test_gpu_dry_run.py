"""benchmarks/gpu.py on the CPU: the dry run completes, predictions equal measurements, and failures are results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.on_gpu.claims import verdicts
from benchmarks.on_gpu.isolated import call
from benchmarks.on_gpu.report import markdown

ROOT = Path(__file__).parents[2]


def run_gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


@pytest.mark.slow
def test_dry_run_predicts_what_it_measures(tmp_path: Path) -> None:
    done = run_gpu("--dry-run", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (document,) = tmp_path.glob("*.json")
    results = json.loads(document.read_text())
    cases = {(case["workload"], case["policy"]): case for case in results["cases"]}
    assert {case["status"] for case in results["cases"]} == {"ok"}
    for name in ("none", "full", "pointwise"):
        case = cases["Llama-1B LoRA", name]
        assert case["predicted"]["allocated"] == case["measured"]["allocated"]
        assert (
            max(phase["allocated"] for phase in case["measured"]["phases"].values()) == case["measured"]["allocated"]
        )
    assert cases["ResNet-50", "none"]["predicted"]["allocated"] == cases["ResNet-50", "none"]["measured"]["allocated"]
    found = cases["Llama-1B LoRA, largest batch in 8MiB", "none"]["largest_batch"]
    assert found["proved"] == found["predicted"] > 1
    assert results["plan"][0]["measured_samples_per_second"] > 0
    assert {row["verdict"] for row in results["claims"]} <= {"holds", "not measured"}
    page = document.with_suffix(".md").read_text()
    assert "a dry run on the CPU" in page
    assert len(list(tmp_path.glob("*.png"))) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it says without a GPU")
def test_machine_without_a_gpu_is_refused() -> None:
    done = run_gpu()
    assert (done.returncode, done.stdout) == (2, "")
    assert "no CUDA device here; --dry-run" in done.stderr


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


def results_of(*cases: tuple[str, str, float, float]) -> dict:
    """Returns invented results: (workload, policy, predicted bytes, measured bytes), with seconds in proportion."""
    rows = [
        {
            "workload": workload, "policy": policy, "batch": 1, "status": "ok", "message": "",
            "predicted": {"allocated": mine, "reserved": mine, "seconds": mine},
            "measured": {"allocated": theirs, "reserved": theirs, "active": theirs, "seconds": theirs, "phases": {}},
        }
        for workload, policy, mine, theirs in cases
    ]  # fmt: skip
    return {"cases": rows, "dry_run": False, "plan": [], "tests": {"rc": 0, "tail": "3 passed"}}


def test_verdicts_of_claims() -> None:
    good = results_of(
        ("Llama-1B LoRA", "none", 1000, 1001), ("Llama-1B LoRA", "full", 500, 500), ("ResNet-50", "none", 97, 100)
    )
    said = [row["verdict"] for row in verdicts(good)]
    assert said == ["holds", "holds", "holds", "holds", "holds", *["not measured"] * 4, "holds"]
    bad = results_of(
        ("Llama-1B LoRA", "none", 1000, 1020), ("Llama-1B LoRA", "full", 900, 1030), ("ResNet-50", "none", 90, 100)
    )
    rows = verdicts(bad)
    assert [row["verdict"] for row in rows[:5]] == ["falls short"] * 5
    assert "worst 12.62 % (Llama-1B LoRA, full), 2 cases" in rows[0]["figures"]


def test_out_of_memory_is_a_row_of_the_table() -> None:
    results = results_of(("SDXL full", "none", 2**30, 2**30))
    results["cases"][0] |= {"status": "oom", "message": "Tried to allocate 1 GiB", "measured": None}
    results |= {
        "title": "t",
        "claims": [],
        "date": "",
        "seconds": 60,
        "device": {"name": "a card"},
        "provenance": {"command": "gpu.py", "versions": {}},
    }
    assert "| SDXL full, `none` | 1 | oom: Tried to allocate 1 GiB | 1.000 |  |  |" in markdown(results, [])
