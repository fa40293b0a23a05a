"""The files that `ckpt-ft estimate` writes: a page, and what the viewers of PyTorch and of Perfetto open."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_ft.errors import UserError
from ckpt_ft.export.page import Figure, Page, Section
from ckpt_ft.export.step_page import STEP_TITLE, StepView
from ckpt_ft.files import check_writable
from ckpt_ft.memory.gpus import GPU
from ckpt_ft.units import format_bytes, format_number

from .estimate import Estimate

if TYPE_CHECKING:
    from ckpt_ft.memory.record.trace import StepTrace

Html = Annotated[str, typer.Option("--html", help="write a page that shows it here, one file for a browser")]
Snapshot = Annotated[str, typer.Option("--snapshot", help="write it for pytorch.org/memory_viz here (a pickle)")]
Perfetto = Annotated[str, typer.Option("--perfetto", help="write it for ui.perfetto.dev here (JSON)")]


@dataclass(frozen=True)
class Files:
    """Where to write what; "" for nowhere.

    Raises:
        UserError: a file that cannot be written or is asked for twice, or a CPU's step for Perfetto.
    """

    gpu: GPU | None
    html: str
    snapshot: str
    perfetto: str

    def __post_init__(self) -> None:
        if self.perfetto and self.gpu is None:
            raise UserError(f"--perfetto {self.perfetto}: a CPU's speed is not modelled; give a GPU by --device")
        named = {flag: getattr(self, flag) for flag in ("html", "snapshot", "perfetto") if getattr(self, flag)}
        for flag, file in named.items():
            check_writable(file, f"--{flag}")
        if len({Path(file).resolve() for file in named.values()}) < len(named):
            raise UserError(f"--{' and --'.join(named)}: each needs a file of its own")

    @property
    def any(self) -> bool:
        """Whether one is to be written."""
        return bool(self.html or self.snapshot or self.perfetto)

    def write(self, result: Estimate, trace: StepTrace) -> None:
        """Write what was asked for."""
        if self.html:
            estimate_page(result, trace).write(self.html)
        if self.snapshot:
            trace.to_snapshot(self.snapshot)
        if self.perfetto:
            trace.to_perfetto(self.perfetto)


def estimate_page(result: Estimate, trace: StepTrace) -> Page:
    """The page of `estimate --html`."""
    shape = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in result.shape.items())
    launched = f", {result.launch}: this is each GPU" if result.launch else ""
    limit = None if result.capacity is None else result.capacity - result.context
    view = StepView.from_trace(trace, result.model, limit)
    return Page(
        f"{result.model} under {result.policy}",
        f"predicted for {result.device}: batch {result.batch_size}, {shape}{launched}",
        [Section("figures", "", _figures(result)), Section("step", STEP_TITLE, view)],
        " ".join(f"{note}." for note in result.notes),
    )


def _figures(result: Estimate) -> list[Figure]:
    phase = max(result.peaks, key=result.peaks.__getitem__)
    found = [Figure("peak allocated", format_bytes(result.peak_allocated), f"in {phase}")]
    if result.device != "cpu":
        context = f"and {format_bytes(result.context)} of CUDA context beside it"
        found.append(Figure("peak reserved", format_bytes(result.peak_reserved), context))
    if result.headroom is not None and result.capacity is not None:
        fits = result.headroom >= 0
        room = format_bytes(abs(result.headroom))
        found.append(
            Figure(
                "fits" if fits else "does not fit",
                f"{room} {'to spare' if fits else 'too much'}",
                f"of {format_bytes(result.capacity)}",
            )
        )
    if result.seconds is not None:
        found.append(Figure("seconds a step", format_number(result.seconds), f"bound by {result.bound}"))
    return found
