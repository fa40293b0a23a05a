"""What a recipe asks the planner: which policy, which micro-batch, and what to do when memory still runs out.

    fitted = fit_to_memory(model, training_args, ac_args, train_dataset, collator)     # before the Trainer is made
    ...
    with advise_on_oom(memory):
        result = train_within(trainer, memory, fitted, directory)

The step that is traced and tried is the Trainer's, on a batch with the longest row there is (trainer_workload.py).
diffusion/unet_workload.py does the same for the loop of the diffusion recipe, and `run_within` what train_within does.
"""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from accelerate import PartialState
from torch import nn
from transformers import Trainer, TrainingArguments

from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.errors import UserError, WorkFailed, one_line
from ckpt_ft.memory.measure.records import MaxBatch, PolicyRow
from ckpt_ft.memory.measure.report import MemoryReport
from ckpt_ft.planning.batch_size import MaxBatchSize, find_max_batch_size, keep_effective
from ckpt_ft.planning.plan import Plan, plan
from ckpt_ft.policy import Policy
from ckpt_ft.training.run.directory import RunDirectory
from ckpt_ft.training.run.trainer_checkpoints import Finished, load_finished
from ckpt_ft.units import format_bytes
from ckpt_ft.workloads.transformers_models import own_loss
from ckpt_ft.workloads.workload import Loss, Workload

from .arguments import ACArguments
from .oom import is_oom
from .trainer_workload import Collate, trainer_workload

logger = logging.getLogger(__name__)
_LOOP = 0.05  # of a CPU's budget, kept free for what the loop holds beside the step (batches fetched ahead, logging)
_LEANER = 0.9  # of the budget: what is planned for after memory ran out


class Measuring(Protocol):
    """What of ACCallback training again needs."""

    policy: Policy | None
    add_to_report: Callable[[MemoryReport], None] | None

    def close(self) -> None:
        """Stop measuring and take the policy off."""


@dataclass
class Fitted:
    """What was planned before training, and what is needed to plan again.

    plan: under `--ac_policy auto` or a plan's file. largest: under `--find_max_batch_size`.
    """

    workload: Workload
    args: Any  # TrainingArguments or LoopArguments
    settings: ACArguments
    batch_name: str = "per_device_train_batch_size"
    plan: Plan | None = None
    largest: MaxBatchSize | None = None

    def make_plan(self, budget: str | int | None, batch_size: int | None) -> Plan:
        """A plan for this model on the device at hand."""
        margin = _cpu_margin(self.workload)
        return plan(self.workload, budget, margin=margin, batch_size=batch_size, report=logger.info)

    def describe(self, report: MemoryReport) -> None:
        """Put the largest batch and the next best policies into `report`."""
        if self.largest is not None:
            device = self.plan.device if self.plan else str(next(self.workload.model.parameters()).device)
            report.max_batch = MaxBatch(device, self.largest.predicted, self.largest.batch)
        if self.plan is not None:
            seconds = self.plan.device != "cpu"  # nominal ones are no prediction
            others = self.plan.candidates[1:4]
            report.next_policies = [PolicyRow(c.policy, c.reserved, c.seconds if seconds else None) for c in others]


def fit_to_memory(
    model: nn.Module,
    args: TrainingArguments,
    settings: ACArguments,
    rows: Any,
    collate: Collate,
    compute_loss: Loss = own_loss,
) -> Fitted:
    """Choose what `auto`, a plan's file and `--find_max_batch_size` leave open; writes it to `settings` and `args`.

    Args:
        model: on any device; it is moved to that of training.
        rows: the training data, a map-style dataset of dicts; of those with "input_ids" the longest sets the peak.
        compute_loss: the trainer's, where it has one of its own.

    Raises:
        UserError: nothing fits, a plan for another model, or no budget on a CPU.
    """
    fitted = Fitted(trainer_workload(model, args, rows, collate, compute_loss), args, settings)
    settle(fitted, args.device)
    return fitted


@dataclass
class Attempt:
    """One try of a loop's run.

    Attributes:
        checkpoint: what it goes on from.
        budget: bytes to plan for, where memory has run out before; None for those of `--ac_budget`.
        plan: the plan that was made under `auto`.
    """

    checkpoint: str | None
    budget: int | None = None
    plan: Plan | None = None


def settle(fitted: Fitted, device: torch.device, attempt: Attempt | None = None) -> None:
    """Make the plan and find the batch that are asked for, for the model on `device`."""
    settings, model = fitted.settings, fitted.workload.model
    if settings.from_plan:
        fitted.plan = settings.plan
        fitted.plan.check_model(model, f"--ac_policy {settings.ac_policy}")
    if settings.ac_policy != "auto" and not settings.find_max_batch_size:
        return
    _refuse_partitioned(model, "--ac_policy auto" if settings.ac_policy == "auto" else "--find_max_batch_size")
    model.to(device)
    if settings.ac_policy == "auto":
        batch_size = None if settings.find_max_batch_size else getattr(fitted.args, fitted.batch_name)
        budget = None if attempt is None else attempt.budget
        fitted.plan = fitted.make_plan(budget or settings.ac_budget, batch_size)
        if attempt is not None:
            attempt.plan = fitted.plan
        settings.ac_policy = fitted.plan.best.policy
        _say(f"--ac_policy auto: {fitted.plan.why}\n{fitted.plan.table()}")
    if settings.find_max_batch_size:
        fitted.largest = _largest(fitted)


def train_within(trainer: Trainer, memory: Measuring, fitted: Fitted, directory: RunDirectory) -> dict[str, float]:
    """`trainer.train()`; under `auto`, when memory runs out, again under a leaner plan from the last checkpoint.

    Without a checkpoint it starts again only if not one step had been made. Raises what training raised where there is
    no leaner plan, or with `--ac_on_oom stop`.

    Returns:
        Training's metrics; none where the checkpoint that is resumed was the last one.
    """
    memory.add_to_report = fitted.describe
    resume = directory.checkpoint
    budget: int | None = None
    while True:
        try:
            return trainer.train(resume_from_checkpoint=resume).metrics
        except Finished:
            _say(f"{resume} is the last one of a finished run: nothing is left to train")
            load_finished(trainer)
            return {}
        except Exception as error:
            if not is_oom(error) or not _may_replan(trainer, fitted, directory):
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
            fitted.plan = fitted.make_plan(budget, fitted.args.per_device_train_batch_size)
        except UserError:
            raise failed from None
        fitted.settings.ac_policy = fitted.plan.best.policy
        memory.policy = Policy.parse(fitted.plan.best.policy)
        resume = directory.last_complete()
        place = resume or "the beginning"
        logger.warning("%s; planned again for %s: %s, from %s", reason, format_bytes(budget), memory.policy, place)


def run_within(train: Callable[[Attempt], None], settings: ACArguments, directory: RunDirectory) -> None:
    """`train(attempt)`; under `auto`, when memory runs out, again for a smaller budget from the last
    checkpoint, or from the beginning where there is none.

    Args:
        train: a whole run, from loading the model on; it leaves its plan in the attempt.

    Raises:
        WorkFailed: what training raised, where there is no leaner plan or with `--ac_on_oom stop`.
    """
    automatic = settings.ac_policy == "auto"
    attempt = Attempt(directory.checkpoint)
    failed: WorkFailed | None = None
    while True:
        try:
            return train(attempt)
        except WorkFailed as error:
            if not (automatic and _replans(settings) and error.__cause__ is not None and is_oom(error.__cause__)):
                raise
            failed = WorkFailed(*error.args)  # without the traceback, which holds the model
            reason = one_line(error.__cause__)
        except UserError:
            if failed is None:
                raise
            raise failed from None
        gc.collect()
        assert attempt.plan is not None, "auto has made one before it trained"
        attempt = Attempt(directory.last_complete(), leaner_budget(attempt.plan))
        settings.ac_policy, settings.find_max_batch_size = "auto", False
        place = attempt.checkpoint or "the beginning"
        logger.warning("%s; planning again for %s, from %s", reason, format_bytes(attempt.budget or 0), place)


def leaner_budget(failed: Plan) -> int:
    """What to plan for after the pick of `failed` ran out of memory: too little, as predicted, for that pick."""
    budget, needed = failed.room.budget, failed.room.needs(failed.best)
    while budget >= min(needed, failed.room.budget):
        budget = round(budget * _LEANER)
    return budget


def _refuse_partitioned(model: nn.Module, flag: str) -> None:
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise UserError(
            f"{flag}: ZeRO-3 has partitioned the model as it was loaded, so no whole step can be traced; find "
            "policy and batch with `ckpt-ft plan MODEL` and give them, or launch with zero3_init_flag: false"
        )


def _replans(settings: ACArguments) -> bool:
    alone = PartialState().num_processes == 1  # of several ranks one runs out first, and the others wait for it
    return alone and settings.ac_on_oom == "replan"


def _may_replan(trainer: Trainer, fitted: Fitted, directory: RunDirectory) -> bool:
    started = trainer.state.global_step > 0
    saved = directory.last_complete() is not None
    automatic = fitted.plan is not None and not fitted.settings.from_plan
    return automatic and _replans(fitted.settings) and (saved or not started)


def _largest(fitted: Fitted) -> MaxBatchSize:
    """The largest micro-batch, proved; `args` take what of it keeps the effective batch."""
    args, settings, workload = fitted.args, fitted.settings, fitted.workload
    applied = apply_policy(workload.model, settings.policy) if settings.policy is not None else None
    try:
        margin = _cpu_margin(workload)
        found = find_max_batch_size(workload, settings.ac_budget, margin=margin)
    finally:
        if applied is not None:
            applied.remove()
    batch, steps = getattr(args, fitted.batch_name), args.gradient_accumulation_steps
    batch, args.gradient_accumulation_steps, note = keep_effective(batch, steps, found.batch)
    setattr(args, fitted.batch_name, batch)
    _say(f"--find_max_batch_size: {found}\n{note}")
    return found


def _cpu_margin(workload: Workload) -> float | None:
    """The share of a CPU's budget to keep free; None on a GPU, where the planner has a margin of its own."""
    return _LOOP if workload.device == "cpu" else None


def _say(text: str) -> None:
    if PartialState().is_main_process:
        print(text, flush=True)
