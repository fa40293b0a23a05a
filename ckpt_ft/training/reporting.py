"""What ACCallback and LoopMemory do alike: prove a policy first, predict, name holders, write the reports."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object
from torch import nn

from ckpt_ft.errors import UserError, WorkFailed, one_line
from ckpt_ft.export.holders import holder_line
from ckpt_ft.policy import Policy

from .launched import launch_of

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

    from ckpt_ft.memory.measure.profiler import MemoryProfiler
    from ckpt_ft.memory.measure.report import MemoryReport
    from ckpt_ft.memory.record.trace import StepTrace
    from ckpt_ft.spec.launch import Launch

logger = logging.getLogger(__name__)


@contextmanager
def never_fatal(what: str) -> Iterator[None]:
    """A report must not cost the run that it describes: a failure inside is one warning."""
    try:
        yield
    except Exception as error:
        logger.warning("%s failed, training is not touched by it: %s: %s", what, type(error).__name__, one_line(error))


def refuse_fsdp(policy: Policy) -> None:
    """Raises UserError: FSDP was asked to checkpoint too."""
    raise UserError(
        f"policy '{policy}' and FSDP's own activation checkpointing are both on: blocks would be re-run twice; "
        "set fsdp_activation_checkpointing to false in the launch configuration, or drop the policy"
    )


def require_parity(
    model: nn.Module,
    inputs: Mapping[str, Any],
    policy: Policy,
    say: Callable[[object], None] = print,
    loss: Callable[..., torch.Tensor] | None = None,
) -> None:
    """`--ac_check`: compare a step of `model` on `inputs` with and without `policy`; `loss` as in `check_parity`.

    Raises:
        WorkFailed: a number differs.
    """
    from ckpt_ft.checkpointing.parity import check_parity

    parity = check_parity(model, dict(inputs), policy, loss=loss)
    say(parity)
    if not parity.ok:
        raise WorkFailed(f"--ac_check: policy {policy} changes the numbers of a step; nothing was trained")


def add_prediction(
    report: MemoryReport, accelerator: Accelerator, trace: Callable[[Launch | None], StepTrace]
) -> None:
    """Put what `trace` predicts beside what was measured, each process for its own step; every process must call it.

    Where it cannot, a note says why.

    Args:
        trace: of this process's step in that launch.
    """
    rank = accelerator.process_index
    try:
        predicted = trace(launch_of(accelerator))
        report.predict(predicted, rank)
        notes = [f"Prediction: {note}." for note in predicted.notes]
    except Exception as error:  # a prediction must not cost the run that it describes
        notes = [f"no prediction: {one_line(error)}"]
    everywhere = gather_object([(report.ranks[rank].predicted, notes)])
    for measured, (prediction, _) in zip(report.ranks, everywhere, strict=True):
        measured.predicted = prediction
    report.notes += dict.fromkeys(note for _, said in everywhere for note in said)


def holder_lines(profiler: MemoryProfiler | None, n: int) -> list[str]:
    """What held this process's highest peak, the largest first; empty where that is not known."""
    held = [] if profiler is None else profiler.holders(n)
    return [holder_line(holder) for holder in held]


def show_and_write(report: MemoryReport, kinds: Sequence[str], output_dir: str) -> None:
    """Print the report and write memory_report.json, .md, .html and .png as asked for, on the main process.

    Without matplotlib there is no picture. One that cannot be printed or written is a warning, and the others stand.
    """
    if not report.main:
        return
    with never_fatal("printing the memory report"):
        report.print()
    for kind in kinds:
        with never_fatal(f"writing memory_report.{kind}"):
            report.write(output_dir, (kind,))
