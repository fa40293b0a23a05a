"""MemoryReport: what a run needed, what held memory at its peak, and how the prediction compares.

`MemoryProfiler.report()` makes it, memory_report.json holds it, and export/report.py makes its tables and page.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ckpt_ft.errors import UserError, never_fatal
from ckpt_ft.export import plots
from ckpt_ft.export.holders import Holder
from ckpt_ft.export.notebook import embedded
from ckpt_ft.export.report import headline, markdown_report, print_report, report_page
from ckpt_ft.export.timeline import Timeline
from ckpt_ft.files import write
from ckpt_ft.memory.record.events import PHASES
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.redact import redacted
from ckpt_ft.units import format_bytes
from ckpt_ft.validation import Bytes, Seconds, read_json

from . import REPORT_KINDS

if TYPE_CHECKING:
    from rich.console import Console

MAX_POINTS = 200  # of a history; an even number, because points are merged in pairs
_NOT_IN_JSON = ("main", "step")
_PACKAGES = ("torch", "transformers", "accelerate", "diffusers", "peft")


@dataclass
class History:
    """Peaks over a run. Each point is the maximum over a number of measured steps, so a long run stays short.

    Attributes:
        steps, ends: the first and the last step of each point; steps between two points were not measured.
        allocated: phase -> bytes at each point.
        reserved: bytes at each point; empty on a CPU.
        every, filled: how many measured steps a point covers, and the last point so far.
    """

    steps: list[Bytes] = field(default_factory=list)
    allocated: dict[str, list[Bytes]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    reserved: list[Bytes] = field(default_factory=list)
    every: Bytes = 1
    filled: Bytes = 0
    ends: list[Bytes] = field(default_factory=list)

    def add(self, step: int, peaks: dict[str, dict[str, int]]) -> None:
        """Adds the peaks (phase -> figure -> bytes) of a measured step."""
        columns = [(column, peaks.get(phase, {}).get("allocated", 0)) for phase, column in self.allocated.items()]
        if reserved := [figures["reserved"] for figures in peaks.values() if "reserved" in figures]:
            columns.append((self.reserved, max(reserved)))
        if not self.steps or self.filled == self.every:
            if len(self.steps) == MAX_POINTS:
                self._halve()
            self.steps.append(step)
            self.ends.append(step)
            self.filled = 0
            for column, _ in columns:
                column.append(0)
        self.filled += 1
        self.ends[-1] = step
        for column, nbytes in columns:
            column[-1] = max(column[-1], nbytes)

    def _halve(self) -> None:
        self.every *= 2
        self.steps, self.ends = self.steps[::2], self.ends[1::2]
        for column in (*self.allocated.values(), self.reserved):
            column[:] = map(max, column[::2], column[1::2])


@dataclass(frozen=True)
class Prediction:
    """The figures of a traced step, in bytes and seconds.

    reserved, seconds: None for device "cpu"; it has seconds once it is calibrated.
    host, pinned: peak bytes in host memory, and the pinned part of them, as PyTorch rounds it.
    """

    device: str
    allocated: Bytes
    peaks: dict[str, Bytes]
    reserved: Bytes | None = None
    seconds: Seconds | None = None
    seconds_parts: dict[str, Seconds] = field(default_factory=dict)
    bound: str = ""
    host: Bytes = 0
    pinned: Bytes = 0

    @classmethod
    def from_trace(cls, trace: StepTrace, phases: Mapping[str, StepTrace] = MappingProxyType({})) -> Prediction:
        """The figures of the last step in `trace`, and the peaks of other phases of the run."""
        peaks = {**trace.peaks, **{name: phase.peak_allocated for name, phase in phases.items()}}
        allocated = max(trace.peak_allocated, *(phase.peak_allocated for phase in phases.values()), 0)
        if trace.device == "cpu":
            return cls(trace.device, allocated, peaks, seconds=trace.seconds if trace.timed else None)
        took = trace.seconds_parts
        reserved = max(trace.peak_reserved, *(phase.peak_reserved for phase in phases.values()), 0)
        host = trace.peak_host, trace.host_kinds.get("pinned", 0)
        return cls(trace.device, allocated, peaks, reserved, took.total, took.parts, took.bound, *host)


@dataclass(frozen=True)
class RankMemory:
    """The memory of one process.

    Attributes:
        device: "cpu", or the name of the GPU.
        steps: optimizer steps, of which `sampled` were measured.
        peaks: phase -> figure ("allocated", on CUDA also "reserved" and "active") -> bytes; the maximum over the
            measured steps. Phases of a step, then others that were measured, such as "generation" and "evaluation".
        at_peak, holders: bytes by category, and the largest groups of allocations, at the peak. Empty if unknown.
        seconds: per step, without the steps that the measurement slowed down; None if there were no others.
        host: bytes in host memory at most: "resident" of the process (ru_maxrss), and on CUDA "pinned" of it, in
            blocks as PyTorch rounds them, and with the blocks that it keeps for later ("pinned blocks").
        retries, ooms: CUDA allocations that first had to free cached memory, and those that failed.
        fullest: phase -> bytes allocated in the measured step with the highest peak, which is the predicted one.
        step: that step's number, from 1; 0 if it is not known.
        batch: argument of the model -> shape, of the largest batch of that step.
        median: the shape of the first argument in the median batch of all steps.
        between: what ran between steps ("evaluation", "saving") -> the numbers of steps after which it ran.
    """

    rank: Bytes
    device: str
    steps: Bytes
    sampled: Bytes
    peaks: dict[str, dict[str, Bytes]]
    at_peak: dict[str, Bytes] = field(default_factory=dict)
    holders: list[Holder] = field(default_factory=list)
    seconds: Seconds | None = None
    retries: Bytes = 0
    ooms: Bytes = 0
    history: History = field(default_factory=History)
    predicted: Prediction | None = None
    host: dict[str, Bytes] = field(default_factory=dict)
    fullest: dict[str, Bytes] = field(default_factory=dict)
    step: Bytes = 0
    batch: dict[str, list[Bytes]] = field(default_factory=dict)
    median: list[Bytes] = field(default_factory=list)
    between: dict[str, list[Bytes]] = field(default_factory=dict)

    def peak(self, figure: str = "allocated", phases: Collection[str] = ()) -> int | None:
        """The maximum over all phases, or `phases`, in bytes; None for a figure that was not measured."""
        kept = (known for name, known in self.peaks.items() if not phases or name in phases)
        return max((phase[figure] for phase in kept if figure in phase), default=None)


@dataclass(frozen=True)
class MaxBatch:
    """The largest micro-batch that fits a device: as predicted, and as a real step confirmed it (None: not tried)."""

    device: str
    predicted: Bytes
    proved: Bytes | None = None


@dataclass(frozen=True)
class Facts:
    """The part of a report's provenance that is read back; a provenance may hold more."""

    command: str = ""
    machine: str = ""
    policy: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class MemoryReport:
    """The report of a run. Every part but `provenance` and `ranks` is optional.

    Attributes:
        timeline: rank 0's step with the highest measured peak; the predicted step if none was recorded.
        notes: one sentence each.
        main: False on the processes that neither print nor write.
        step: every allocation of the step in `timeline`; it is not written to JSON.
    """

    provenance: dict[str, Any]
    ranks: list[RankMemory]
    max_batch: MaxBatch | None = None
    timeline: Timeline | None = None
    notes: list[str] = field(default_factory=list)
    main: bool = True
    step: dict[str, Any] | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        rank, run = self.fullest, self.provenance
        figures = [("measured", rank.peak()), ("predicted", rank.predicted.allocated if rank.predicted else None)]
        peaks = ", ".join(f"{format_bytes(nbytes)} {how}" for how, nbytes in figures if nbytes is not None)
        said = f"{run.get('model', 'a model')}, policy {run.get('policy', 'unknown')}, {rank.steps} steps"
        return f"MemoryReport({said}{', peak allocated ' if peaks else ''}{peaks})"

    @property
    def fullest(self) -> RankMemory:
        """The rank with the highest peak."""
        return max(self.ranks, key=lambda rank: rank.peak() or 0)

    def print(self, console: Console | None = None) -> None:
        """Prints the tables, on the main process only."""
        if self.main:
            print_report(self, console)

    def to_markdown(self, path: str | Path | None = None) -> str:
        """Returns the tables as Markdown and writes them to `path` if one is given."""
        return _written(markdown_report(self), path)

    def to_json(self, path: str | Path | None = None) -> str:
        """Returns everything but `step` as JSON and writes it to `path` if one is given."""
        values = {"format": 1, **{f.name: getattr(self, f.name) for f in fields(self) if f.name not in _NOT_IN_JSON}}
        rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(value, default=asdict)}" for name, value in values.items())
        return _written(f"{{\n{rows}\n}}\n", path)

    @classmethod
    def from_json(cls, path: str | Path) -> MemoryReport:
        """Reads a file that `to_json` wrote, or memory_report.json in a directory.

        Raises:
            UserError: the file does not exist or is not a memory report.
        """
        path = Path(path, "memory_report.json") if Path(path).is_dir() else path
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            wrote = "recipes write memory_report.json to their --output_dir"
            raise UserError(f"{path}: cannot be read ({error.strerror}); {wrote}") from error
        report = read_json(cls, text, str(path), "a memory report")
        read_json(Facts, json.dumps(report.provenance), f"{path}: provenance", "that of a memory report")
        if not report.ranks:
            raise UserError(f"{path}: a memory report without ranks")
        return report

    def to_html(self, path: str | Path) -> Path:
        """Writes one HTML file with the run, its step and its tables, to be opened in a browser."""
        return report_page(self, self.step).write(path)

    def _repr_html_(self) -> str:
        return embedded(f"Memory: {headline(self)}", report_page(self, self.step))

    def plot(self, path: str | Path) -> Path | None:
        """Draws memory over the step to `path` (PNG, SVG or PDF); returns None if no step was recorded.

        Raises:
            UserError: matplotlib is not installed.
        """
        return None if self.timeline is None else plots.draw_step(path, self.timeline, headline(self))

    def write(self, directory: str | Path, kinds: Collection[str] = REPORT_KINDS) -> list[Path]:
        """Writes memory_report.json, .md, .html and (with matplotlib and a recorded step) .png, whole or not at all.

        Returns the files written, in the order of `kinds`; none on other processes than the main one.

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


def write_report(report: MemoryReport, kinds: Sequence[str], output_dir: str) -> None:
    """Prints the report and writes its `kinds` on the main process; logs a warning for each part that fails."""
    if not report.main:
        return
    with never_fatal("printing the memory report"):
        report.print()
    for kind in kinds:
        with never_fatal(f"writing memory_report.{kind}"):
            report.write(output_dir, (kind,))


def provenance(**facts: Any) -> dict[str, Any]:
    """Where a report comes from: the command without its secrets, versions, machine, and `facts` (policy, shapes)."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    command = shlex.join([Path(sys.argv[0]).name, *redacted(sys.argv[1:])])
    machine = f"{platform.system()} {platform.machine()}"
    return {"command": command, "date": str(date.today()), "machine": machine, "versions": versions, **facts}


def _written(text: str, path: str | Path | None) -> str:
    """Returns `text` after writing it to `path`, if one is given."""
    if path is not None:
        write(path, text)
    return text
