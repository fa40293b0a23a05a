"""docs/inside.md: its map names every folder, and its journey of `estimate` is the one that the code goes."""

from __future__ import annotations

import inspect
import json
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import ckpt_ft
from ckpt_ft.cli import main as cli

PACKAGE = Path(ckpt_ft.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "inside.md").read_text(encoding="utf-8")
MAP = PAGE.partition("## Where to look")[2].partition("### From")[0]
JOURNEY = re.findall(r"^\d+\. `([\w/]+\.py)`: `(\w+)`", PAGE, re.MULTILINE)


def test_every_folder_and_file_of_the_map_exists_and_no_folder_is_missing() -> None:
    folders = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")} - {"."}
    named = {place.rstrip("/") for place in re.findall(r"`((?:\w+/)+)`", MAP)} - {"ckpt_ft"}
    assert {place for place in named if not any(f"/{folder}".endswith(f"/{place}") for folder in folders)} == set()
    assert {folder for folder in folders if not any(f"/{folder}".endswith(f"/{place}") for place in named)} == set()
    rows = [row.split(" | ", 1) for row in re.findall(r"^\| (`.*) \|$", MAP, re.MULTILINE)]
    for places, said in rows:
        around = [PACKAGE / place for place in re.findall(r"`([\w/]+)/`", places)] or [PACKAGE]
        for file in re.findall(r"`([\w/]+\.py|\w+\.(?:csv|ini))`", f"{places} {said}"):
            assert any(list(folder.rglob(file)) for folder in (*around, PACKAGE)), f"{places}: {file}"


def test_the_journey_of_an_estimate_is_the_one_of_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "num_hidden_layers": 1,
              "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 64}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["ckpt-ft", "estimate", str(tmp_path), "--seq-length", "8", "--device", "t4", "--policy", "full"]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setenv("CKPT_FT_CACHE", str(tmp_path / "cache"))
    wanted = {(str(PACKAGE / file), name) for file, name in JOURNEY}
    called: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        place = frame.f_code.co_filename, frame.f_code.co_name
        if event == "call" and place in wanted and place not in called:
            called.append(place)

    sys.setprofile(note)
    try:
        assert cli._main() == 0
    finally:
        sys.setprofile(None)
    assert len(JOURNEY) <= 10
    assert called == [(str(PACKAGE / file), name) for file, name in JOURNEY]
    assert "peak allocated" in capsys.readouterr().out


def test_every_file_says_why_it_exists() -> None:
    """Each file with code opens with a docstring of at least a sentence."""
    silent = [
        path.relative_to(PACKAGE)
        for path in PACKAGE.rglob("*.py")
        if (text := path.read_text(encoding="utf-8")).strip()
        and len(inspect.cleandoc(compile(text, str(path), "exec").co_consts[0] or "")) < 20
    ]
    assert silent == []
