"""An HTML page as one self-contained file: its data as JSON, and the style and scripts that draw it.

The page opens from disk, and its content security policy allows no network access. The scripts in assets/ draw with
SVG and one canvas: a chart library would be larger than the rest of the page, and none draws ten thousand allocations
one by one.
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

from .timeline import CATEGORY_COLOURS

SCRIPTS = ("base", "step", "chart", "icicle", "table", "step_view", "plan", "report", "main")


@dataclass(frozen=True)
class Figure:
    """A figure at the top of a page."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A section of a page: `kind` names a view in assets/main.js, `data` is the dataclass or list that it draws."""

    kind: str
    title: str
    data: Any


@dataclass
class Page:
    """The content of a page. `made`: what made it, for the footer."""

    title: str
    subtitle: str
    sections: list[Section] = field(default_factory=list)
    made: str = ""

    def html(self) -> str:
        """The page as text."""
        document = json.dumps(vars(self), default=asdict, separators=(",", ":"), ensure_ascii=False)
        parts = {
            "title": html.escape(self.title),
            "style": _categories() + _asset("page.css"),
            "script": "\n".join(_asset(f"{name}.js") for name in SCRIPTS),
            "data": _inside_script(document),
        }
        return Template(_asset("page.html")).substitute(parts)

    def write(self, path: str | Path) -> Path:
        """Write the page to `path`, completely or not at all."""
        return write(path, self.html())


def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _categories() -> str:
    colours = "".join(f"--{name}:light-dark({light},{dark});" for name, (light, dark) in CATEGORY_COLOURS.items())
    return f":root{{{colours}}}\n"


def _inside_script(text: str) -> str:
    """JSON in which no text can end the <script> element or open a comment."""
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
