"""What a command imports: torch and its like only where something is traced. Modules are counted, not seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpt_ft.cli import app as cli
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
_COMMAND = "from ckpt_ft.cli.app import main; main()"


def imported(code: str, *words: str) -> tuple[str, int]:
    """What of the heavy packages `code` imports in a process of its own, and how many modules in all."""
    made = subprocess.run([sys.executable, "-c", _COUNTED, code, *words], capture_output=True, text=True, check=False)
    heavy, count = made.stderr.splitlines()[-1].split(";")
    return heavy, int(count)


@pytest.mark.parametrize("words", ["--help", "plan --help", "gpus", "models", "estimate no/such/file --device x"])
def test_what_traces_nothing_is_light(words: str) -> None:
    heavy, count = imported(_COMMAND, *words.split())
    assert heavy == "[]"
    assert count < 450  # of which typer and rich are two thirds; torch alone is 1,100


def test_an_estimate_from_the_cache_is_light(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says what was said the first time, also where the step does not fit and a way was found."""
    words = ["estimate", "gpt2", "--device", "t4", "--seq-length", "32", "--capacity", "1900MiB"]
    monkeypatch.setattr(sys, "argv", ["ckpt-ft", *words])
    assert cli._main() == 0
    said = capsys.readouterr().out
    assert "Would fit" in said
    heavy, count = imported(_COMMAND, *words)
    assert heavy == "[]"
    assert count < 450
    assert cli._main() == 0
    assert capsys.readouterr().out == said


def test_a_damaged_answer_is_made_again_with_one_warning(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: Any
) -> None:
    monkeypatch.setattr(sys, "argv", ["ckpt-ft", "estimate", "gpt2", "--device", "cpu", "--seq-length", "8", "--json"])
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


def test_a_plan_from_the_cache_is_light(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Plan(
        [Candidate("full", 1, 2, 3, 4.0)], MemoryBudget(GIB), "a model", "cpu", "throughput", "its fingerprint"
    )
    monkeypatch.setattr(planning, "_make", lambda *args: made)
    words = ["plan", "gpt2", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["ckpt-ft", *words])
    assert cli._main() == 0
    assert len(list(own_cache.glob("plans/*.json"))) == 1
    heavy, count = imported(_COMMAND, *words)
    assert heavy == "[]"
    assert count < 450
