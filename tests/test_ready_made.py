"""The README's table of ready-made files: each row is what `ckpt-ft estimate` predicts, and fits its card."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from ckpt_ft.cli import app as cli
from ckpt_ft.units import format_bytes

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| `([\w-]+)`, .*\[\w.*\]\((recipes/\S+\.yaml)\) \| `(\w+)` \| (\d.* GiB) \|$", re.MULTILINE)
ROWS = ROW.findall((ROOT / "README.md").read_text(encoding="utf-8"))


def test_the_table_is_found() -> None:
    assert len(ROWS) >= 4


@pytest.mark.slow
@pytest.mark.parametrize(("card", "file", "recipe", "peak"), ROWS)
def test_each_ready_made_file_fits_as_the_readme_says(
    card: str, file: str, recipe: str, peak: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["estimate", "--config", str(ROOT / file), "--recipe", recipe, "--device", card, "--json"]
    monkeypatch.setattr(sys, "argv", ["ckpt-ft", *words])
    assert cli._main() == 0
    told = json.loads(capsys.readouterr().out)
    assert format_bytes(told["peak_reserved"]) == peak
    assert told["headroom"] > 0
