"""One HTML file that holds all it needs: what it shows as JSON, and the style and script that draw it.

It opens from disk, asks no network for anything (its own policy forbids it) and knows nothing of memory: views are
handed in as figures. Plain SVG and one canvas draw them: a library for charts would be larger than all of the rest,
and none draws ten thousand allocations one by one.
"""

from __future__ import annotations

import html
import json
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from ckpt_ft.files import write

from .colours import CATEGORY_COLOURS

SCRIPTS = (
    "base", "step", "stretch", "paint", "chart", "minimap", "gestures", "icicle", "table", "step_view",
    "choice", "choice_chart", "compare", "run", "timeline", "main",
)  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """A figure at the head of a page."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A part of a page. `kind` is a view's name in assets/main.js, `data` the dataclass or list that it draws."""

    kind: str
    title: str
    data: Any


@dataclass
class Page:
    """What a page shows. `made`: with what, for its foot."""

    title: str
    subtitle: str
    sections: list[Section] = field(default_factory=list)
    made: str = ""

    def html(self) -> str:
        """The page as a text."""
        document = json.dumps(vars(self), default=asdict, separators=(",", ":"), ensure_ascii=False)
        parts = {
            "title": html.escape(self.title),
            "style": _categories() + _asset("page.css"),
            "script": "\n".join(_asset(f"{name}.js") for name in SCRIPTS),
            "data": _inside_script(document),
        }
        return Template(_asset("page.html")).substitute(parts)

    def write(self, path: str | Path) -> Path:
        """Write the page to `path`, whole or not at all."""
        return write(path, self.html())


def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _categories() -> str:
    colours = "".join(f"--{name}:light-dark({light},{dark});" for name, (light, dark) in CATEGORY_COLOURS.items())
    return f":root{{{colours}}}\n"


def _inside_script(text: str) -> str:
    """JSON that ends no <script> and opens no comment, whatever texts it holds."""
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
