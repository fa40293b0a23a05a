"""ACCallback: a policy and a memory report in any `transformers.Trainer`, TRL's trainers included.

trainer = Trainer(...)                                   # as it was
ACCallback("save:attention+matmul").attach(trainer)
trainer.train()
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.checkpointing.handle import AppliedPolicy
from ckpt_ft.errors import UserError
from ckpt_ft.memory.gpus import current_gpu
from ckpt_ft.memory.measure.profiler import MemoryProfiler
from ckpt_ft.memory.measure.report import MemoryReport
from ckpt_ft.policy import Policy

from .arguments import ACArguments
from .fit import Fitted, fit_to_memory
from .reporting import add_prediction, holder_lines, never_fatal, refuse_fsdp, require_parity, show_and_write
from .trainer_workload import has_own_loss, loss_of, measured_workload, models_beside, require_batches

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

    from ckpt_ft.memory.record.trace import StepTrace
    from ckpt_ft.spec.launch import Launch


class ACCallback(TrainerCallback):
    """Applies a policy when training begins, measures while it runs, takes the policy off and reports at the end.

    Args:
        policy: a policy, `ACArguments` for all settings, or what `fit_to_memory` chose for them; None only measures.
        verify: which steps are verified, as in `apply_policy`; of settings, `ac_verify` says it.

    Attributes:
        policy: the policy, None when the model is left as it is.
        fitted: what `auto` and the largest batch were settled to; None where nothing was open.
        applied: what stands on the model while it trains.
        report: the MemoryReport of all ranks, once training has ended; None with `ac_report="none"`.

    Raises:
        UserError: (when training begins) the policy matches nothing, or other checkpointing is on at the same time.
        WorkFailed: (when training begins) `ac_check` found a number that the policy changes.
    """

    def __init__(
        self,
        policy: str | dict[str, Any] | Policy | ACArguments | Fitted | None = None,
        *,
        verify: str | int | None = None,
    ) -> None:
        if not isinstance(policy, (ACArguments, Fitted)):
            name = None if policy is None else str(Policy.parse(policy))
            policy = ACArguments(ac_policy=name, ac_verify=str(verify or "first"))
        elif verify is not None:
            raise UserError("ACCallback(verify=...) is for a policy; settings have theirs in ac_verify")
        self.fitted = policy if isinstance(policy, Fitted) else None
        self.settings = policy.settings if isinstance(policy, Fitted) else policy
        self.policy = policy.policy
        self.applied: AppliedPolicy | None = None
        self.profiler: MemoryProfiler | None = None
        self.report: MemoryReport | None = None
        self._accelerator: Accelerator | None = None
        self._loss: Callable[..., torch.Tensor] | None = None  # of a trainer that computes more than its model's
        self._beside: tuple[torch.nn.Module, ...] = ()  # the trainer's other models
        self._scalars: dict[str, float] = {}

    def attach(self, trainer: Trainer) -> ACCallback:
        """Add this callback to `trainer`, before its trackers' callbacks, so that these get the `memory/...` scalars.

        Policy "auto" and `find_max_batch_size` are settled here, from the trainer's model, arguments, data and loss.
        When `trainer.train()` raises, the callback stops measuring and takes the policy off. Given as
        `Trainer(callbacks=[...])` it would come after the trackers', could not plan and would not be told of an
        error: a script that goes on after one then calls `close()`. Everything else works the same.

        Raises:
            UserError: (under "auto") nothing fits, no budget on a CPU, a streaming dataset, or batches that are made
                while training.
        """
        self._accelerator = trainer.accelerator
        self._beside = models_beside(trainer)
        if has_own_loss(trainer):
            self._loss = loss_of(trainer)
        auto = self.policy is not None and self.policy.auto
        plans = auto or (self.fitted is None and self.settings.find_max_batch_size)
        if plans or self.settings.ac_check:
            require_batches(trainer)
        if plans:
            self._plan(trainer)
        if self._loss is not None:
            trainer.compute_loss = self._noting(trainer.compute_loss)
        trainer.callback_handler.callbacks.insert(0, self)
        trainer.train = self._stopped_by_errors(trainer.train)
        return self

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.close()
        model = kwargs["model"]
        check_conflicts(args, self.policy)
        if self.policy is not None:
            if self.policy.auto:
                raise UserError(
                    "ACCallback('auto') plans from the trainer that it is attached to: make the trainer without it, "
                    "then ACCallback('auto').attach(trainer)"
                )
            if self.settings.ac_check:
                self._check(model, kwargs["train_dataloader"], args)
            self.applied = apply_policy(model, self.policy, verify=self.settings.ac_verify)
        if self.settings.measures:
            from accelerate import Accelerator

            self.profiler = MemoryProfiler(
                self._accelerator or Accelerator(),
                model,
                kwargs["optimizer"],
                total_steps=state.max_steps - state.global_step,
                snapshot=Path(args.output_dir) / "oom_snapshot.pickle",
                limit=self.settings.limit,
            )
            self.profiler.__enter__()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        if self.profiler is not None:
            self.profiler.begin_step()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if self.profiler is not None:
            self._scalars = self.profiler.step() or self._scalars

    def on_log(self, *args: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs is not None and "loss" in logs:
            logs.update(self._scalars)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.profiler is not None and self.settings.reports:
            with never_fatal("the memory report"):
                self._report(self.profiler, args, kwargs["model"], kwargs["optimizer"])
        self.close()

    def _report(self, profiler: MemoryProfiler, args: TrainingArguments, model: Any, optimizer: Any) -> None:
        self.report = profiler.report(
            policy=None if self.policy is None else str(self.policy),
            model=type(model).__name__,
            per_device_batch_size=args.per_device_train_batch_size,
            gradient_accumulation_steps=args.gradient_accumulation_steps,
        )
        self._predict(model, optimizer, args)
        if self.fitted is not None:
            self.fitted.describe(self.report)
        show_and_write(self.report, self.settings.reports, args.output_dir)

    def take(self, fitted: Fitted) -> None:
        """Train under `fitted` from the next `trainer.train()` on."""
        self.fitted, self.policy = fitted, fitted.policy

    def close(self) -> None:
        """Stop measuring and take the policy off; for a script that goes on after training has failed."""
        self._stop()
        self.profiler = None

    def peak_holders(self, n: int = 5) -> list[str]:
        """What held this process's highest peak so far, the largest first; empty before a step has been measured."""
        return holder_lines(self.profiler, n)

    def _stop(self, failed: bool = False) -> None:
        """Leave nothing on; `peak_holders` still answers."""
        if self.profiler is not None:
            self.profiler.close(failed)
        if self.applied is not None:
            self.applied.remove()
            self.applied = None

    def _stopped_by_errors(self, train: Callable[..., Any]) -> Callable[..., Any]:
        """`train`, after whose errors nothing is on: no event of a Trainer tells a callback of them."""

        @functools.wraps(train)
        def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                return train(*args, **kwargs)
            except BaseException:
                self._stop(failed=True)
                raise

        return watched

    def _noting(self, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
        """`compute_loss`, of whose batches in training the profiler is told."""

        @functools.wraps(compute_loss)
        def noting(model: Any, *args: Any, **kwargs: Any) -> Any:
            if model.training and self.profiler is not None:
                self.profiler.note_loss(args, kwargs)
            return compute_loss(model, *args, **kwargs)

        return noting

    def _plan(self, trainer: Trainer) -> None:
        """Choose what the flags leave open; random state, and with it the order of the data, stays as it is."""
        check_conflicts(trainer.args, self.policy)
        with torch.random.fork_rng(devices=[]):
            loader = trainer.get_train_dataloader()
        loss = self._loss or loss_of(trainer)
        rows = _rows_of(loader, "--find_max_batch_size" if self.settings.find_max_batch_size else "policy 'auto'")
        fitted = fit_to_memory(trainer.model, trainer.args, self.settings, rows, loader.collate_fn, loss)
        self.take(fitted)
        if fitted.largest is not None:
            _retake_batch(trainer, fitted.args)

    def _predict(self, model: Any, optimizer: Any, args: TrainingArguments) -> None:
        """Put the prediction of the largest measured step into the report."""
        report, profiler = self.report, self.profiler
        assert report is not None
        assert profiler is not None
        assert profiler.accelerator is not None

        def trace(launch: Launch | None) -> StepTrace:
            if not profiler.batch.elements:
                raise UserError("no step was measured")
            device = current_gpu(args.device.index) or "cpu"
            if self._loss is None:
                workload = measured_workload(model, optimizer, profiler.batch, args, device)
            else:
                workload = measured_workload(model, optimizer, profiler.loss_batch, args, device, self._loss)
            return replace(workload, launch=launch, auxiliary_models=self._beside).trace()

        add_prediction(report, profiler.accelerator, trace)

    def _check(self, model: Any, dataloader: Any, args: TrainingArguments) -> None:
        """Compare a step on the first batch with and without the policy; the data order stays as it is."""
        from accelerate.utils import send_to_device

        assert self.policy is not None
        if args.deepspeed_plugin is not None:
            raise UserError(
                "--ac_check: DeepSpeed's engine takes each gradient away as it comes, so there is nothing to compare; "
                f"drop --ac_check, and run `ckpt-ft check MODEL --policy {self.policy}` in one process"
            )
        rows = _rows_of(dataloader, "--ac_check")
        first = [rows[i] for i in range(min(len(rows), args.train_batch_size))]
        batch = send_to_device(dict(dataloader.collate_fn(first)), model.device)
        require_parity(model, batch, self.policy, loss=self._loss)


def _rows_of(loader: Any, flag: str) -> Any:
    """What `loader` loads, a map-style dataset; raises UserError where rows come one after another alone."""
    rows = loader.dataset
    if isinstance(rows, torch.utils.data.IterableDataset) or not hasattr(rows, "__len__"):
        raise UserError(
            f"{flag} looks at rows of the training data, and a {type(rows).__name__} has none to look at: load it "
            "without streaming, or find policy and batch with `ckpt-ft plan MODEL` and prove them with `ckpt-ft check`"
        )
    return rows


def _retake_batch(trainer: Trainer, args: TrainingArguments) -> None:
    """Make a trainer that stands take the micro-batch and the accumulation of `args`."""
    trainer.args = args
    trainer._train_batch_size = args.train_batch_size


def check_conflicts(args: TrainingArguments, policy: Policy | None) -> None:
    """Raises UserError when `policy` would meet other activation checkpointing: every block would be re-run twice."""
    if policy is None:
        return
    # Renamed in transformers 5.23, which keeps the old name alike until v6.
    name = "activation_checkpointing" if hasattr(args, "activation_checkpointing") else "gradient_checkpointing"
    kwargs = getattr(args, f"{name}_kwargs")
    if isinstance(kwargs, dict) and kwargs.get("use_reentrant"):
        raise UserError(
            "use_reentrant=True: reentrant checkpointing trains nothing behind inputs without gradients, as in LoRA; "
            f"policy '{policy}' is always non-reentrant: drop {name}_kwargs"
        )
    if getattr(args, name):
        raise UserError(
            f"policy '{policy}' and {name} are both on: blocks would be re-run twice; "
            f"pass {name}=False (TRL's configs turn it on by default), or drop the policy"
        )
    if _fsdp_checkpoints(args):
        refuse_fsdp(policy)


def _fsdp_checkpoints(args: TrainingArguments) -> bool:
    """Asked for by `--fsdp_config`, or by `accelerate launch`, which passes its configuration in the environment."""
    given = (
        args.fsdp_config.get("activation_checkpointing") if args.fsdp and isinstance(args.fsdp_config, dict) else None
    )
    launched = (
        os.environ.get("FSDP_ACTIVATION_CHECKPOINTING") if os.environ.get("ACCELERATE_USE_FSDP") == "true" else None
    )
    return str(given or launched).lower() in ("true", "1")
