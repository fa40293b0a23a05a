"""A recipe's --help: important flags first, examples verbatim, and no misleading defaults."""

from __future__ import annotations

from dataclasses import fields

import pytest

from ckpt_ft.errors import UserError
from ckpt_ft.training.arguments import ACArguments
from ckpt_ft.training.models import ModelArguments
from ckpt_ft.training.preferences import DPOArguments
from ckpt_ft.training.run_arguments import COMMON, Parser, RunArguments, parse_args
from ckpt_ft.training.text import DataArguments


def test_help_shows_common_flags_only(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = (ModelArguments, DataArguments, ACArguments, RunArguments)
    with pytest.raises(SystemExit) as stop:
        parse_args(kinds, ["--help"], description="  as it\n  is written")
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "  as it\n  is written" in out
    titles = [line for line in out.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == ["options:", "model:", "data:", "memory:", "training (transformers.TrainingArguments):"]
    assert sum(line.startswith("  --ac_") for line in out.splitlines()) == 5
    for name in ("--learning_rate", "--lora_r", "--packing", "--config", "--help-all"):
        assert f"  {name}" in out
    assert "--neftune_noise_alpha" not in out
    assert "default: None" not in out


def test_common_flags_exist() -> None:
    assert {*COMMON} <= {field.name for field in fields(DPOArguments)}


def test_help_all_shows_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        Parser([RunArguments]).parse_args(["--help-all"])
    assert "--neftune_noise_alpha" in capsys.readouterr().out
    with pytest.raises(UserError):
        Parser([RunArguments]).parse_args(["--learning_rate", "fast"])
