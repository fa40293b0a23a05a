"""The part of a run that all Trainer recipes share: training with checkpoints, metrics, evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .replan import train_with_replanning
from .run.directory import RunDirectory
from .run.trainer_checkpoints import keep_checkpoints
from .session import advise_on_oom

if TYPE_CHECKING:
    from transformers import Trainer

    from .callback import ACCallback


def train(trainer: Trainer, memory: ACCallback, directory: RunDirectory) -> None:
    """Trains from `directory.checkpoint`, and saves the weights or adapters, the trainer's state and its metrics.

    Checkpoints are complete or absent, a signal is deferred to the end of a step, and under `--ac_policy auto` a run
    that runs out of memory continues with a policy that needs less.

    Raises:
        Interrupted: SIGINT or SIGTERM was received; the last step has a checkpoint.
        UserError: the checkpoint does not match, or the first step fails with these flags and data.
        WorkFailed: memory ran out, or a file could not be written.
    """
    with advise_on_oom(memory.session), keep_checkpoints(trainer, directory):
        metrics = train_with_replanning(trainer, memory.session, directory)
    trainer.save_state()
    if metrics:
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)


def evaluate(trainer: Trainer, **metrics: Any) -> None:
    """Evaluates, then logs and saves the results with other `metrics`."""
    results = trainer.evaluate() | metrics
    trainer.log_metrics("eval", results)
    trainer.save_metrics("eval", results)
