"""What a recipe asks the planner: which policy, which micro-batch.

    fitted = fit_to_memory(model, training_args, ac_args, train_dataset, collator)     # before the Trainer is made
    trainer = Trainer(model, fitted.args, ...)
    memory = ACCallback(fitted).attach(trainer)
    with advise_on_oom(memory):
        result = train_within(trainer, memory, directory)     # of replan.py: what to do when memory still runs out

The step that is traced and tried is the Trainer's, on a batch with the longest row there is (trainer_workload.py).
diffusion/loop_workload.py does the same for the loop of the diffusion recipes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import PartialState
from torch import nn
from transformers import TrainingArguments

from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.errors import UserError
from ckpt_ft.memory.measure.records import MaxBatch, PolicyRow
from ckpt_ft.memory.measure.report import MemoryReport
from ckpt_ft.planning.batch_size import MaxBatchSize, find_max_batch_size, keep_effective, predict_max_batch_size
from ckpt_ft.planning.plan import plan
from ckpt_ft.planning.results import Plan
from ckpt_ft.policy import Policy
from ckpt_ft.spec.launch import Launch
from ckpt_ft.workloads.batches import own_loss
from ckpt_ft.workloads.workload import Loss, Workload

from .arguments import ACArguments
from .flags import changed
from .launched import found_by_main, launch_ahead
from .trainer_workload import Collate, trainer_workload

logger = logging.getLogger(__name__)
_MOST = 1024  # samples of a micro-batch
_LOOP = 0.05  # of a CPU's budget, kept free for what the loop holds beside the step (batches fetched ahead, logging)


@dataclass(frozen=True)
class Fitted:
    """What training runs under, with all that the flags leave open.

    Attributes:
        workload: what is trained, with the accumulation of `args`; it holds the model.
        args: the Trainer's or the loop's, with the micro-batch and the accumulation that were found.
        settings: the flags as they were given.
        plan: under `--ac_policy auto` or a plan's file.
        largest: under `--find_max_batch_size`.
    """

    workload: Workload
    args: Any  # TrainingArguments or LoopArguments
    settings: ACArguments
    plan: Plan | None = None
    largest: MaxBatchSize | None = None

    @property
    def policy(self) -> Policy | None:
        """What the plan picked, else what was asked for; None leaves the model as it is."""
        return self.settings.policy if self.plan is None else Policy.parse(self.plan.best.policy)

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
    """Choose what `auto`, a plan's file and `--find_max_batch_size` leave open; what is given stays as it is.

    Args:
        model: on any device; to prove a batch size it is moved to that of training.
        rows: the training data, a map-style dataset of dicts; of those with "input_ids" the longest sets the peak.
        compute_loss: the trainer's, where it has one of its own.

    Of several processes the main one plans, for the launch that they are.

    Raises:
        UserError: nothing fits, a plan for another model, no budget on a CPU, what needs a single process, or too few
            rows for a batch.
    """
    workload = trainer_workload(model, args, rows, collate, compute_loss)
    fitted = fit(workload, args, settings, args.device, lambda: launch_ahead(args))
    _refuse_no_batch(fitted.args, rows)
    return fitted


def fit(
    workload: Workload,
    args: Any,
    settings: ACArguments,
    device: torch.device,
    launch: Callable[[], Launch | None],
    batch_name: str = "per_device_train_batch_size",
    budget: int | None = None,
) -> Fitted:
    """`fit_to_memory` for any workload.

    Args:
        args: TrainingArguments or LoopArguments.
        device: where the model is trained.
        launch: tells how it will be shared; where that is a UserError, the step is taken for one process's.
        batch_name: what `args` call the micro-batch.
        budget: bytes to plan for, where memory has run out before; None for those of `--ac_budget`.
    """
    _refuse_replanning_together(settings)
    fitted, model = Fitted(workload, args, settings), workload.model
    if settings.from_plan:
        made = settings.plan
        made.check_model(model, f"--ac_policy {settings.ac_policy}")
        fitted = replace(fitted, plan=made)
    automatic = settings.ac_policy == "auto"
    if not automatic and not settings.find_max_batch_size:
        return fitted
    _refuse_partitioned(model, "--ac_policy auto" if automatic else "--find_max_batch_size")
    shared = replace(workload, launch=_modelled(launch))
    fitted = replace(fitted, workload=shared)
    if automatic:
        batch_size = None if settings.find_max_batch_size else getattr(args, batch_name)
        made = found_by_main(lambda: make_plan(shared, budget or settings.ac_budget, batch_size))
        fitted = replace(fitted, plan=made)
        say(f"--ac_policy auto: {made.why}\n{made.table()}")
    return _with_largest_batch(fitted, device, batch_name) if settings.find_max_batch_size else fitted


def _refuse_no_batch(args: TrainingArguments, rows: Any) -> None:
    """A Trainer without a batch ends at once, and saves what has not been trained."""
    batch = args.train_batch_size * args.world_size
    if args.dataloader_drop_last and len(rows) < batch:
        raise UserError(
            f"--dataloader_drop_last: the {len(rows)} rows make no whole batch of {batch}, and nothing would be "
            "trained; drop it, or make the batch smaller"
        )


def make_plan(workload: Workload, budget: str | int | None, batch_size: int | None) -> Plan:
    """A plan for `workload` on the device at hand."""
    return plan(workload, budget, margin=_cpu_margin(workload), batch_size=batch_size, report=logger.info)


def say(text: str) -> None:
    """Print `text`, once of all ranks."""
    if PartialState().is_main_process:
        print(text, flush=True)


def _modelled(launch: Callable[[], Launch | None]) -> Launch | None:
    try:
        return launch()
    except UserError as error:
        logger.warning("%s: what follows is found out as for one process", error)
        return None


def _with_largest_batch(fitted: Fitted, device: torch.device, batch_name: str) -> Fitted:
    """With the largest micro-batch, and what of it keeps the effective batch.

    Gradients live from one micro-batch to the next, so what fits as a whole step need not fit as one of several: the
    step is found again with as many micro-batches as it is to have.
    """
    args, most = fitted.args, _MOST
    while True:
        found = _largest(fitted, device, most)
        batch, steps, note = keep_effective(getattr(args, batch_name), args.gradient_accumulation_steps, found.batch)
        more = steps > fitted.workload.accumulation
        fitted = replace(fitted, workload=replace(fitted.workload, accumulation=steps))
        if not more:
            break
        most = found.batch
    say(f"--find_max_batch_size: {found}\n{note}")
    args = changed(args, **{batch_name: batch}, gradient_accumulation_steps=steps)
    return replace(fitted, args=args, largest=found)


def _largest(fitted: Fitted, device: torch.device, most: int) -> MaxBatchSize:
    """Proved by real steps, but where the model is to be sharded: a step of the whole model says nothing then."""
    workload, budget = fitted.workload, fitted.settings.ac_budget
    more: dict[str, Any] = {"margin": _cpu_margin(workload), "max_batch_size": most}
    if workload.launch is not None and workload.launch.shards:
        policy = str(fitted.policy or "none")
        return found_by_main(lambda: predict_max_batch_size(workload, policy, budget, **more))
    workload.model.to(device)
    applied = apply_policy(workload.model, fitted.policy) if fitted.policy is not None else None
    try:
        return find_max_batch_size(workload, budget, **more)
    finally:
        if applied is not None:
            applied.remove()


def _refuse_replanning_together(settings: ACArguments) -> None:
    processes = PartialState().num_processes
    if settings.ac_on_oom == "replan" and processes > 1:
        raise UserError(
            f"--ac_on_oom replan on {processes} processes: one runs out of memory while the others wait for it, so "
            "all must be started anew; leave it out, and resume with a smaller --ac_budget"
        )


def _refuse_partitioned(model: nn.Module, flag: str) -> None:
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise UserError(
            f"{flag}: ZeRO-3 has partitioned the model as it was loaded, so no whole step can be traced; find "
            "policy and batch with `ckpt-ft plan MODEL` and give them, or launch with zero3_init_flag: false"
        )


def _cpu_margin(workload: Workload) -> float | None:
    """The share of a CPU's budget to keep free; None on a GPU, where the planner has a margin of its own."""
    return _LOOP if workload.device == "cpu" else None
