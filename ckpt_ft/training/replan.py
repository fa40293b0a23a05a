"""When memory runs out all the same: training goes on under a leaner plan, from the last checkpoint.

`train_within` does it for a Trainer, which is told to train again; `run_within` for a loop, which runs again from
loading the model on. Of several processes one runs out of memory while the others wait for it in a collective: there
is no plan that they could still agree on, and training stops with advice.
"""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from accelerate import PartialState
from transformers import Trainer

from ckpt_ft.errors import UserError, WorkFailed, is_oom, one_line
from ckpt_ft.planning.results import Plan
from ckpt_ft.training.run.directory import RunDirectory
from ckpt_ft.training.run.trainer_checkpoints import Finished, load_finished
from ckpt_ft.units import format_bytes

from .arguments import ACArguments
from .fit import Fitted, make_plan, say

logger = logging.getLogger(__name__)
_LEANER = 0.9  # of the budget: what is planned for after memory ran out


class Measuring(Protocol):
    """What of ACCallback training again needs."""

    fitted: Fitted | None

    def take(self, fitted: Fitted) -> None:
        """Train under `fitted` from now on."""

    def close(self) -> None:
        """Stop measuring and take the policy off."""


def train_within(trainer: Trainer, memory: Measuring, directory: RunDirectory) -> dict[str, float]:
    """`trainer.train()`; under `auto`, when memory runs out, again under a leaner plan from the last checkpoint.

    Without a checkpoint it starts again only if not one step had been made. Raises what training raised where there is
    no leaner plan, or with `--ac_on_oom stop`.

    Returns:
        Training's metrics; none where the checkpoint that is resumed was the last one.
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
            fitted = memory.fitted
            if not is_oom(error) or fitted is None or not _may_replan(trainer, fitted, directory):
                raise
            traceback.clear_frames(error.__traceback__)
            reason = one_line(error)
            failed = error
        memory.close()
        trainer.optimizer = trainer.lr_scheduler = None
        fitted.workload.model.zero_grad(set_to_none=True)
        gc.collect()
        assert fitted.plan is not None
        budget = leaner_budget(fitted.plan)
        try:
            made = make_plan(fitted.workload, budget, fitted.args.per_device_train_batch_size)
        except UserError:
            raise failed from None
        memory.take(replace(fitted, plan=made))
        resume = directory.last_complete()
        place = resume or "the beginning"
        logger.warning("%s; planned again for %s: %s, from %s", reason, format_bytes(budget), made.best.policy, place)


@dataclass
class Attempt:
    """One try of a loop's run.

    Attributes:
        args: the loop's; with the batch that was found, once it is.
        settings: what is left open, of which a later try leaves the batch as the first one found it.
        checkpoint: what it goes on from, None for the beginning.
        budget: bytes to plan for, where memory has run out before; None for those of `--ac_budget`.
        plan: under `auto`, once it is made.
    """

    args: Any
    settings: ACArguments
    checkpoint: str | None
    budget: int | None = None
    plan: Plan | None = None

    def note(self, fitted: Fitted) -> None:
        """What this try runs under, but for the model, which must go before the next one."""
        self.args, self.plan = fitted.args, fitted.plan

    def leaner(self, checkpoint: str | None) -> Attempt:
        """The next try: the same batch in less memory, from `checkpoint` on."""
        assert self.plan is not None, "auto has made one before it trained"
        settings = replace(self.settings, find_max_batch_size=False)
        return Attempt(self.args, settings, checkpoint, leaner_budget(self.plan))


def run_within(train: Callable[[Attempt], None], args: Any, settings: ACArguments, directory: RunDirectory) -> None:
    """`train(attempt)`; under `auto`, when memory runs out, again for a smaller budget from the last
    checkpoint, or from the beginning where there is none.

    Args:
        train: a whole run, from loading the model on; it notes in the attempt what it was fitted to.
        args: the loop's.

    Raises:
        WorkFailed: what training raised, where there is no leaner plan or with `--ac_on_oom stop`.
    """
    attempt = Attempt(args, settings, directory.checkpoint)
    failed: WorkFailed | None = None
    while True:
        try:
            return train(attempt)
        except WorkFailed as error:
            if not (_replans(settings) and error.__cause__ is not None and is_oom(error.__cause__)):
                raise
            failed = WorkFailed(*error.args)  # without the traceback, which holds the model
            reason = one_line(error.__cause__)
        except UserError:
            if failed is None:
                raise
            raise failed from None
        gc.collect()
        attempt = attempt.leaner(directory.last_complete())
        place = attempt.checkpoint or "the beginning"
        logger.warning("%s; planning again for %s, from %s", reason, format_bytes(attempt.budget or 0), place)


def leaner_budget(failed: Plan) -> int:
    """What to plan for after the pick of `failed` ran out of memory: too little, as predicted, for that pick."""
    budget, needed = failed.room.budget, failed.room.needs(failed.best)
    while budget >= min(needed, failed.room.budget):
        budget = round(budget * _LEANER)
    return budget


def _replans(settings: ACArguments) -> bool:
    alone = PartialState().num_processes == 1  # of several ranks one runs out first, and the others wait for it
    return alone and settings.ac_policy == "auto" and settings.ac_on_oom != "stop"


def _may_replan(trainer: Trainer, fitted: Fitted, directory: RunDirectory) -> bool:
    started = trainer.state.global_step > 0
    return _replans(fitted.settings) and (directory.last_complete() is not None or not started)
