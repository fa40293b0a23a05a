"""The commands `ckpt-ft models` and `ckpt-ft gpus` list the names that estimates accept."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from ckpt_ft.cli import main as cli
from ckpt_ft.errors import UserError
from ckpt_ft.memory.gpus import GPUS
from ckpt_ft.workloads.model_config import known_models


@pytest.fixture
def run_cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["ckpt-ft", *words])
        assert cli._main() == 0
        return capsys.readouterr().out

    return run


def test_models_lists_every_model_with_size_and_aliases(run_cli: Any) -> None:
    every = json.loads(run_cli("models", "--json"))
    assert [model["name"] for model in every] == list(known_models())
    shown = run_cli("models")
    assert f"{len(every)} known offline" in shown
    assert [model["name"] for model in every if model["name"] not in shown] == []
    (row,) = [line for line in run_cli("models", "zephyr").splitlines() if "Mistral-7B-v0.1" in line]
    assert "MistralForCausalLM" in row
    assert "7.24B" in row
    listed = json.loads(run_cli("models", "FLUX", "--json"))
    assert {model["parameters"] for model in listed} >= {11901408320, 11891178560}


def test_gpus_lists_every_gpu_with_its_rates(run_cli: Any) -> None:
    shown = run_cli("gpus")
    assert [name for name in GPUS if name not in shown] == []
    (row,) = [line for line in run_cli("gpus", "4090-d").splitlines() if "4090-d" in line]
    assert row.split() == ["rtx-4090-d", "23.6", "1,010", "73.5", "73.5", "147", "147", "294", "114", "8.9"]
    assert len(json.loads(run_cli("gpus", "laptop", "--json"))) == sum(name.endswith("laptop") for name in GPUS)
    assert "note: an AMD card's kernels are not known" in run_cli("gpus", "mi300x")


@pytest.mark.parametrize("what", ["models", "gpus"])
def test_unknown_name_is_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ckpt-ft", what, "no such thing"])
    with pytest.raises(UserError, match="has 'no such thing' in its name"):
        cli._main()
