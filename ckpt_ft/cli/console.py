"""The consoles of every command: tables on standard output, progress on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckpt_ft.tables import WIDEST, WIDTH

if TYPE_CHECKING:
    from rich.console import Console

LONGEST = 70  # columns of a line of progress


def stdout() -> Console:
    """Standard output: of a fixed width in a pipe, as wide as the terminal up to a limit."""
    from rich.console import Console

    console = Console(highlight=False)
    console.width = min(console.width, WIDEST) if console.is_terminal else WIDTH
    return console


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Shows on stderr what runs and for how long; shows nothing if stderr is no terminal."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def say(line: str) -> None:
            bar.update(task, description=line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}...")

        yield say
