"""What ACCallback and LoopMemory do alike: prove a policy first, predict, name holders, write the reports."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from ckpt_ft.errors import UserError, WorkFailed, one_line
from ckpt_ft.memory.record.holders import holder_line
from ckpt_ft.policy import Policy

if TYPE_CHECKING:
    import torch

    from ckpt_ft.memory.measure.profiler import MemoryProfiler
    from ckpt_ft.memory.measure.report import MemoryReport
    from ckpt_ft.memory.record.trace import StepTrace

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


def add_prediction(report: MemoryReport, processes: int, trace: Callable[[], StepTrace]) -> None:
    """Put what `trace` predicts beside what was measured; where it cannot, a note says why."""
    if processes > 1:
        report.notes.append("no prediction: what DDP, FSDP and DeepSpeed add to a process is not traced")
        return
    try:
        predicted = trace()
        report.predict(predicted)
        report.notes += [f"Prediction: {note}." for note in predicted.notes]
    except Exception as error:  # a prediction must not cost the run that it describes
        report.notes.append(f"no prediction: {one_line(error)}")


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
