"""Helpers that wait until a page has drawn, and find elements that overflow it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page


def wait_for_drawing(page: Page) -> None:
    """Waits for two animation frames: one draws what was requested, the next one knows its size."""
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def wait_until(page: Page, reached: Callable[[], bool], seconds: float = 30.0) -> None:
    """Waits for what the browser does asynchronously, such as scrolling by the wheel."""
    last = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < last, f"not reached in {seconds:.0f} s"
        wait_for_drawing(page)


def overflowing(page: Page, width: int = 390) -> list[str]:
    """Returns the elements that overflow the width of a phone, except those that scroll themselves."""
    page.set_viewport_size({"width": width, "height": 844})
    wait_for_drawing(page)
    outside = "e => !e.closest('.scroll') && !e.closest('svg') && e.getBoundingClientRect().right > innerWidth + 1"
    found = page.evaluate(
        f"[...document.body.querySelectorAll('*')].filter({outside}).map(e => e.outerHTML.slice(0, 80))"
    )
    wide = page.evaluate("document.documentElement.scrollWidth")
    return [*found, *([f"the page is {wide} wide"] if wide > width else [])]
