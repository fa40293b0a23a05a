"""Session: one training run under a policy, from applying it to the memory report.

    session = Session(ac_args, accelerator)
    session.apply(model)                                     # before accelerator.prepare
    with advise_on_oom(session), session.measure(model, optimizer, total_steps):
        for batch in loader:
            ...
            session.step()
    session.write_report(output_dir, workload=..., batch_size=...)

`ACCallback` drives a session from a Trainer's events; the diffusion recipes' loop calls it directly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from ckpt_ft.checkpointing.applied_policy import AppliedPolicy, suspended
from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.checkpointing.parity import check_parity
from ckpt_ft.errors import UserError, WorkFailed, is_oom, one_line, why_untraceable
from ckpt_ft.export.holders import holder_line
from ckpt_ft.memory.measure.profiler import MemoryProfiler
from ckpt_ft.memory.measure.report import MemoryReport, write_report
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.policy import Policy
from ckpt_ft.workloads.from_trainer import compiled_by, is_sharded
from ckpt_ft.workloads.workload import Workload

from .arguments import ACArguments
from .fit import Fitted, launch_of

logger = logging.getLogger(__name__)
# Each policy drops something that the one before it keeps.
FALLBACK_POLICIES = ("none", "pointwise", "save:attention", "full", "full,head", "full,offload,head")


class Session:
    """Applies, checks, measures, predicts and reports a training run, as the `--ac_*` flags say.

    Args:
        settings: the flags, or the planner's result for them.
        accelerator: the run's Accelerator; None creates one if needed.

    Attributes:
        fitted: what the planner chose; None if nothing was left open.
        policy: the policy of the run; None leaves the model unchanged.
        applied: the policy while it is on the model; None before `apply` and after `close`.
        auxiliary_models: models on the device that are not trained, such as a reference model.
        profiler: None if neither a report nor a budget needs it.
        report: the memory report, once it is written.
    """

    def __init__(self, settings: ACArguments | Fitted, accelerator: Accelerator | None = None) -> None:
        self.fitted = settings if isinstance(settings, Fitted) else None
        self.settings = settings.settings if isinstance(settings, Fitted) else settings
        self.policy = settings.policy
        self.model: nn.Module | None = None
        self.applied: AppliedPolicy | None = None
        self.auxiliary_models = () if self.fitted is None else self.fitted.workload.auxiliary_models
        self.profiler: MemoryProfiler | None = None
        self.report: MemoryReport | None = None
        if accelerator is not None:
            self.accelerator = accelerator

    @cached_property
    def accelerator(self) -> Accelerator:
        return Accelerator()

    def use(self, fitted: Fitted) -> None:
        """Trains under `fitted` from the next `apply` on."""
        self.fitted, self.policy, self.auxiliary_models = fitted, fitted.policy, fitted.workload.auxiliary_models

    def apply(self, model: nn.Module) -> None:
        """Applies the policy to `model`.

        Raises:
            UserError: the policy matches nothing in the model, or FSDP's own checkpointing is on.
        """
        self.model = model
        if self.policy is not None:
            state = self.accelerator.state
            fsdp = getattr(state, "fsdp_plugin", None)
            if getattr(fsdp, "activation_checkpointing", False):
                raise UserError(
                    f"policy '{self.policy}' and FSDP's own activation checkpointing are both on: blocks would be "
                    "re-run twice; set fsdp_activation_checkpointing to false in the launch configuration, or drop "
                    "the policy"
                )
            if self.policy.swap and (state.deepspeed_plugin is not None or fsdp):
                raise UserError(
                    f"policy '{self.policy}': FSDP and DeepSpeed place the weights themselves; drop swap, or launch "
                    "with accelerate_configs/single_gpu.yaml or multi_gpu.yaml"
                )
            self.applied = apply_policy(model, self.policy, verify=self.settings.ac_verify)
            for note in self.applied.notes:
                logger.warning("%s", note)

    def check(self, inputs: Mapping[str, Any], loss: Callable[..., torch.Tensor] | None = None) -> None:
        """With `--ac_check`, compares a step on `inputs` with and without the policy.

        Args:
            loss: (model, inputs) -> scalar; the model's own loss by default.

        Raises:
            WorkFailed: a number differs.
        """
        if not self.settings.ac_check or self.policy is None or self.model is None:
            return
        parity = check_parity(self.model, dict(inputs), self.policy, loss=loss)
        self.accelerator.print(parity)
        if not parity.ok:
            raise WorkFailed(f"--ac_check: policy {self.policy} changes the numbers of a step; nothing was trained")

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, total_steps: int) -> None:
        """Starts measuring, if a report or a budget needs it."""
        if not self.settings.measures or total_steps < 1:
            return
        self.profiler = MemoryProfiler(
            self.accelerator,
            model,
            optimizer,
            total_steps=total_steps,
            limit=self.settings.limit,
            auxiliary_models=self.auxiliary_models,
        )
        self.profiler.__enter__()

    def stop(self, failed: bool = False) -> None:
        """Stops measuring, after a step that raised if `failed`; `peak_holders` and `write_report` still work."""
        if self.profiler is not None:
            self.profiler.close(failed)

    @contextmanager
    def measure(self, model: nn.Module, optimizer: torch.optim.Optimizer, total_steps: int) -> Iterator[None]:
        self.start(model, optimizer, total_steps)
        try:
            yield
        except BaseException:
            self.stop(failed=True)
            raise
        self.stop()

    def begin_step(self) -> None:
        """Begins the next step; work since the last one (a checkpoint, validation) is not measured."""
        if self.profiler is not None:
            self.profiler.begin_step()

    def step(self) -> dict[str, float]:
        """Ends an optimizer step; returns its figures for a log, or {} if it was not measured."""
        return {} if self.profiler is None else self.profiler.step()

    def write_report(
        self, output_dir: str, workload: Callable[[], Workload] | None = None, **facts: Any
    ) -> MemoryReport | None:
        """Prints the report and writes its files to `output_dir`; every process must call it.

        Args:
            workload: returns the measured step for the prediction; a failure to trace it becomes a note.
            facts: added to the report's provenance.

        Returns:
            The report; None if nothing was measured or no report is requested.
        """
        if self.profiler is None or not self.profiler.steps or not self.settings.reports:
            return None
        predicted, phases, notes = (None, {}, []) if workload is None else self._predict(workload)
        self.report = self.profiler.report(
            predicted,
            phases=phases,
            notes=[*notes, *self._notes()],
            max_batch=None if self.fitted is None else self.fitted.max_batch,
            policy=None if self.policy is None else str(self.policy),
            **{"model": getattr(getattr(self.model, "config", None), "name_or_path", ""), **facts},
        )
        write_report(self.report, self.settings.reports, output_dir)
        return self.report

    def peak_holders(self, n: int = 5) -> list[str]:
        """The largest holders of this process's highest peak so far, in descending order; empty if unknown."""
        return [] if self.profiler is None else [holder_line(holder) for holder in self.profiler.holders(n)]

    def close(self) -> None:
        """Stops measuring and removes this session's policy; a policy applied by someone else since then stays.

        A policy with `swap` stays: the whole model may not fit on the device.
        """
        self.stop()
        if self.applied is not None and not self.applied.policy.swap:
            self.applied.remove()
            self.applied = None

    def _predict(self, workload: Callable[[], Workload]) -> tuple[StepTrace | None, dict[str, StepTrace], list[str]]:
        """Returns this process's traced step, its traced phases, and notes; if it fails, a note has the reason."""
        predicted, notes, what = None, [], ""
        phases: dict[str, StepTrace] = {}
        try:
            on_cpu = self.accelerator.device.type == "cpu"  # where measured steps ran eagerly
            compiled = "" if on_cpu else compiled_by(self.accelerator)
            step = replace(workload(), launch=launch_of(self.accelerator, model=self.model), compile=compiled)
            with ExitStack() as stack, torch.compiler.set_stance("force_eager") if on_cpu else nullcontext():
                if self.policy is not None and is_sharded(self.model):
                    apply_policy(step.model, self.policy, verify="never")
                elif self.policy is not None and self.applied is None:  # it was removed when training ended
                    assert self.model is not None
                    stack.enter_context(suspended(self.model))
                    apply_policy(self.model, self.policy, verify="never")
                predicted = step.trace()
                notes = [f"Prediction: {note}." for note in predicted.notes]
                for name, phase in step.phases.items():
                    what = f" of the {name}"
                    phases |= replace(step, phases={name: phase}).trace_phases()
        except UserError as error:
            notes.append(f"no prediction{what}: {one_line(error)}")
        except Exception as error:  # a prediction must not cost the run that it describes
            notes.append(f"no prediction{what}: {why_untraceable(error)}")
        return predicted, phases, notes

    def _notes(self) -> list[str]:
        if self.accelerator.state.dynamo_plugin.backend == "NO" or self.accelerator.device.type != "cpu":
            return []
        return ["The model is compiled, but measured steps ran eagerly: on a CPU only eager steps can be measured."]


def cheaper_policies(policy: Policy | None) -> list[str]:
    """The policies of `FALLBACK_POLICIES` that keep less than `policy`, mildest first.

    A policy that is not in the list ranks before the first one that keeps no more than it does: a partial scope ranks
    before `full`. What has no `head` or `offload` is left out if `policy` has it.
    """
    text = "none" if policy is None else str(policy)
    own = {"head", "offload"} & {*text.split(",")}
    first_after = "full" if policy and policy.checkpoints else "pointwise"
    rank = FALLBACK_POLICIES.index(text) + 1 if text in FALLBACK_POLICIES else FALLBACK_POLICIES.index(first_after)
    return [step for step in FALLBACK_POLICIES[rank:] if own <= {*step.split(",")}]


@contextmanager
def advise_on_oom(session: Session, batch_name: str = "per_device_train_batch_size") -> Iterator[None]:
    """Turns an out-of-memory error into a `WorkFailed` that lists the largest holders and cheaper policies.

    Closes `session` at the end.
    """
    try:
        yield
    except Exception as error:
        if not is_oom(error):
            raise
        holders = session.peak_holders()
        lines = [
            f"out of memory: {one_line(error)}",
            *(["What held the peak:", *(f"  {holder}" for holder in holders)] if holders else []),
            "What needs less memory, mildest first:",
            *(["  a smaller --ac_budget, for which auto plans again"] if session.settings.ac_policy == "auto" else []),
            *(f"  --ac_policy {policy}" for policy in cheaper_policies(session.policy)),
            f"  a smaller --{batch_name} with more --gradient_accumulation_steps",
            "Checkpoints written so far are complete: --resume_from_checkpoint latest continues from the last one.",
        ]
        raise WorkFailed("\n".join(lines)) from error
    finally:
        session.close()
