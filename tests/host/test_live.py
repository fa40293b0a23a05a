"""`ckpt-ft run`: the script's numbers, its exit code, and a report however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import forked_python
import pytest

HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def command(*words: str) -> list[str]:
    return [sys.executable, *words[:-2], str(HERE / "scripts" / words[-2]), words[-1]]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return forked_python.run(command(*words), ENVIRONMENT)


def hosted(folder: Path, *words: str) -> list[str]:
    return ["-m", "ckpt_ft.run", "--report", "json", "--report-dir", str(folder), *words]


def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "memory_report.json").read_text())
    return found


def numbers(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("step", "numbers"))]


def test_a_run_changes_no_number_and_is_as_predicted(tmp_path: Path) -> None:
    alone = run("loop.py", "good")
    assert alone.returncode == 0, alone.stderr
    measured = run(*hosted(tmp_path / "a"), "loop.py", "good")
    full = run(*hosted(tmp_path / "b", "--policy", "full", "--no-predict"), "loop.py", "good")
    assert (measured.returncode, full.returncode) == (0, 0), measured.stderr + full.stderr
    assert numbers(measured.stdout) == numbers(full.stdout) == numbers(alone.stdout)
    assert len(numbers(alone.stdout)) == 7
    (rank,) = report(tmp_path / "a")["ranks"]
    assert rank["steps"] == 6
    assert report(tmp_path / "b")["provenance"]["policy"] == "full"
    # the fifth step has a larger batch than the first three, which a dry run looks at
    peak = max(phase["allocated"] for phase in rank["peaks"].values())
    assert peak > 1.5 * rank["predicted"]["allocated"]
    small = max(phase["allocated"] for phase in report(tmp_path / "b")["ranks"][0]["peaks"].values())
    assert small < peak


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [("raises", 1, "ValueError: the data are bad"), ("out_of_memory", 1, "out of memory in step 4")],
)
def test_an_error_ends_with_the_report(ending: str, code: int, said: str, tmp_path: Path) -> None:
    ended = run(*hosted(tmp_path, "--no-predict"), "loop.py", ending)
    assert ended.returncode == code
    assert said in ended.stderr
    assert "ckpt_ft" not in ended.stderr.partition("Traceback")[2].partition("ckpt-ft:")[0]  # frames of the script
    assert report(tmp_path)["ranks"][0]["steps"] == 3
    assert (
        f"The script ended by {'ValueError' if ending == 'raises' else 'OutOfMemoryError'}."
        in report(tmp_path)["notes"]
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_with_the_report(number: int, tmp_path: Path) -> None:
    words, log = command(*hosted(tmp_path), "loop.py", "waits"), tmp_path / "log"
    with log.open("w") as file:
        process = forked_python.Popen(words, stdout=file, stderr=file, env=ENVIRONMENT)
    while "step 2" not in log.read_text():
        assert process.process.is_alive(), log.read_text()
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert report(tmp_path)["ranks"][0]["steps"] == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.py"], "nowhere.py: no such script; give a Python file"),
        (["--policy", "fulll", __file__], "full"),
        (["--policy", "auto", __file__], "policy auto on a CPU: give --budget"),
        (["--report", "pdf", __file__], "--report pdf: give json, md, html, png, or none"),
    ],
)
def test_refused_in_one_line(words: list[str], said: str) -> None:
    ended = forked_python.run([sys.executable, "-m", "ckpt_ft.run", *words], ENVIRONMENT)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


@pytest.mark.slow
def test_two_processes_report_together(tmp_path: Path) -> None:
    """A Trainer under DDP that looks for unused parameters; no loss uses the logits that the model returns."""
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", "2"]
    alone = run(*launch, "ddp.py", str(tmp_path / "alone"))
    ours = run(*launch, *hosted(tmp_path, "--policy", "full"), "ddp.py", str(tmp_path / "ours"))
    assert (alone.returncode, ours.returncode) == (0, 0), alone.stderr + ours.stderr
    assert (tmp_path / "ours").read_text() == (tmp_path / "alone").read_text()
    ranks = report(tmp_path)["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert all(rank["at_peak"]["communication"] > 0 < rank["at_peak"]["parameters"] for rank in ranks)
