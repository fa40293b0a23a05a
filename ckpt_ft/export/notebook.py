"""HTML for notebooks: headings, paragraphs and tables in the reader's own colours, and pages in a frame."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpt_ft.tables import Table
from ckpt_ft.units import format_bytes

from .page import Page, step_page

if TYPE_CHECKING:
    from ckpt_ft.memory.record.trace import StepTrace


def fragment(heading: str, *parts: str) -> str:
    """A heading (text) with parts (HTML) below it."""
    title = f"<p style='margin:0 0 6px'><b>{html.escape(heading)}</b></p>"
    return f"<div style='font-size:13px'>{title}{''.join(parts)}</div>"


def paragraph(text: str) -> str:
    return f"<p style='margin:4px 0;opacity:.8'>{html.escape(text)}</p>"


def table_html(table: Table) -> str:
    align = ["left" if i in table.text else "right" for i in range(len(table.header))]

    def row(tag: str, cells: Sequence[str]) -> str:
        styles = (f"style='text-align:{side};padding:1px 8px'" for side in align)
        found = (f"<{tag} {style}>{html.escape(cell)}</{tag}>" for style, cell in zip(styles, cells, strict=True))
        return f"<tr>{''.join(found)}</tr>"

    caption = f"<caption style='text-align:left'>{html.escape(table.title)}</caption>" if table.title else ""
    body = "".join(row("td", cells) for cells in table.rows)
    return f"<table>{caption}<thead>{row('th', table.header)}</thead><tbody>{body}</tbody></table>"


def embedded(heading: str, page: Page) -> str:
    """A heading with a page below it, in a frame whose scripts reach nothing outside."""
    source = html.escape(replace(page, asked="").html())
    frame = f'<iframe srcdoc="{source}" sandbox="allow-scripts" style="width:100%;height:640px;border:0"></iframe>'
    return fragment(heading, frame)


def step_html(trace: StepTrace) -> str:
    """A trace in a notebook: its peaks, and its page."""
    reserved = "" if trace.device == "cpu" else f", {format_bytes(trace.peak_reserved)} reserved"
    peak = f"peak {format_bytes(trace.peak_allocated)} allocated{reserved}"
    return embedded(f"A step on {trace.device}, {trace.source}: {peak}", step_page(trace))
