"""Continues a Trainer's run under a policy that needs less memory if it runs out under `auto`.

Several processes are not replanned: one runs out of memory while the others wait for it in a collective, so they
cannot agree on a new plan, and training stops with advice.
"""

from __future__ import annotations

import gc
import logging
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING

from accelerate import PartialState

from ckpt_ft.errors import UserError, is_oom, one_line
from ckpt_ft.planning.results import Plan
from ckpt_ft.training.run.checkpoints import RunDirectory
from ckpt_ft.training.run.saving import Finished, load_finished
from ckpt_ft.units import format_bytes

from .arguments import ACArguments
from .fit import Fitted, make_plan, say
from .session import Session

if TYPE_CHECKING:
    from transformers import Trainer

logger = logging.getLogger(__name__)
_NEXT_BUDGET = 0.9  # of the budget that was too large


def train_with_replanning(trainer: Trainer, session: Session, directory: RunDirectory) -> dict[str, float]:
    """Calls `trainer.train()`; if memory runs out under `auto`, plans for less and continues from the last checkpoint.

    Without a checkpoint, it repeats only if no step was completed.

    Returns:
        The training metrics; empty if the resumed checkpoint was the last one of a finished run.

    Raises:
        Exception: the error of `trainer.train()`, if no policy needs less or with `--ac_on_oom stop`.
    """
    resume = directory.checkpoint
    while True:
        try:
            return trainer.train(resume_from_checkpoint=resume).metrics
        except Finished:
            say(f"{resume} is the last one of a finished run: nothing is left to train")
            load_finished(trainer)
            return {}
        except Exception as error:
            fitted = session.fitted
            if not is_oom(error) or fitted is None or not _may_replan(trainer, fitted, directory):
                raise
            traceback.clear_frames(error.__traceback__)
            reason = one_line(error)
            failed = error
        session.close()
        trainer.optimizer = trainer.lr_scheduler = None
        fitted.workload.model.zero_grad(set_to_none=True)
        gc.collect()
        assert fitted.plan is not None
        budget = smaller_budget(fitted.plan)
        try:
            made = make_plan(fitted.workload, budget, fitted.args.per_device_train_batch_size)
        except UserError:
            raise failed from None
        session.use(replace(fitted, plan=made))
        resume = directory.last_complete()
        place = resume or "the beginning"
        logger.warning("%s; planned again for %s: %s, from %s", reason, format_bytes(budget), made.best.policy, place)


def smaller_budget(failed: Plan) -> int:
    """The budget to plan for after the pick of `failed` ran out of memory: less than that pick should have needed."""
    budget, needed = failed.room.budget, failed.room.needs(failed.best)
    while budget >= min(needed, failed.room.budget):
        budget = round(budget * _NEXT_BUDGET)
    return budget


def replans(settings: ACArguments) -> bool:
    """Whether a run that runs out of memory is planned again."""
    return PartialState().num_processes == 1 and settings.ac_policy == "auto" and settings.ac_on_oom != "stop"


def _may_replan(trainer: Trainer, fitted: Fitted, directory: RunDirectory) -> bool:
    started = trainer.state.global_step > 0
    return replans(fitted.settings) and (directory.last_complete() is not None or not started)
