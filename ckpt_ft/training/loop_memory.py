"""LoopMemory: what ACCallback is to a Trainer, for a loop written out: the policy, the measuring and the report.

memory = LoopMemory(ac_args, accelerator)
memory.apply(model)                                    # before accelerator.prepare
with advise_on_oom(memory), memory.measure(model, optimizer, total_steps, output_dir):
    for batch in loader:
        ...
        memory.step()
memory.report(output_dir, step=..., batch_size=...)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.checkpointing.handle import AppliedPolicy
from ckpt_ft.checkpointing.standing import suspended
from ckpt_ft.memory.measure.profiler import MemoryProfiler

from .arguments import ACArguments
from .fit import Fitted
from .reporting import add_prediction, holder_lines, refuse_fsdp, require_parity, show_and_write

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ckpt_ft.memory.measure.report import MemoryReport
    from ckpt_ft.memory.record.trace import StepTrace
    from ckpt_ft.spec.launch import Launch
    from ckpt_ft.workloads.workload import Workload


class LoopMemory:
    """The `--ac_*` flags at work in an Accelerate loop.

    Args:
        settings: the flags, or what was fitted for them.

    Attributes:
        policy: the policy, None when the model is left as it is.
        model: what the policy stands on, None before `apply`.
        applied: the policy as it stands there; None when the model is left as it is, and after `close`.
        profiler: measures the loop; None where nothing asks for it.
    """

    def __init__(self, settings: ACArguments | Fitted, accelerator: Accelerator) -> None:
        self.fitted = settings if isinstance(settings, Fitted) else None
        self.settings = settings.settings if isinstance(settings, Fitted) else settings
        self.policy, self.accelerator = settings.policy, accelerator
        self.model: nn.Module | None = None
        self.applied: AppliedPolicy | None = None
        self.profiler: MemoryProfiler | None = None

    def apply(self, model: nn.Module) -> None:
        """Put the policy on `model`.

        Raises:
            UserError: it matches nothing there, or FSDP checkpoints by itself.
        """
        self.model = model
        if self.policy is not None:
            if getattr(getattr(self.accelerator.state, "fsdp_plugin", None), "activation_checkpointing", False):
                refuse_fsdp(self.policy)
            self.applied = apply_policy(model, self.policy, verify=self.settings.ac_verify)

    def check(self, inputs: Mapping[str, Any]) -> None:
        """With `ac_check`, compare a step of the model on `inputs` with and without the policy.

        Raises:
            WorkFailed: a number differs.
        """
        if not self.settings.ac_check or self.policy is None or self.model is None:
            return
        require_parity(self.model, inputs, self.policy, self.accelerator.print)

    @contextmanager
    def measure(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, total_steps: int, output_dir: str
    ) -> Iterator[None]:
        """Measure the steps made inside, where a report or a budget asks for it."""
        if not self.settings.measures or total_steps < 1:
            yield
            return
        self.profiler = MemoryProfiler(
            self.accelerator,
            model,
            optimizer,
            total_steps=total_steps,
            snapshot=Path(output_dir) / "oom_snapshot.pickle",
            limit=self.settings.limit,
            beside=() if self.fitted is None else self.fitted.workload.auxiliary_models,
        )
        with self.profiler:
            yield

    def step(self) -> None:
        """End an optimizer step."""
        if self.profiler is not None:
            self.profiler.step()

    def begin_step(self) -> None:
        """Begin the next step here: what went before it (a checkpoint, validation) is not part of one."""
        if self.profiler is not None:
            self.profiler.begin_step()

    def report(self, output_dir: str, *, workload: Workload | None = None, **facts: Any) -> MemoryReport | None:
        """Print the report and write its kinds to `output_dir`; every process must call it.

        Args:
            workload: the step as it was measured, to predict beside it; one that cannot be traced is a note.
            facts: kept in the provenance.
        """
        if self.profiler is None or not self.profiler.steps or not self.settings.reports:
            return None
        policy = None if self.policy is None else str(self.policy)
        report = self.profiler.report(policy=policy, **facts)
        if workload is not None:
            self._predict(report, workload)
        if self.fitted is not None:
            self.fitted.describe(report)
        show_and_write(report, self.settings.reports, output_dir)
        return report

    def _predict(self, report: MemoryReport, workload: Workload) -> None:
        def trace(launch: Launch | None) -> StepTrace:
            assert self.model is not None
            with ExitStack() as stack:
                if self.policy is not None and self.applied is None:  # taken off when training ended
                    stack.enter_context(suspended(self.model))
                    apply_policy(self.model, self.policy, verify="never")
                return replace(workload, launch=launch).trace()

        add_prediction(report, self.accelerator, trace)

    def peak_holders(self, n: int = 5) -> list[str]:
        """What held this process's highest peak, the largest first; empty where that is not known."""
        return holder_lines(self.profiler, n)

    def close(self) -> None:
        """Take the policy off the model; one that someone else has put on stays."""
        if self.applied is not None:
            self.applied.remove()
            self.applied = None
