"""Tables as data, printed by rich or written as Markdown in the same style everywhere."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

DASH = "-"  # an empty cell
WIDTH = 80  # columns without a terminal: tables are the same in a pipe, a log and a test
WIDEST = 120  # maximum columns used of a terminal
_SHORT, _SHORTEST = 20, 8  # columns that a name keeps while other cells can shrink, and in any case
_APART = 2  # spaces between columns
_BREAKS = re.compile(r"(?<=[ ,+:])")  # positions where words and policies may break


@dataclass
class Table:
    """A title, column heads and cells.

    text: the columns of words; the other columns are numbers. names: the columns with names of modules and ops, which
    are shortened at their beginning if the table is too wide, the first column first.
    """

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    text: tuple[int, ...] = (0,)
    names: tuple[int, ...] = ()


def print_table(table: Table, console: Console) -> None:
    """Print `table` within the width of `console`, or beyond it if numbers and words have no room otherwise."""
    from rich import box
    from rich.table import Table as Grid

    looks = {"title_justify": "left", "title_style": "bold", "box": box.SIMPLE_HEAD, "pad_edge": False}
    grid = Grid(title=table.title or None, show_edge=False, padding=(0, 1, 0, 0), **looks)  # type: ignore[arg-type]
    widths = _widths(table, console.width)
    needed = sum(widths) + _APART * (len(widths) - 1)
    grid.width = needed if needed > console.width else None
    for i, (head, width) in enumerate(zip(table.header, widths, strict=True)):
        grid.add_column(_folded(head, width), justify="left" if i in table.text else "right", no_wrap=True)
    for row in table.rows:
        fits = (shortened if i in table.names else _folded for i in range(len(row)))
        grid.add_row(*(fit(cell, width) for fit, cell, width in zip(fits, row, widths, strict=True)))
    console.print(grid, markup=False, crop=False)
    console.print()


def as_text(tables: Iterable[Table]) -> str:
    """Returns the tables as printed without a terminal."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=WIDTH, color_system=None, highlight=False)
    for table in tables:
        print_table(table, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def markdown_table(table: Table) -> str:
    """Returns `table` as Markdown, without its title."""
    rule = tuple("---" if i in table.text else "---:" for i in range(len(table.header)))
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in (table.header, rule, *table.rows)]
    return "\n".join(f"| {line} |" for line in lines)


def shortened(name: str, width: int) -> str:
    """Shortens `name` to its last `width` columns, from the start of a dotted or underscored part if possible."""
    if len(name) <= width:
        return name
    tail = name[-(width - 1) :]
    part = re.search(r"[._](?=[^._])", tail[:-1])
    return f"…{tail[part.end() :] if part and part.end() <= len(tail) // 2 else tail}"


def _widths(table: Table, width: int) -> list[int]:
    """The width of each column: what its cells need, reduced if the table is too wide."""
    cells = list(zip(*table.rows, strict=True)) or [()] * len(table.header)
    widths = [max(map(len, (head, *column))) for head, column in zip(table.header, cells, strict=True)]
    room = width - _APART * (len(widths) - 1)
    for floors in _floors(table, cells):
        while sum(widths) > room and any(w > floor for w, floor in zip(widths, floors, strict=True)):
            widest = max((i for i, w in enumerate(widths) if w > floors[i]), key=widths.__getitem__)
            widths[widest] -= 1
    return widths


def _floors(table: Table, cells: Sequence[tuple[str, ...]]) -> Iterator[list[int]]:
    """Minimum widths of the columns, step by step: fold heads, shorten names, fold words, shorten names further."""
    folded = [_longest(head) for head in table.header]
    floors = [max(head, *map(len, column)) if column else head for head, column in zip(folded, cells, strict=True)]
    yield floors
    for i in table.names:
        floors[i] = min(floors[i], _SHORT)
        yield floors
    for i in set(table.text) - set(table.names):
        floors[i] = max(folded[i], *map(_longest, cells[i])) if cells[i] else folded[i]
    yield floors
    for i in table.names:
        floors[i] = min(floors[i], _SHORTEST)
    yield floors


def _folded(text: str, width: int) -> str:
    """Wraps `text` at `width` columns, between words and terms of policies."""
    if len(text) <= width:
        return text
    lines = [""]
    for piece in _BREAKS.split(text):
        if lines[-1] and len(lines[-1] + piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)


def _longest(text: str) -> int:
    """The width of the longest part that cannot be broken."""
    return max(len(piece.rstrip()) for piece in _BREAKS.split(text))


def code_span(text: str) -> str:
    """Returns `text` as inline code in Markdown, safe for backticks in it."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{' '.join(text.split())}{space}{fence}"
