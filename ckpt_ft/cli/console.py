"""The consoles of every command: tables on standard output, progress on standard error."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from time import monotonic as now
from typing import TYPE_CHECKING, TextIO

from ckpt_ft.tables import WIDEST, WIDTH

if TYPE_CHECKING:
    from rich.console import Console

LONGEST = 78  # columns of a line of progress
PAUSE = 10  # seconds between lines where there is no terminal
_COUNTED = re.compile(r"(\d+) of (?:about )?(\d+)\b")


def stdout(file: TextIO | None = None) -> Console:
    """Standard output, or another stream: of a fixed width in a pipe, as wide as the terminal up to a limit."""
    from rich.console import Console

    console = Console(file=file, highlight=False)
    console.width = min(console.width, WIDEST) if console.is_terminal else WIDTH
    return console


@contextmanager
def progress(first_line: str = "reading the model") -> Iterator[Callable[[str], None]]:
    """Shows on stderr what runs and for how long: a line that changes in a terminal, else one after 5 and every 10 s.

    A line that begins "3 of 20:" or "3 of about 20:" gets the time left, at the pace since the first such line.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = SpinnerColumn(), BarColumn(12), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    begun, latest, ended = now(), shorten(first_line), Event()
    first: tuple[int, float] | None = None  # how many were done when they were first counted, and when that was

    def repeat() -> None:
        pause = PAUSE / 2  # for the first one
        while not ended.wait(pause):
            print(f"{now() - begun:.0f} s: {latest}", file=sys.stderr, flush=True)
            pause = PAUSE

    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(latest, total=None)

        def say(line: str) -> None:
            nonlocal latest, first
            counted = _COUNTED.match(line)
            done, total = (int(counted[1]), int(counted[2])) if counted else (0, None)
            if total:
                first = first or (done, now())
                if done > first[0]:
                    each = (now() - first[1]) / (done - first[0])
                    left = each * (total - done)
                    line = f"about {f'{left:.0f} s' if left < 90 else f'{left / 60:.0f} min'} left; {line}"
            bar.update(task, completed=done, total=total, description=shorten(line))
            latest = line

        if not console.is_terminal:
            Thread(target=repeat, daemon=True).start()
        try:
            yield say
        finally:
            ended.set()


def shorten(line: str) -> str:
    """`line`, cut to the columns that a line of progress has."""
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}..."
