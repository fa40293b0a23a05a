"""MemoryReport: what a run needed, where it stood at the peak, and how that compares with the prediction.

`MemoryProfiler.report()` makes one; memory_report.json holds all of it and `from_json` reads it back.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_ft.errors import UserError
from ckpt_ft.files import write
from ckpt_ft.memory.record.events import PHASES, Holder
from ckpt_ft.memory.record.timeline import Timeline
from ckpt_ft.memory.record.trace import StepTrace

if TYPE_CHECKING:
    from rich.console import Console

FIGURES = ("allocated", "reserved", "active")  # of torch's allocator; on CPU only the first exists
_PACKAGES = ("torch", "transformers", "accelerate", "diffusers", "peft")


@dataclass
class RankMemory:
    """What one process measured.

    device: "cpu", or the GPU's name. steps: optimizer steps, of which `sampled` were measured.
    peaks: phase -> figure ("allocated", on CUDA also "reserved" and "active") -> bytes, the most in any measured step.
    at_peak: category -> bytes when the most was allocated; holders: the largest groups of it. Empty where unknown.
    seconds: per step, those slowed by the measurement left out; None when there were no others.
    retries, ooms: CUDA allocations that first had to give cached memory back, and that failed.
    """

    rank: int
    device: str
    steps: int
    sampled: int
    peaks: dict[str, dict[str, int]]
    at_peak: dict[str, int] = field(default_factory=dict)
    holders: list[Holder] = field(default_factory=list)
    seconds: float | None = None
    retries: int = 0
    ooms: int = 0

    def peak(self, figure: str = "allocated") -> int | None:
        """The most bytes over all phases; None for a figure that was not measured."""
        return max((phase[figure] for phase in self.peaks.values() if figure in phase), default=None)


@dataclass
class Prediction:
    """The figures of a trace. Bytes; `reserved` and `seconds` are None on "cpu", where there are none."""

    device: str
    allocated: int
    peaks: dict[str, int]
    reserved: int | None = None
    seconds: float | None = None

    @classmethod
    def from_trace(cls, trace: StepTrace) -> Prediction:
        """The measured step of `trace`."""
        if trace.device == "cpu":
            return cls(trace.device, trace.peak_allocated, trace.peaks)
        return cls(trace.device, trace.peak_allocated, trace.peaks, trace.peak_reserved, trace.seconds)


@dataclass
class MaxBatch:
    """The largest batch that fits a device: as predicted, and as proved by running it (None: not tried)."""

    device: str
    predicted: int
    proved: int | None = None


@dataclass
class PolicyRow:
    """Another policy for the same step: predicted peak in bytes and seconds per step."""

    policy: str
    peak: int
    seconds: float | None = None


@dataclass
class MemoryReport:
    """The report of a run; every part but the ranks is optional.

    provenance: what `provenance()` returns. timeline: of rank 0's fullest measured step, or predicted.
    main: False on the processes that neither print nor write.
    """

    provenance: dict[str, Any]
    ranks: list[RankMemory]
    predicted: Prediction | None = None
    max_batch: MaxBatch | None = None
    next_policies: list[PolicyRow] = field(default_factory=list)
    timeline: Timeline | None = None
    notes: list[str] = field(default_factory=list)
    main: bool = True

    @property
    def fullest(self) -> RankMemory:
        """The rank whose peak is highest."""
        return max(self.ranks, key=lambda rank: rank.peak() or 0)

    def predict(self, trace: StepTrace) -> None:
        """Put the figures of `trace` beside the measured ones; its timeline too, where none was measured."""
        self.predicted = Prediction.from_trace(trace)
        self.timeline = self.timeline or Timeline.from_trace(trace, "predicted")

    def print(self, console: Console | None = None) -> None:
        """Print the tables, on the main process only."""
        if self.main:
            from .report_tables import print_report

            print_report(self, console)

    def to_markdown(self, path: str | Path | None = None) -> str:
        """The tables as Markdown, also written to `path`."""
        from .report_tables import markdown_report

        return _written(markdown_report(self), path)

    def to_json(self, path: str | Path | None = None) -> str:
        """Everything as JSON, also written to `path`."""
        values = {"format": 1, **{f.name: getattr(self, f.name) for f in fields(self) if f.name != "main"}}
        rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(value, default=asdict)}" for name, value in values.items())
        return _written(f"{{\n{rows}\n}}\n", path)

    @classmethod
    def from_json(cls, path: str | Path) -> MemoryReport:
        """Read what `to_json(path)` wrote.

        Raises:
            UserError: there is no such file, or it is not a memory report.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            values.pop("format")
            for rank in values["ranks"]:
                rank["holders"] = [Holder(**holder) for holder in rank["holders"]]
            values["ranks"] = [RankMemory(**rank) for rank in values["ranks"]]
            values["next_policies"] = [PolicyRow(**row) for row in values["next_policies"]]
            parts: dict[str, Callable[..., Any]] = {"predicted": Prediction, "max_batch": MaxBatch}
            for name, part in parts.items():
                values[name] = values[name] and part(**values[name])
            values["timeline"] = values["timeline"] and Timeline.from_dict(values["timeline"])
            return cls(**values)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is not a memory report: {type(error).__name__}: {error}") from error

    def plot(self, path: str | Path) -> Path | None:
        """Draw memory over the step to `path` (PNG, SVG or PDF); None when no step was recorded.

        Raises:
            UserError: matplotlib is not installed.
        """
        if self.timeline is None:
            return None
        from .report_tables import headline

        path = Path(path)
        partial = path.with_name(f".{path.name}.{os.getpid()}{path.suffix}")
        try:
            self.timeline.draw(partial, headline(self))
            return partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def write(self, directory: str | Path) -> list[Path]:
        """Write memory_report.json, .md and (with matplotlib and a recorded step) .png; each is whole or not there.

        Returns what was written: nothing on other than the main process.

        Raises:
            UserError: `directory` cannot be written to.
        """
        if not self.main:
            return []
        base = Path(directory) / "memory_report"
        try:
            base.parent.mkdir(parents=True, exist_ok=True)
            self.to_json(base.with_suffix(".json"))
            self.to_markdown(base.with_suffix(".md"))
        except OSError as error:
            raise UserError(f"{directory}: the memory report cannot be written ({error.strerror})") from error
        written = [base.with_suffix(".json"), base.with_suffix(".md")]
        drawn = self.plot(base.with_suffix(".png")) if importlib.util.find_spec("matplotlib") else None
        return written + ([drawn] if drawn else [])


def provenance(**facts: Any) -> dict[str, Any]:
    """What made a report: the command, versions and machine, then `facts` (policy, shapes, ...)."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return {"command": command, "machine": f"{platform.system()} {platform.machine()}", "versions": versions, **facts}


def merge_peaks(into: dict[str, dict[str, int]], step: dict[str, dict[str, int]]) -> None:
    """Raise the peaks in `into` to those of one more `step`."""
    for phase in PHASES:
        for figure, nbytes in step.get(phase, {}).items():
            known = into.setdefault(phase, {})
            known[figure] = max(known.get(figure, 0), nbytes)


def _written(text: str, path: str | Path | None) -> str:
    """`text`, written to `path` where one is given."""
    if path is not None:
        write(path, text)
    return text
