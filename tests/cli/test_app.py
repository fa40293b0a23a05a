"""The web app `ckpt-ft app`: questions become commands within limits; and its page in a browser."""

from __future__ import annotations

import ast
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpt_ft.cli import app
from ckpt_ft.cli.app import Answer, Question, Visitors, run
from ckpt_ft.errors import UserError

ROOT = Path(__file__).parents[2]
STEP, PLAN, LONGEST, CARDS, CARD = app.QUESTIONS
ASKED = Question(STEP, "gpt2", ("rtx-4090",))


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (ASKED, "estimate gpt2 --device rtx-4090"),
        (replace(ASKED, method="QLoRA", policy="full,head", tokens=4096, batch=3, gpus=2),
         "estimate gpt2 --device rtx-4090 --lora 16 --load-in-4bit --policy full,head --seq-length 4096 "
         "--batch-size 3 --launch fsdp2 --processes 2"),
        (replace(ASKED, cards=("t4", "h100", "t4")), "estimate gpt2 --device t4,h100"),
        (replace(ASKED, asked=PLAN, policy="full", gpus=2), "plan gpt2 --device rtx-4090 --gpus 2"),
        (replace(ASKED, asked=LONGEST, tokens=4096, gpus=2), "max-length gpt2 --device rtx-4090 --gpus 2"),
        (replace(ASKED, asked=CARDS, cards=(), method="LoRA", gpus=8, prices="h100=2.5, t4=0.4"),
         "where gpt2 --method LoRA --gpus 8 --price h100=2.5,t4=0.4"),
        (replace(ASKED, asked=CARD, model="", tokens=64), "where --device rtx-4090"),
        (Question.of({"asked": LONGEST, "model": "gpt2", "cards": "t4,gtx-1", "batch": "2"}),
         "max-length gpt2 --device t4 --lora 16 --batch-size 2"),
        (Question.of({"asked": "recipe"}), "estimate Qwen/Qwen2.5-0.5B --device rtx-4090 --lora 16"),
        (Question.of({"tokens": "many"}), "estimate Qwen/Qwen2.5-0.5B --device rtx-4090 --lora 16"),
    ],
)  # fmt: skip
def test_question_becomes_a_command(question: Question, words: str) -> None:
    assert question.words() == words.split()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "/etc/passwd"}, "model '/etc/passwd': give a name on the Hub"),
        ({"model": "../secret/config.json"}, "give a name on the Hub"),
        ({"model": "--config"}, "give a name on the Hub"),
        ({"cards": ("gtx-1",)}, "gtx-1"),
        ({"cards": ()}, "0 cards: choose 1 to 6"),
        ({"cards": ("t4", "l4"), "asked": PLAN}, "is asked of one card at a time"),
        ({"policy": "fulll"}, "full"),
        ({"tokens": 10**9}, "tokens 1000000000: give 1 to 131072"),
        ({"batch": 0}, "batch 0: give 1 to 64"),
        ({"asked": "recipe"}, "choose from the lists"),
    ],
)
def test_disallowed_question_is_one_line(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        replace(ASKED, **changes).words()


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
    monkeypatch.setattr(
        app, "run", lambda words, limit: ran.append(words) or iter(["1 s: starting", Answer(words[0])])
    )
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
            page.get_by_label("model", exact=True).fill("gpt2")
            page.keyboard.press("Enter")
            page.get_by_role("button", name="Ask").click()
            page.locator(".verdict").wait_for(timeout=120_000)
            assert page.locator(".verdict").inner_text().startswith("fits, ")
            step = page.frame_locator("#page iframe")
            step.locator(".figure").first.wait_for()
            assert step.locator("h1").inner_text() == "gpt2 under none"
            page.wait_for_function("document.querySelector('#page iframe').offsetHeight > 1000")
            assert page.evaluate("document.documentElement.scrollWidth") == width
            page.get_by_label("model", exact=True).fill("/etc/passwd")
            page.keyboard.press("Enter")
            page.get_by_role("button", name="Ask").click()
            page.locator(".wrong").wait_for()
            assert page.locator(".wrong").inner_text().startswith("model '/etc/passwd': give a name on the Hub")
            assert [url for url in asked if f"127.0.0.1:{port}" not in url and not url.startswith("data:")] == []
            browser.close()
    finally:
        served.terminate()
        served.wait()
        served.stdout.close()
