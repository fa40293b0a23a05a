"""The web app `ckpt-ft app`: words become commands within limits; and its page in a browser."""

from __future__ import annotations

import ast
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ckpt_ft.cli import app
from ckpt_ft.cli.app import Answer, Visitors, line_of, run
from ckpt_ft.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("does gpt2 fit on a t4?", ["estimate", "gpt2", "--device=t4"]),
        ("llama 8b qlora two 4090s", ["estimate", "llama 8b", "--lora-r=16", "--load-in-4bit", "--device=2x 4090"]),
        ("longest context Qwen/Qwen3-0.6B 12gb", ["max-length", "Qwen/Qwen3-0.6B", "--device=12gb"]),
        ("max batch size gpt2, t4", ["max-batch", "gpt2", "--device=t4"]),
        ("which policy gpt2 t4", ["plan", "gpt2", "--device=t4"]),
        ("which gpu for qwen3 8b", ["where", "qwen3 8b"]),
        ("what can I train with 24 GB of VRAM?", ["where", "--device=24 GB"]),
        ("gpt2, 8,192 tokens t4", ["estimate", "gpt2", "--seq-length=8192", "--device=t4"]),
        ("gpt2 131072 tokens", ["estimate", "gpt2", "--seq-length=131072"]),
        ("recipe llm", ["estimate", "recipe"]),  # a model of that name, which is not known
        ("merge out", ["estimate", "merge out"]),
    ],
)
def test_words_become_a_command(asked: str, words: list[str]) -> None:
    assert line_of(asked) == words


def test_files_of_the_server_are_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = line_of("gpt2 own")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").touch()
    assert line_of("gpt2 own") == before


@pytest.mark.parametrize("asked", app.EXAMPLES)
def test_examples_are_questions(asked: str) -> None:
    assert line_of(asked)[0] in ("estimate", "max-length", "plan", "where")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("/etc/passwd", "'/etc/passwd': ask in plain words"),
        ("../secret/config.json t4", "'../secret/config.json': ask in plain words"),
        ("a/../b", "ask in plain words"),
        ("~/model", "ask in plain words"),
        ("gpt2 --html=x", "'--html=x': ask in plain words"),
        ("gpt2 -m", "'-m': ask in plain words"),
        ("gpt2 train.py", "'train.py': ask in plain words"),
        ("$(id)", "ask in plain words"),
        ("gpt2 on one hundred frogs", "not understood: hundred frogs; leave it out"),
        ("Qwen/Qwen3-0.6B frogs", "not understood: frogs; leave it out"),
        ("where m2 max", "only cards that run CUDA or ROCm"),
        ("gpt2 1000000000 tokens", "seq length 1000000000: give 1 to 131072"),
        ("gpt2 batch 0", "batch size 0: give 1 to 64"),
        ("gpt2 16x h100", "cards 16: give 1 to 8"),
        ("llama 8b on 64 gpus", "processes 64: give 1 to 8"),
        ("", "name a model, a card and a method"),
        ("x" * 999, "in at most 200 characters"),
    ],
)
def test_disallowed_question_is_one_line(
    asked: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    with pytest.raises(UserError, match=re.escape(said)):
        line_of(asked)


def test_answer_equals_the_command_lines_and_has_a_page() -> None:
    *_, found = run(["estimate", "gpt2", "--device", "t4", "--seq-length", "16"])
    assert isinstance(found, Answer)
    assert re.fullmatch(r"fits, [\d.]+ GiB to spare of 14.56 GiB \(reserved and context counted\)", found.verdict)
    assert found.commands.startswith("ckpt-ft recipe llm --model_name_or_path gpt2 ")
    assert found.page.startswith("<!doctype html>")


def test_errors_are_one_line_and_slow_questions_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"^no model 'nobody/nothing': no such file"):
        list(run(["estimate", "nobody/nothing", "--device", "t4"]))
    begun = time.monotonic()
    with pytest.raises(UserError, match=r"no answer in 1 s"):
        list(run(["where", "Qwen/Qwen2.5-0.5B"], limit=1))
    assert time.monotonic() - begun < 10


def test_answers_are_cached_and_questions_are_limited_per_visitor(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(app, "run", lambda words: ran.append(words) or iter(["1 s: starting", Answer(words[0])]))
    visitors = Visitors()
    assert list(visitors.answer(["a"], "one")) == ["1 s: starting", Answer("a")]
    assert list(visitors.answer(["a"], "one")) == [Answer("a")]
    for number in range(app._VISITS - 1):
        list(visitors.answer([str(number)], "one"))
    with pytest.raises(UserError, match=r"12 questions in 300 s: ask again in \d+ s"):
        list(visitors.answer(["more"], "one"))
    assert list(visitors.answer(["more"], "another"))[-1] == Answer("more")
    assert len(ran) == app._VISITS + 1


def test_space_requirements_equal_the_package_dependencies() -> None:
    """A Hugging Face Space installs requirements.txt and imports the package from the folder beside it."""
    lists = re.findall(r"^(dependencies|diffusion) = (\[.*?\])$", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    wanted = [name for _, names in lists for name in ast.literal_eval(names)]
    assert len(wanted) > 10
    assert (ROOT / "space" / "requirements.txt").read_text().split() == wanted
    front = (ROOT / "space" / "README.md").read_text().split("---")[1]
    assert "sdk: gradio\n" in front
    assert "app_file: app.py\n" in front
    compile((ROOT / "space" / "app.py").read_text(), "app.py", "exec")


@pytest.mark.app
@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")])
def test_page_in_a_browser(width: int, scheme: Any, tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no browser is installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve = [sys.executable, "-m", "ckpt_ft.cli", "app", "--no-browser", "--port", str(port)]
    served = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        assert served.stdout is not None
        assert str(port) in served.stdout.readline()
        with playwright.sync_playwright() as driver:
            args = ["--no-sandbox"] if sys.platform == "linux" else []
            browser = driver.chromium.launch(executable_path=found, args=args)
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            asked: list[str] = []
            page.on("request", lambda request: asked.append(request.url))
            page.goto(f"http://127.0.0.1:{port}/")
            page.get_by_label("a model").fill("gpt2 t4")
            page.get_by_role("button", name="Ask").click()
            page.locator(".verdict").wait_for(timeout=120_000)
            assert page.locator(".verdict").inner_text().startswith("fits, ")
            step = page.frame_locator("#page iframe")
            step.locator(".figure").first.wait_for()
            assert step.locator("h1").inner_text() == "gpt2 under none"
            page.wait_for_function("document.querySelector('#page iframe').offsetHeight > 1000")
            assert page.evaluate("document.documentElement.scrollWidth") == width
            assert page.url.endswith("/?q=gpt2+t4")
            page.get_by_label("a model").fill("/etc/passwd")
            page.keyboard.press("Enter")
            page.locator(".wrong").wait_for()
            assert page.locator(".wrong").inner_text().startswith("'/etc/passwd': ask in plain words")
            assert [url for url in asked if f"127.0.0.1:{port}" not in url and not url.startswith("data:")] == []
            browser.close()
    finally:
        served.terminate()
        served.wait()
        served.stdout.close()
