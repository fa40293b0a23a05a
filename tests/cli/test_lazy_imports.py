"""A command imports torch and other heavy packages only if it traces. The tests count modules, not seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from model_configs import LLAMA, write_config

from ckpt_ft.cli import main as cli
from ckpt_ft.cli import planning
from ckpt_ft.planning.budget import Candidate, MemoryBudget
from ckpt_ft.planning.results import Plan
from ckpt_ft.units import GIB

_HEAVY = ("torch", "numpy", "transformers", "diffusers", "peft", "accelerate", "datasets", "matplotlib")
_COUNTED = f"""
import sys
try:
    exec(sys.argv.pop(1))
finally:
    print([name for name in {_HEAVY} if name in sys.modules], len(sys.modules), file=sys.stderr, sep=";")
"""
_COMMAND = "from ckpt_ft.cli.main import main; main()"


def imported(code: str, *words: str) -> tuple[str, int]:
    """Runs `code` in a new process; returns the heavy packages it imported and its total number of modules."""
    made = subprocess.run([sys.executable, "-c", _COUNTED, code, *words], capture_output=True, text=True, check=False)
    heavy, count = made.stderr.splitlines()[-1].split(";")
    return heavy, int(count)


@pytest.mark.parametrize("words", ["--help", "plan --help", "gpus", "models", "estimate no/such/file --device x"])
def test_command_without_a_trace_imports_no_torch(words: str) -> None:
    heavy, count = imported(_COMMAND, *words.split())
    assert heavy == "[]"
    assert count < 450  # typer and rich have two thirds of them; torch alone has 1,100


def test_cached_estimate_imports_no_torch(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cached answer is printed as the first time, also with its suggestions if the step does not fit."""
    words = ["estimate", write_config(tmp_path, LLAMA), "--device", "t4", "--capacity", "180MiB"]
    words += ["--seq-length", "64", "--batch-size", "128"]
    monkeypatch.setattr(sys, "argv", ["ckpt-ft", *words])
    assert cli._main() == 0
    said = capsys.readouterr().out
    assert "Would fit" in said
    heavy, count = imported(_COMMAND, *words)
    assert heavy == "[]"
    assert count < 450
    assert cli._main() == 0
    assert capsys.readouterr().out == said


def test_damaged_cached_answer_is_recomputed_with_one_warning(
    own_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: Any,
) -> None:
    words = ["estimate", write_config(tmp_path, LLAMA), "--device", "cpu", "--seq-length", "8", "--json"]
    monkeypatch.setattr(sys, "argv", ["ckpt-ft", *words])
    assert cli._main() == 0
    said = capsys.readouterr().out
    (kept,) = own_cache.glob("estimates/*.json")
    whole = kept.read_text()
    for damaged in (whole[:100], whole.replace('"peak_allocated": ', '"peak_allocated": -'), "[]"):
        kept.write_text(damaged)
        caplog.clear()
        assert cli._main() == 0
        assert capsys.readouterr().out == said
        assert [record.message.startswith("the estimate is made again: ") for record in caplog.records] == [True]
        assert kept.read_text() == whole


def test_cached_plan_imports_no_torch(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Plan([Candidate("full", 1, 2, 3, 4.0)], MemoryBudget(GIB), "a model", "cpu", "throughput", "Model")
    monkeypatch.setattr(planning, "_make", lambda *args: made)
    words = ["plan", "gpt2", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["ckpt-ft", *words])
    assert cli._main() == 0
    assert len(list(own_cache.glob("plans/*.json"))) == 1
    heavy, count = imported(_COMMAND, *words)
    assert heavy == "[]"
    assert count < 450
