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


def beyond(page: Page, width: int = 390) -> list[str]:
    """The elements that reach beyond the edge of a phone, those that scroll by themselves left out."""
    page.set_viewport_size({"width": width, "height": 844})
    settled(page)
    outside = "e => !e.closest('.scroll') && !e.closest('svg') && e.getBoundingClientRect().right > innerWidth + 1"
    found = page.evaluate(
        f"[...document.body.querySelectorAll('*')].filter({outside}).map(e => e.outerHTML.slice(0, 80))"
    )
    wide = page.evaluate("document.documentElement.scrollWidth")
    return [*found, *([f"the page is {wide} wide"] if wide > width else [])]
