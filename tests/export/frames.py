"""A page draws in its next frame: what a test looks at has to be drawn first, however busy the machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page


def settled(page: Page) -> None:
    """Wait for what was asked for to be drawn: a frame that draws it, and one that knows its size."""
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def until(page: Page, reached: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait for what the browser does in its own time, as the turn of a wheel."""
    last = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < last, f"not reached in {seconds:.0f} s"
        settled(page)
