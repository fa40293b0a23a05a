"""MemoryReport: what a run needed, where it stood at the peak, and how that compares with the prediction.

`MemoryProfiler.report()` makes one; memory_report.json holds all of it and `from_json` reads it back.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shlex
import sys
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_ft.errors import UserError
from ckpt_ft.export import plots
from ckpt_ft.export.notebook import fragment, paragraph, table_html
from ckpt_ft.export.step_page import StepView
from ckpt_ft.export.timeline import Timeline
from ckpt_ft.files import write
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.reading import read_json
from ckpt_ft.redact import redacted

from .kinds import KINDS
from .records import Facts, Prediction, RunMemory
from .report_tables import headline, lines, markdown_report, print_report, tables
from .run_view import report_page

if TYPE_CHECKING:
    from rich.console import Console

_HERE = ("main", "step")  # fields that are not of the report's JSON
_PACKAGES = ("torch", "transformers", "accelerate", "diffusers", "peft")


@dataclass
class MemoryReport(RunMemory):
    """The report of a run: printed, written, read back.

    main: False on the processes that neither print nor write.
    step: every allocation of the step that `timeline` has in short; only where the report was made.
    """

    main: bool = True
    step: StepView | None = field(default=None, init=False, compare=False)

    def show(self, trace: StepTrace) -> None:
        """The step that is drawn: the measured one where there is one."""
        self.timeline, self.step = Timeline.from_trace(trace), StepView.from_trace(trace)

    def predict(self, trace: StepTrace, rank: int = 0) -> None:
        """Put the figures of `trace` beside those that `rank` measured; it is drawn, where no step was measured."""
        self.ranks[rank].predicted = Prediction.from_trace(trace)
        if self.timeline is None and rank == 0:
            self.show(trace)

    def print(self, console: Console | None = None) -> None:
        """Print the tables, on the main process only."""
        if self.main:
            print_report(self, console)

    def to_markdown(self, path: str | Path | None = None) -> str:
        """The tables as Markdown, also written to `path`."""
        return _written(markdown_report(self), path)

    def to_json(self, path: str | Path | None = None) -> str:
        """Everything as JSON, also written to `path`."""
        values = {"format": 1, **{f.name: getattr(self, f.name) for f in fields(self) if f.name not in _HERE}}
        rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(value, default=asdict)}" for name, value in values.items())
        return _written(f"{{\n{rows}\n}}\n", path)

    @classmethod
    def from_json(cls, path: str | Path) -> MemoryReport:
        """Read what `to_json(path)` wrote.

        Raises:
            UserError: there is no such file, or it is not a memory report.
        """
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from error
        report = read_json(cls, text, str(path), "a memory report")
        read_json(Facts, json.dumps(report.provenance), f"{path}: provenance", "that of a memory report")
        if not report.ranks:
            raise UserError(f"{path}: a memory report without ranks")
        return report

    def to_html(self, path: str | Path) -> Path:
        """Write a page that shows the run, its step and its tables to `path`: one file, to be opened in a browser."""
        return report_page(self, self.step).write(path)

    def _repr_html_(self) -> str:
        step = [] if self.timeline is None else [self.timeline.svg()]
        return fragment(
            f"Memory: {headline(self)}", *step, *map(table_html, tables(self)), *map(paragraph, lines(self))
        )

    def plot(self, path: str | Path) -> Path | None:
        """Draw memory over the step to `path` (PNG, SVG or PDF); None when no step was recorded.

        Raises:
            UserError: matplotlib is not installed.
        """
        if self.timeline is None:
            return None
        return plots.draw_step(path, self.timeline, headline(self))

    def write(self, directory: str | Path, kinds: Collection[str] = KINDS) -> list[Path]:
        """Write memory_report.json, .md, .html and (with matplotlib and a recorded step) .png; whole or not there.

        Returns what was written of `kinds`: nothing on other than the main process.

        Raises:
            UserError: `directory` cannot be written to.
        """
        if not self.main:
            return []
        writers: dict[str, Callable[[Path], object]] = {
            "json": self.to_json,
            "md": self.to_markdown,
            "html": self.to_html,
        }
        if self.timeline is not None and plots.available():
            writers["png"] = self.plot
        paths = {kind: Path(directory) / f"memory_report.{kind}" for kind in kinds if kind in writers}
        try:
            for kind, path in paths.items():
                writers[kind](path)
        except OSError as error:
            raise UserError(f"{directory}: the memory report cannot be written ({error.strerror})") from error
        return list(paths.values())


def provenance(**facts: Any) -> dict[str, Any]:
    """What made a report: the command less its secrets, versions and machine, then `facts` (policy, shapes, ...)."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    command = shlex.join([Path(sys.argv[0]).name, *redacted(sys.argv[1:])])
    return {"command": command, "machine": f"{platform.system()} {platform.machine()}", "versions": versions, **facts}


def _written(text: str, path: str | Path | None) -> str:
    """`text`, written to `path` where one is given."""
    if path is not None:
        write(path, text)
    return text
