"""Small HTML for notebooks: tables and a still picture of a step, in the reader's own colours, without scripts."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from ckpt_ft.colours import COLOURS
from ckpt_ft.tables import Table
from ckpt_ft.units import format_bytes

_WIDE, _HIGH, _LEFT, _TOP = 760, 240, 70, 22


def fragment(heading: str, *parts: str) -> str:
    """A heading and what stands below it; `heading` is a text, the parts are HTML."""
    title = f"<p style='margin:0 0 6px'><b>{html.escape(heading)}</b></p>"
    return f"<div style='font-size:13px'>{title}{''.join(parts)}</div>"


def paragraph(text: str) -> str:
    """`text` as a paragraph."""
    return f"<p style='margin:4px 0;opacity:.8'>{html.escape(text)}</p>"


def table_html(table: Table) -> str:
    """`table` with its title."""
    align = ["left" if i in table.text else "right" for i in range(len(table.header))]

    def row(tag: str, cells: Sequence[str]) -> str:
        styles = (f"style='text-align:{side};padding:1px 8px'" for side in align)
        found = (f"<{tag} {style}>{html.escape(cell)}</{tag}>" for style, cell in zip(styles, cells, strict=True))
        return f"<tr>{''.join(found)}</tr>"

    caption = f"<caption style='text-align:left'>{html.escape(table.title)}</caption>" if table.title else ""
    body = "".join(row("td", cells) for cells in table.rows)
    return f"<table>{caption}<thead>{row('th', table.header)}</thead><tbody>{body}</tbody></table>"


def step_svg(
    moments: Sequence[int], series: Mapping[str, Sequence[int]], marks: Sequence[tuple[int, str]], peak: int
) -> str:
    """Memory over a step as stacked areas: bytes by category at `moments`, phases, and the moment of the peak."""
    last = max(moments[-1], 1)
    totals = [sum(values) for values in zip(*series.values(), strict=True)]
    most = 1.1 * max(totals, default=0) or 1.0

    def x(moment: int) -> float:
        return _LEFT + moment / last * (_WIDE - _LEFT - 10)

    def y(nbytes: float) -> float:
        return _HIGH - 8 - nbytes / most * (_HIGH - _TOP - 8)

    parts, floor = [], [0] * len(moments)
    for name, values in series.items():
        top = [a + b for a, b in zip(floor, values, strict=True)]
        edge = [*zip(moments, top, strict=True), *reversed([*zip(moments, floor, strict=True)])]
        points = " ".join(f"{x(moment):.1f},{y(nbytes):.1f}" for moment, nbytes in edge)
        parts.append(f"<polygon points='{points}' fill='{COLOURS[name][0]}'><title>{name}</title></polygon>")
        floor = top
    ends = [at for at, _ in marks[1:]] + [last]
    for (at, phase), end in zip(marks, ends, strict=True):
        parts.append(f"<line x1='{x(at):.1f}' x2='{x(at):.1f}' y1='4' y2='{_HIGH - 8}' {_DASHED}/>")
        if x(end) - x(at) > 8 * len(phase):
            parts.append(_text(x(at) + 5, 14, phase))
    high = max(totals, default=0)
    parts.append(_text(x(peak), y(high) - 5, f"peak {format_bytes(high)}", "end" if peak > last / 2 else "start"))
    parts += [_text(_LEFT - 6, y(share * high) + 4, format_bytes(round(share * high)), "end") for share in (0, 0.5, 1)]
    keys = "".join(
        f"<span style='margin-right:12px'><span style='color:{COLOURS[name][0]}'>■</span> {name}</span>"
        for name in series
    )
    picture = f"<svg viewBox='0 0 {_WIDE} {_HIGH}' width='{_WIDE}' style='max-width:100%' role='img'>"
    return f"{picture}{''.join(parts)}</svg><div>{keys}</div>"


_DASHED = "stroke='currentColor' stroke-dasharray='3 4' stroke-opacity='.6'"


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' fill='currentColor' font-size='11'>"
        f"{html.escape(words)}</text>"
    )
