"""The command `ckpt-ft recipe` finds the recipe scripts and passes them their flags."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ckpt_ft.cli import main as cli
from ckpt_ft.cli.recipe import find_recipe
from ckpt_ft.errors import UserError

ROOT = Path(__file__).parents[2]


def run_cli(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["ckpt-ft", *words])
    return cli._main()


def test_every_recipe_is_found() -> None:
    for script in (ROOT / "recipes").glob("*.py"):
        assert find_recipe(script.stem).read_text() == script.read_text()


def test_path_flag_prints_the_path(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(monkeypatch, "recipe", "--path", "llm") == 0
    assert Path(capsys.readouterr().out.strip()).name == "llm.py"


def test_flags_are_parsed_by_the_recipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run_cli(monkeypatch, "recipe", "llm", "--ac_policy", "save:atention")
    assert stopped.value.code == 2
    assert "no op group 'atention'; did you mean 'attention'?" in capsys.readouterr().err


def test_garbage_collection_is_on_in_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "collects.py"
    script.write_text("import gc, sys\nsys.exit(3 + gc.isenabled())")
    monkeypatch.setattr("ckpt_ft.cli.recipe.find_recipe", lambda name: script)
    monkeypatch.setattr(sys, "argv", ["ckpt-ft", "recipe", "collects"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 4


def test_unknown_recipe_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no recipe 'llms'; did you mean 'llm'"):
        run_cli(monkeypatch, "recipe", "llms")


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(UserError, match="^recipe dpo needs the package trl: pip install trl$"):
        run_cli(monkeypatch, "recipe", "dpo")
