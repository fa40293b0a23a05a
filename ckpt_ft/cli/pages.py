"""The files that `ckpt-ft estimate` writes: a page, and what the viewers of PyTorch and of Perfetto open."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_ft.errors import UserError
from ckpt_ft.files import check_writable
from ckpt_ft.memory.gpus import GPU

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
            from ckpt_ft.export.step_page import estimate_page

            estimate_page(result, trace).write(self.html)
        if self.snapshot:
            trace.to_snapshot(self.snapshot)
        if self.perfetto:
            trace.to_perfetto(self.perfetto)
