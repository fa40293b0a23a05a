"""ACCallback: a policy and a memory report in any `transformers.Trainer`, TRL's trainers included.

trainer = Trainer(...)                                   # unchanged
ACCallback("save:attention+matmul").attach(trainer)
trainer.train()
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from operator import attrgetter
from typing import Any

import torch
from accelerate.utils import send_to_device
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.compat.libraries import TRAIN_BATCH_SIZE
from ckpt_ft.errors import UserError, never_fatal
from ckpt_ft.policy import Policy
from ckpt_ft.workloads.from_trainer import (
    auxiliary_models,
    check_labels,
    loss_of,
    measured_step,
    require_batches,
    rows_of,
)
from ckpt_ft.workloads.optimizers import OffloadedAdamW
from ckpt_ft.workloads.phases import PhaseRecorder
from ckpt_ft.workloads.workload import Workload

from .arguments import ACArguments
from .fit import fit, launch_of, live_workload
from .flags import changed
from .session import Session

logger = logging.getLogger(__name__)


class ACCallback(TrainerCallback):
    """Drives a `Session` from a Trainer's events: applies the policy when training begins, measures, reports.

    Args:
        policy: a policy, or `ACArguments` for all settings; None only measures.
        budget: memory for policy "auto", with its unit, such as "24GiB"; by default what is free on the card.
        verify: which steps are verified, as in `apply_policy`.
            `ACArguments` have `ac_budget` and `ac_verify` in place of these two.

    Attributes:
        policy: the policy; None if the model is left unchanged.
        fitted: what `auto` and `find_max_batch_size` chose; None if nothing was left open.
        applied: the policy while it is on the model.
        report: the MemoryReport of all ranks, once training has ended; None with `ac_report="none"`.

    Raises:
        UserError: (when training begins) the policy matches nothing, or FSDP's own checkpointing is on.
        WorkFailed: (when training begins) `ac_check` found a number that the policy changes.
    """

    def __init__(
        self,
        policy: str | dict[str, Any] | Policy | ACArguments | None = None,
        *,
        budget: str | None = None,
        verify: str | int | None = None,
    ) -> None:
        if not isinstance(policy, ACArguments):
            name = None if policy is None else str(Policy.parse(policy))
            policy = ACArguments(ac_policy=name, ac_budget=budget, ac_verify=str(verify or "first"))
        elif budget is not None or verify is not None:
            raise UserError(
                "ACCallback(budget=..., verify=...) go with a policy; ACArguments have ac_budget and ac_verify instead"
            )
        self.session = Session(policy)
        self._loss: Callable[..., torch.Tensor] | None = None  # the trainer's
        self._scalars: dict[str, float] = {}
        self._phases: PhaseRecorder | None = None

    policy = property(attrgetter("session.policy"))
    fitted = property(attrgetter("session.fitted"))
    applied = property(attrgetter("session.applied"))
    profiler = property(attrgetter("session.profiler"))
    report = property(attrgetter("session.report"))

    def attach(self, trainer: Trainer) -> ACCallback:
        """Adds this callback to `trainer`, before its trackers' callbacks, so that they get the `memory/...` scalars.

        Resolves policy "auto", a plan file and `find_max_batch_size` for the trainer's model, arguments, data and
        loss. The library's own activation checkpointing, which TRL switches on by default, is switched off with a
        note. When `trainer.train()` raises, measuring stops and the policy is removed. A callback given as
        `Trainer(callbacks=[...])` runs after the trackers, cannot plan, and does not see errors: a script that
        continues after an error must call `close()`.

        Raises:
            UserError: label smoothing would not shift labels; (under "auto")
                nothing fits, there is no budget on a CPU, rows are streamed, or batches are made while training.
        """
        session = self.session
        check_labels(trainer)
        if offloaded := getattr(trainer.args, "offload_optimizer", None):
            options = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)[1]
            trainer.optimizer_cls_and_kwargs = (
                OffloadedAdamW,
                {**options, "offload_gradients": offloaded == "gradients"},
            )
        if getattr(trainer.args, "swaps", False):
            assert session.policy is not None
            apply_policy(trainer.model, session.policy, verify=session.settings.ac_verify)
            trainer.model.to(trainer.args.device)
        session.accelerator = trainer.accelerator
        session.auxiliary_models = auxiliary_models(trainer)
        self._loss = loss_of(trainer)
        if session.policy is not None:
            trainer.args = self._without_own_checkpointing(trainer.args)
        self._plan(trainer)
        if session.settings.ac_check:
            require_batches(trainer, "--ac_check")
        self._phases = PhaseRecorder(trainer, self._phase)
        trainer.compute_loss = self._recording_batches(trainer.compute_loss)
        trainer.callback_handler.callbacks.insert(0, self)
        trainer.train = self._cleaning_up_after_errors(trainer.train)
        return self

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.close()
        session, model = self.session, kwargs["model"]
        if session.policy is not None:
            if session.policy.auto:
                raise UserError(
                    "ACCallback('auto') plans from the trainer that it is attached to: make the trainer without it, "
                    "then ACCallback('auto').attach(trainer)"
                )
            if self._without_own_checkpointing(args) is not args:  # given as `callbacks`, so already on
                getattr(model, f"{_own_name(args)}_disable")()
        if session.settings.ac_check:
            session.model = model.train()  # as Trainer does before each step, but not yet
            session.check(_first_batch(kwargs["train_dataloader"], args, session), self._loss)
        session.apply(model)
        session.start(model, kwargs["optimizer"], state.max_steps - state.global_step)

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.session.begin_step()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._scalars = self.session.step() or self._scalars

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        if self.session.profiler is not None:
            self.session.profiler.note_between("saving")

    def on_log(self, *args: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs is not None and "loss" in logs:
            logs.update(self._scalars)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        session, profiler = self.session, self.session.profiler
        if profiler is not None:
            with never_fatal("the memory report"):
                session.write_report(
                    args.output_dir,
                    workload=lambda: Workload(
                        **measured_step(kwargs["model"], profiler, args, self._loss),
                        phases={} if self._phases is None else self._phases.phases(),
                    ),
                    model=type(kwargs["model"]).__name__,
                    per_device_batch_size=args.per_device_train_batch_size,
                    gradient_accumulation_steps=args.gradient_accumulation_steps,
                )
        self.close()

    def close(self) -> None:
        """Stops measuring and removes the policy; for a script that continues after training has failed."""
        self.session.close()
        self.session.profiler = None

    def _phase(self, name: str, between: bool) -> AbstractContextManager[Any]:
        profiler = self.session.profiler
        return nullcontext() if profiler is None else profiler.phase(name, between)

    def _plan(self, trainer: Trainer) -> None:
        """Chooses the settings that the flags leave open."""
        session, settings = self.session, self.session.settings
        if session.fitted is None and settings.plan is not None:
            settings.plan.check_model(trainer.model, f"--ac_policy {settings.ac_policy}")
        automatic = session.policy is not None and session.policy.auto
        if session.fitted is None and (automatic or settings.find_max_batch_size):
            flag = "--find_max_batch_size" if settings.find_max_batch_size else "policy 'auto'"
            args, launch = trainer.args, partial(launch_of, trainer.accelerator, prepared=False, model=trainer.model)
            session.use(fit(live_workload(trainer, flag), args, settings, args.device, launch))
            assert session.fitted is not None
            trainer.args = session.fitted.args
            setattr(trainer, TRAIN_BATCH_SIZE, trainer.args.train_batch_size)
        _refuse_no_batch(trainer)

    def _without_own_checkpointing(self, args: Any) -> Any:
        """Returns `args` with the library's activation checkpointing switched off; the same object if it was off."""
        name = _own_name(args)
        if not getattr(args, name):
            return args
        logger.warning("policy '%s' replaces %s, which is switched off", self.session.policy, name)
        names = {old for old in (name, "gradient_checkpointing") if hasattr(args, old)}
        return changed(args, **dict.fromkeys(names, False))

    def _cleaning_up_after_errors(self, train: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps `train` to clean up when it raises, because a Trainer does not report errors to its callbacks."""

        @wraps(train)
        def cleaned_up(*args: Any, **kwargs: Any) -> Any:
            try:
                return train(*args, **kwargs)
            except BaseException:
                self.session.stop(failed=True)
                self.session.close()
                raise

        return cleaned_up

    def _recording_batches(self, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps `compute_loss` to record its training batches in the profiler."""

        @wraps(compute_loss)
        def recording(model: Any, *args: Any, **kwargs: Any) -> Any:
            if model.training and self.session.profiler is not None:
                plain = (dict(arg) if isinstance(arg, Mapping) else arg for arg in args)  # pytrees know dicts alone
                self.session.profiler.note_loss(tuple(plain), kwargs)
            return compute_loss(model, *args, **kwargs)

        return recording


def _own_name(args: TrainingArguments) -> str:
    """The name of the library's own checkpointing: transformers 5.23 renamed it and keeps the old name until v6."""
    return "activation_checkpointing" if hasattr(args, "activation_checkpointing") else "gradient_checkpointing"


def _refuse_no_batch(trainer: Trainer) -> None:
    """Raises UserError if there is no full batch: a Trainer would end at once and save an untrained model."""
    args: Any = trainer.args
    rows, batch = trainer.train_dataset, args.train_batch_size * args.world_size
    if args.dataloader_drop_last and hasattr(rows, "__len__") and len(rows) < batch:
        raise UserError(
            f"--dataloader_drop_last: the {len(rows)} rows do not fill a batch of {batch}, so nothing would be "
            "trained; drop the flag, or use a smaller batch"
        )


def _first_batch(loader: Any, args: TrainingArguments, session: Session) -> dict[str, Any]:
    """Returns the first rows as a batch; the order of the data does not change."""
    if args.deepspeed_plugin is not None:
        raise UserError(
            "--ac_check: DeepSpeed's engine frees each gradient once it is reduced, so there is nothing to compare; "
            f"drop --ac_check, and run `ckpt-ft check MODEL --policy {session.policy}` in one process"
        )
    rows = rows_of(loader, "--ac_check")
    first = [rows[i] for i in range(min(len(rows), args.train_batch_size))]
    return dict(send_to_device(dict(loader.collate_fn(first)), args.device))
