"""A recipe's --help: in no time, what matters first, examples as they are written, and nothing that is not so."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from ckpt_ft.errors import UserError
from ckpt_ft.training.run.arguments import RunArguments
from ckpt_ft.training.run.help import DPO, TRAINING, Line, answer_help
from ckpt_ft.training.run.parser import Parser

RECIPES = Path(__file__).parents[3] / "recipes"
ASKED = """
import runpy, sys
script, sys.argv = sys.argv[1], sys.argv[1:]
try:
    runpy.run_path(script, run_name="__main__")
except SystemExit as stop:
    heavy = {"torch", "transformers", "accelerate", "datasets", "diffusers"} & set(sys.modules)
    sys.exit(f"imported {heavy}" if heavy else stop.code)
"""


@pytest.mark.parametrize("script", sorted(RECIPES.glob("*.py")), ids=lambda script: script.stem)
def test_help_imports_no_library(script: Path) -> None:
    asked = [sys.executable, "-c", ASKED, str(script), "--help"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")
    lines = found.stdout.splitlines()
    assert f"    accelerate launch -q recipes/{script.name}" in lines  # as it is written
    titles = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert titles[:3] == ["model:", "data:", "memory:"]
    assert sum(line.startswith("  --ac_") for line in lines) == 6
    assert lines[-1].split() == ["--help-all", "Every", "flag."]


def test_what_is_listed_of_training_arguments_is_so() -> None:
    defaults = {field.name: field.default for field in fields(RunArguments)}
    for line in TRAINING:
        default = defaults[line.name]
        assert line.default in (str(getattr(default, "value", default)), "")
        assert bool(line.value) == (not isinstance(default, bool))


def test_what_is_listed_of_dpo_is_so() -> None:
    trl = pytest.importorskip("trl")
    made = {field.name: field.default_factory for field in fields(trl.DPOConfig)}
    defaults = {field.name: field.default for field in fields(trl.DPOConfig)}
    for line in DPO:
        default = defaults[line.name] if made[line.name] is MISSING else made[line.name]()
        assert line.default in (str(default[0] if isinstance(default, list) else default), "")


def test_no_help_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    answer_help("A recipe.", {"all": [Line("one", "N", "1", "The one.")]}, ["--one", "2"])
    assert capsys.readouterr().out == ""
    with pytest.raises(SystemExit):
        answer_help("A recipe.", {"all": [Line("one", "N", "1", "The one.")]}, ["-h"])
    assert "all:\n  --one N  The one. [1]\n" in capsys.readouterr().out


def test_every_flag_is_behind_help_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        Parser([RunArguments], description="  as it\n  is written").parse_args(["--help-all"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "  as it\n  is written" in out
    assert "--neftune_noise_alpha" in out
    assert "default: None" not in out
    with pytest.raises(UserError):
        Parser([RunArguments]).parse_args(["--learning_rate", "fast"])
