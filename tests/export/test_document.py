"""An HTML page as a file: self-contained, small, and safe against markup in names."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from sample_traces import HOSTILE, layered

from ckpt_ft.export.page import Page, Section, estimate_page, step_view
from ckpt_ft.memory.gpus import find_gpu
from ckpt_ft.planning.estimate import of_trace
from ckpt_ft.planning.results import Suggestion, Suggestions


def data_of(text: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(
        text.split('<script type="application/json" id="data">')[1].split("</script>")[0]
    )
    return found


def test_texts_of_a_page_are_escaped() -> None:
    page = Page(HOSTILE, "</script>", [Section("tables", "\u2028", [])], "<!--")
    text = page.html()
    assert HOSTILE not in text
    assert text.count("</script>") == 2  # the data's and the script's own
    assert data_of(text) == {**vars(page), "sections": [{"kind": "tables", "title": "\u2028", "data": []}]}


def test_page_names_its_command_and_the_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/ckpt-ft", "estimate", "gpt2", "--hub-token", "hf_abcdefghij"])
    assert Page("", "").asked == f"ckpt-ft estimate gpt2 --hub-token '***' · {date.today()}"
    monkeypatch.setattr(sys, "argv", ["/bin/ipykernel_launcher.py", "-f", "/run/kernel.json"])
    assert Page("", "").asked == str(date.today())


def test_page_requests_nothing(tmp_path: Path) -> None:
    text = layered(2).to_html(tmp_path / "step.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    found = set(re.findall(r"https?://[^\s\"']+", text))
    assert found == {"http://www.w3.org/2000/svg"}  # a namespace, not an address


def test_page_of_20_000_events_is_small(tmp_path: Path) -> None:
    trace = layered(32, prefix="base_model.model.model", waves=18)
    assert len(trace.events) - trace.start > 20_000
    path = trace.to_html(tmp_path / "step.html")
    assert path.stat().st_size < 2e6 / 2
    view = step_view(trace)
    assert len(view["bytes"]) == len(trace.storages)  # no storage is left out
    assert sum(nbytes for nbytes, made, life in alive(view, view["peak"])) == trace.peak_allocated


def alive(view: dict[str, Any], moment: int) -> list[tuple[int, int, int]]:
    """Returns bytes, creation and lifetime of each allocation alive at `moment`, from the columns of the page."""
    found, made, category = [], 0, -1
    for nbytes, kind, more, life in zip(view["bytes"], view["category"], view["made"], view["life"], strict=True):
        made, category = (made if kind == category else 0) + more, kind
        if made <= moment and (life < 0 or moment < made + life):
            found.append((nbytes, made, life))
    return found


def test_page_of_an_estimate_begins_with_its_answer_and_has_what_would_fit() -> None:
    trace, card = layered(2), find_gpu("t4")
    found = replace(of_trace(trace, card, None, 1 << 20), model="m", policy="none")
    assert estimate_page(found, trace).answer == found.verdicts[0]
    assert found.verdicts[0].startswith("does not fit: needs ")
    ways = Suggestions([Suggestion("--policy full", 5 << 20, -0.0004), Suggestion("--lora 16", 3 << 30, 0.126)], 0)
    (would,) = (
        section
        for section in estimate_page(replace(found, answer=ways), trace).sections
        if section.title == "Would fit"
    )
    assert would.data[0].rows == [("--policy full", "5.0 MiB", "+0%"), ("--lora 16", "3.00 GiB", "+13%")]
