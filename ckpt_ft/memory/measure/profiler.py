"""MemoryProfiler: measures a training loop, whichever it is, on every rank.

    with MemoryProfiler(accelerator, model, optimizer) as profiler:
        for batch in loader:
            ...                      # forward, backward, optimizer.step(), any number of micro-batches
            profiler.step()
    report = profiler.report(policy="full")
    report.print()

On CUDA every step is measured, from the allocator's counters: no synchronisation. On CPU storages are followed
(tracker.py), which slows a step down several times; so the first two steps are measured, every `sample`-th, and the
last if `total_steps` says which that is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ckpt_ft.errors import UserError
from ckpt_ft.export.holders import Holder
from ckpt_ft.memory.cost.op_work import tensors
from ckpt_ft.memory.record.events import PHASES
from ckpt_ft.memory.record.trace import StepTrace

from .largest_batch import LargestBatch
from .meters import CpuMeter, CudaMeter, Meter, OomSnapshot, Peaks
from .records import FIGURES, History, RankMemory, merge_peaks
from .report import MemoryReport, provenance

if TYPE_CHECKING:
    from accelerate import Accelerator


class MemoryProfiler:
    """Measures the steps of a loop; a context manager.

    Args:
        accelerator: its device is measured, its trackers are logged to, its processes' figures gathered.
        model: whose forward and backward are the phases, whose modules are named. Without one, CUDA's peaks of forward
            and backward are not told apart.
        optimizer: its state counts as "optimizer" from the start.
        sample: on CPU, measure every so many steps.
        total_steps: how many steps there will be, where that is known.
        snapshot: on CUDA, where to dump the allocator's state if memory runs out.
        limit: on CPU, bytes; the step that would pass it raises torch.OutOfMemoryError. Every step is then measured.
        beside: models on the device that are not trained.

    Attributes:
        batch: the largest batch that the model was given in the fullest of the measured steps.
        loss_batch: and what the loss was, of that step, where `note_loss` told of it.

    Raises:
        UserError: `sample` is not positive.
    """

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        *,
        sample: int = 50,
        total_steps: int | None = None,
        snapshot: str | Path | None = None,
        limit: int | None = None,
        beside: Sequence[nn.Module] = (),
    ) -> None:
        if sample < 1:
            raise UserError(f"memory profiler: sample={sample}: measure every step (1) or every so many")
        if accelerator is not None and model is not None:
            model = accelerator.unwrap_model(model)
        self.accelerator, self.model, self.optimizer = accelerator, model, optimizer
        self.sample, self.total_steps = 1 if limit else sample, total_steps
        self.device = _device(accelerator, model)
        self.meter: Meter = CpuMeter(model, optimizer, limit, beside)
        if self.device.type == "cuda":
            self.meter = CudaMeter(self.device)
        self._beside = beside
        self.steps = self.sampled = 0
        self.peaks: Peaks = {}
        self.history = History()
        self.batch = self.loss_batch = LargestBatch()  # of the fullest step
        self._noted = self._loss_noted = LargestBatch()  # of the step that runs
        self._resident: dict[str, int] = {}
        self._open = False
        self._failed: StepTrace | None = None  # of a step that broke off
        self._began = self._quiet_seconds = 0.0
        self._quiet_steps = 0
        self._hooks: list[Any] = []
        self._snapshot = OomSnapshot(Path(snapshot)) if snapshot and self.device.type == "cuda" else None

    def __enter__(self) -> MemoryProfiler:
        self._hooks = [register_optimizer_step_pre_hook(lambda *_: self.meter.enter("optimizer"))]
        if self.model is not None:
            self._hooks.append(self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True))
            self._hooks.append(self.model.register_forward_hook(self._after_forward))
        try:
            self.begin_step()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        if not self.steps and exception == (None, None, None):
            self.step()  # a block without `step()` is one step
        self.close(failed=exception[0] is not None)

    def close(self, failed: bool = False) -> None:
        """Stop measuring, a second time too; of a step that has `failed`, `holders` tells what held its peak."""
        try:
            if failed and self._open and isinstance(self.meter, CpuMeter):
                self._failed = self.meter.latest()
        finally:
            self._cancel()
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()
            self._snapshot = None

    @property
    def measuring(self) -> bool:
        """Whether the step that runs is one of those that are measured."""
        return self._open

    def note_loss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell what a loss was given that is more than the model's own, for `loss_batch`."""
        if self._open:
            self._loss_noted.note(args, kwargs)

    def begin_step(self) -> None:
        """Begin the next step's measurement here rather than where the last one ended (after an evaluation, say)."""
        self._cancel()
        self._failed = None
        last = self.total_steps is not None and self.steps == self.total_steps - 1
        if self.device.type == "cuda" or self.steps < 2 or last or self.steps % self.sample == 0:
            self.meter.begin()
            self._noted, self._loss_noted = LargestBatch(), LargestBatch()
            self._open = True
        self._began = time.perf_counter()

    def step(self) -> dict[str, float]:
        """End an optimizer step and begin the next.

        Returns this process's figures of it in GiB, "memory/allocated_gib", "memory/backward_gib" and so on, as they
        are logged to the accelerator's trackers; nothing for a step that was not measured.
        """
        seconds = time.perf_counter() - self._began
        if self.steps > 0 and not (self._open and self.device.type == "cpu"):  # the first step warms up
            self._quiet_seconds += seconds
            self._quiet_steps += 1
        self.steps += 1
        scalars: dict[str, float] = {}
        if self._open:
            self._open = False
            peaks = self.meter.end()
            self.sampled += 1
            if self.device.type == "cuda" and not self._resident and self.model is not None:
                self._resident = resident_bytes(nn.ModuleList([self.model, *self._beside]), self.optimizer)
            if self._noted.elements and _allocated(peaks) > _allocated(self.peaks):
                self.batch, self.loss_batch = self._noted, self._loss_noted
            merge_peaks(self.peaks, peaks)
            self.history.add(self.steps, peaks)
            scalars = _scalars(peaks)
            if self.accelerator is not None and self.accelerator.trackers:
                self.accelerator.log(scalars, step=self.steps)
        if self.steps != self.total_steps:
            self.begin_step()
        else:  # there may be more of them even so
            self._began = time.perf_counter()
        return scalars

    def holders(self, n: int = 5) -> list[Holder]:
        """What held the peak of the step that is being measured or has failed, else of the fullest; CPU only."""
        trace = self._failed or (self.meter.latest() if isinstance(self.meter, CpuMeter) else None)
        return [] if trace is None else trace.grouped_holders(n)

    def report(self, **facts: Any) -> MemoryReport:
        """The report of all ranks' steps so far; every process must call it.

        `facts`, such as policy and batch_size, are kept in its provenance.
        """
        self._cancel()
        mine, fullest = self._measured()
        ranks = [mine]
        if self.accelerator is not None:
            from accelerate.utils import gather_object

            ranks = sorted(gather_object([mine]), key=lambda rank: rank.rank)
        main = self.accelerator is None or self.accelerator.is_main_process
        known = provenance(**{"shapes": self.batch.shapes, **facts})
        report = MemoryReport(known, ranks, main=main)
        if fullest is not None:
            report.show(fullest)
        return report

    def _measured(self) -> tuple[RankMemory, StepTrace | None]:
        """This process's figures, and the trace of its fullest step where there is one."""
        rank = 0 if self.accelerator is None else self.accelerator.process_index
        seconds = self._quiet_seconds / self._quiet_steps if self._quiet_steps else None
        record = RankMemory(rank, _name(self.device), self.steps, self.sampled, self.peaks, seconds=seconds)
        record.history = self.history
        if isinstance(self.meter, CudaMeter):
            record.retries, record.ooms = self.meter.counters()
            if self._resident:
                record.at_peak = dict(self._resident)
                rest = (record.peak() or 0) - sum(self._resident.values())
                record.at_peak["gradients, activations and temporary"] = max(rest, 0)
            return record, None
        trace = self.meter.fullest if isinstance(self.meter, CpuMeter) else None
        if trace is None:
            return record, None
        record.at_peak, record.holders = trace.at_peak, trace.grouped_holders()
        return record, trace

    def _cancel(self) -> None:
        if self._open:
            self.meter.cancel()
            self._open = False

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            self.meter.enter("forward")
        if self._open and module.training:
            self._noted.note(args, kwargs)

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for tensor in _outputs(output):
            if tensor.grad_fn is not None:  # backward begins when it reaches the first of them
                tensor.grad_fn.register_prehook(lambda *_: self.meter.enter("backward"))


def resident_bytes(model: nn.Module, optimizer: Optimizer | None) -> dict[str, int]:
    """Bytes on the GPU of a model's parameters and buffers and of its optimizer's state, each storage once."""
    from torch.distributed.tensor import DTensor

    state = [] if optimizer is None else list(tensors(list(values.values()) for values in optimizer.state.values()))
    groups = {"parameters": model.parameters(), "buffers": model.buffers(), "optimizer": state}
    seen: set[int] = set()
    totals = dict.fromkeys(groups, 0)
    for category, group in groups.items():
        for tensor in group:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor  # FSDP2's shards
            storage = local.untyped_storage()
            if local.is_cuda and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                totals[category] += storage.nbytes()
    return totals


def _device(accelerator: Accelerator | None, model: nn.Module | None) -> torch.device:
    if accelerator is not None:
        return accelerator.device
    parameter = next(model.parameters(), None) if model is not None else None
    if parameter is not None:
        return parameter.device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _outputs(value: Any) -> Iterator[torch.Tensor]:
    """The tensors that a model returned: one, or in a (nested) tuple, list or mapping, ModelOutput included."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _outputs(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _outputs(item)


def _allocated(peaks: Peaks) -> int:
    return max((phase["allocated"] for phase in peaks.values()), default=0)


def _scalars(peaks: Peaks) -> dict[str, float]:
    """A step's peak of each figure, and what was allocated at most in each phase, in GiB under "memory/"."""
    scalars = {}
    for figure in FIGURES:
        values = [phase[figure] for phase in peaks.values() if figure in phase]
        if values:
            scalars[f"memory/{figure}_gib"] = max(values) / 2**30
    return scalars | {f"memory/{phase}_gib": peaks[phase]["allocated"] / 2**30 for phase in PHASES if phase in peaks}
