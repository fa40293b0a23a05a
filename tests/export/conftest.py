"""A real browser: Debian's Chromium, driven by Playwright, headless and offline."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from page_helpers import wait_for_drawing

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser is installed ({', '.join(BROWSERS)})")
    as_root = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=found, args=as_root)
        yield chromium
        chromium.close()


@pytest.fixture
def show(browser: Browser) -> Iterator[Callable[[Path], Page]]:
    """`show(path)` opens a page from disk; at the end the page must have logged, requested and thrown nothing."""
    context = browser.new_context(viewport={"width": 1280, "height": 1000}, color_scheme="light")
    wrong: list[str] = []
    opened: list[str] = []
    shown = 0

    def show(path: Path) -> Page:
        nonlocal shown
        shown += 1
        page = context.new_page()
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: opened.append(request.url))
        page.goto(path.as_uri())
        wait_for_drawing(page)
        return page

    yield show
    context.close()
    assert wrong == []
    assert [url for url in opened if not url.startswith("file:")] == []
    assert len(opened) == shown
