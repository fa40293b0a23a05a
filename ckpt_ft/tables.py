"""Tables, as data: printed by rich or written as Markdown, in one look everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

DASH = "-"  # a cell of which nothing is known
WIDTH = 120  # columns of what is no terminal's: a table is the same in a pipe, a log and a test


@dataclass
class Table:
    """A title, column heads and cells. Columns in `text` are words, the others numbers."""

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    text: tuple[int, ...] = (0,)


def print_table(table: Table, console: Console) -> None:
    """Print `table`: words fold, numbers do not."""
    from rich import box
    from rich.table import Table as Grid

    grid = Grid(title=table.title or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for i, head in enumerate(table.header):
        words = i in table.text
        grid.add_column(head, justify="left" if words else "right", overflow="fold", no_wrap=not words, min_width=4)
    for row in table.rows:
        grid.add_row(*row)
    console.print(grid, markup=False)


def markdown_table(table: Table) -> str:
    """`table` without its title."""
    rule = tuple("---" if i in table.text else "---:" for i in range(len(table.header)))
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in (table.header, rule, *table.rows)]
    return "\n".join(f"| {line} |" for line in lines)
