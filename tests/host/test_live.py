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
from typer.testing import CliRunner

from ckpt_ft.cli.main import app
from ckpt_ft.errors import UserError

HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def command(*words: str) -> list[str]:
    return [sys.executable, *(str(HERE / "scripts" / word) if word.endswith(".py") else word for word in words)]


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
    peak = max(phase["allocated"] for phase in rank["peaks"].values())
    assert rank["predicted"]["allocated"] == pytest.approx(peak, rel=0.002)
    assert rank["step"] == 5  # the first with a larger batch; the dry run looks as far
    small = max(phase["allocated"] for phase in report(tmp_path / "b")["ranks"][0]["peaks"].values())
    assert small < peak


def test_a_lightning_module_needs_no_callback(tmp_path: Path) -> None:
    alone = run("lightning_module.py")
    full = run(*hosted(tmp_path, "--policy", "full"), "lightning_module.py")
    assert (alone.returncode, full.returncode) == (0, 0), alone.stderr + full.stderr
    assert len(numbers(alone.stdout)) == 1
    assert numbers(full.stdout) == numbers(alone.stdout)
    found = report(tmp_path)
    (rank,) = found["ranks"]
    assert (found["provenance"]["policy"], rank["steps"]) == ("full", 4)
    peak = max(phase["allocated"] for phase in rank["peaks"].values())
    assert rank["predicted"]["allocated"] == pytest.approx(peak, rel=0.002)


def test_the_report_is_of_the_whole_run(tmp_path: Path) -> None:
    """A step whose batch is larger than all before is measured, and is the one that a dry run predicts."""
    alone = run("../live_peak.py", "40", "long_row.py", str(tmp_path / "x"))
    ended = run(*hosted(tmp_path), "long_row.py", str(tmp_path / "saved"))
    assert (alone.returncode, ended.returncode) == (0, 0), alone.stderr + ended.stderr
    assert "Peak at step 26, input 0 2x1901; median batch 2x40." in ended.stdout
    assert "Evaluation ran after step 20." in ended.stdout
    assert "Saving ran after step 30." in ended.stdout
    (rank,) = report(tmp_path)["ranks"]
    true = int(alone.stdout.split("peak ")[1])
    assert max(phase["allocated"] for phase in rank["peaks"].values()) == pytest.approx(true, rel=0.001)
    assert rank["predicted"]["allocated"] == pytest.approx(true, rel=0.002)
    assert rank["steps"] == 40
    history = rank["history"]
    assert history["steps"] == history["ends"]  # gaps: no point stands for steps that were not measured
    assert {1, 2, 26} < set(history["steps"]) < set(range(1, 27))


def test_the_prediction_is_of_the_batches_that_a_script_without_a_seed_drew(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import random, numpy, torch\nmodel = torch.nn.Linear(64, 64)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "rows = torch.ones(1000 + random.randrange(4096) + numpy.random.randint(4096), 64)\nprint(len(rows))\n"
        "for _ in range(3):\n    model(rows).sum().backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
    )
    one, other = (run(*hosted(tmp_path / name), str(script)) for name in ("a", "b"))
    assert one.stdout.splitlines()[0] != other.stdout.splitlines()[0]  # each draws its own
    for name in ("a", "b"):
        (rank,) = report(tmp_path / name)["ranks"]
        measured = max(phase["allocated"] for phase in rank["peaks"].values())
        assert rank["predicted"]["allocated"] == pytest.approx(measured, rel=0.002)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["none", "full"])
def test_a_dry_run_and_a_live_trainer_predict_the_same(policy: str, tmp_path: Path) -> None:
    """The host runs the script again; ACCallback traces the step of the trainer that it is attached to."""
    host = run(*hosted(tmp_path, "--policy", policy), "trainer.py", str(tmp_path / "host"))
    live = run("trainer.py", str(tmp_path / "live"), policy)
    assert (host.returncode, live.returncode) == (0, 0), host.stderr + live.stderr
    (ours,), (theirs,) = report(tmp_path)["ranks"], report(tmp_path / "live")["ranks"]
    assert ours["fullest"] == theirs["fullest"]
    assert (ours["step"], ours["batch"]) == (theirs["step"], theirs["batch"])
    measured = max(ours["fullest"].values())
    assert ours["predicted"]["allocated"] == pytest.approx(measured, rel=0.002)
    assert theirs["predicted"]["allocated"] == pytest.approx(measured, rel=0.002)


def test_killed_and_resumed(tmp_path: Path) -> None:
    """The script's own checkpoints continue under a policy as if nothing had happened, and files from before stay."""
    alone = run("resumed.py", str(tmp_path / "alone"), "")
    assert alone.returncode == 0, alone.stderr
    ours = [*hosted(tmp_path, "--policy", "full", "--no-predict"), "resumed.py", str(tmp_path / "ours")]
    before = tmp_path / "memory_report.json"
    before.write_text("from before")
    killed = run(*ours, "kill")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert before.read_text() == "from before"
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == ["checkpoint-2", "checkpoint-4"]
    resumed = run(*ours, "resume")
    assert resumed.returncode == 0, resumed.stderr
    assert numbers(resumed.stdout) == numbers(alone.stdout)
    assert report(tmp_path)["ranks"][0]["steps"] == 2
    assert report(tmp_path)["provenance"]["policy"] == "full"


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
        (["."], ".: a folder; give a Python file"),
        ([], "which script"),
        (["--polcy", "full", __file__], "--polcy: no such option"),
        (["--policy", "fulll", __file__], "full"),
        (["--policy", "auto", __file__], "policy auto on a CPU: give --budget"),
        (["--policy", "auto", "--budget", "much", __file__], "much"),
        (["--report", "pdf", __file__], "--report pdf: give json, md, html, png, or none"),
        (["--budget", "2GiB", __file__], "--budget 2GiB: is for --policy auto"),
        (["--report-dir", __file__, __file__], "--report-dir"),
    ],
)
def test_refused_commands(words: list[str], said: str) -> None:
    assert_refused(["run", *words], said)


@pytest.mark.parametrize("command", ["run", "dry-run"])
@pytest.mark.parametrize(
    ("text", "said"),
    [(b"x = 1\nif x\n", "no Python in line 2: expected ':'"), (b"x = '\xff'\n", "utf-8"), (b"x = 0\0", "null bytes")],
)
def test_a_file_that_is_no_script(text: bytes, said: str, command: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_bytes(text)
    assert_refused([command, str(tmp_path / "script.py")], said)


def assert_refused(words: list[str], said: str) -> None:
    ended = CliRunner().invoke(app, words)
    assert isinstance(ended.exception, UserError)
    assert said in str(ended.exception)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.py"], "nowhere.py: no such script"),
        (["-m", "nowhere.at_all"], "-m nowhere.at_all: Error while finding module specification"),
        (["-m", "email"], "-m email: No module named email.__main__; 'email' is a package"),
    ],
)
def test_refused_in_one_line(words: list[str], said: str) -> None:
    ended = run("-m", "ckpt_ft.run", *words)
    assert ended.returncode == 2, ended.stderr
    assert said in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "code"),
    [("raise SystemExit(7)", 7), ("raise ValueError('early')", 1), ("", 0)],
)
def test_a_script_that_does_not_train_keeps_its_exit_code(text: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(text)
    ended = run(*hosted(tmp_path), str(tmp_path / "script.py"))
    assert ended.returncode == code, ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


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
