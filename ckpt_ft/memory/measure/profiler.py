"""MemoryProfiler: measures the memory of a training loop on every rank.

    with MemoryProfiler(accelerator, model, optimizer) as profiler:
        for batch in loader:
            ...                      # forward, backward, optimizer.step(), any number of micro-batches
            profiler.step()
    report = profiler.report(policy="full")
    report.print()

On CUDA every step is measured, from the allocator's counters and without synchronisation. On a CPU a dispatch mode
follows every storage (memory/record/tracker.py), which makes a step several times slower. So only the first two steps
are measured, every `sample`-th step, each step whose batch is larger than all before, and the last one if
`total_steps` is known.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ckpt_ft.compat.tensors import no_modes, tree_leaves, tree_map, tree_map_only
from ckpt_ft.errors import UserError
from ckpt_ft.export.holders import Holder
from ckpt_ft.export.page import step_view
from ckpt_ft.export.timeline import Timeline
from ckpt_ft.memory.cost.op_work import tensors
from ckpt_ft.memory.fake.faked_model import tensors_held
from ckpt_ft.memory.fake.values import is_small
from ckpt_ft.memory.record.events import PHASES
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.memory.record.tracker import Tracker

from .report import History, MaxBatch, MemoryReport, Prediction, RankMemory, provenance

if TYPE_CHECKING:
    from accelerate import Accelerator

Peaks = dict[str, dict[str, int]]  # phase -> figure -> bytes


class CpuMeter:
    """Runs a Tracker for the length of a step and keeps the trace of the step with the highest peak.

    As with CudaMeter, `begin` opens a step in its forward phase, `enter` begins another phase, `end` returns the
    peaks of the step and `cancel` drops it. Compiled functions run eagerly in a measured step only.

    Args:
        limit: bytes; a step that exceeds it raises torch.OutOfMemoryError.
        auxiliary_models: models on the device that are not trained.
    """

    def __init__(
        self,
        model: nn.Module | None,
        optimizer: Optimizer | None,
        limit: int | None = None,
        auxiliary_models: Sequence[nn.Module] = (),
    ) -> None:
        self.model, self.optimizer, self.limit, self.auxiliary_models = model, optimizer, limit, auxiliary_models
        self.fullest: StepTrace | None = None
        self._tracker: Tracker | None = None
        self._eager: Any = None

    def begin(self) -> None:
        self._tracker = Tracker(self.model, self.optimizer, limit=self.limit, ops=False)
        self._tracker.add_beside(self.auxiliary_models)
        for module in self.model.modules() if self.model is not None else ():  # also those that this step leaves alone
            self._tracker.recorder.add_resident(tensors_held(module).values(), "activations")
        self._tracker.__enter__()
        self._eager = torch.compiler.set_stance("force_eager")  # compiled code gives up under a dispatch mode
        self._tracker.start_step()

    def enter(self, phase: str) -> None:
        """Begins a phase other than forward, backward and optimizer, or the forward after it: ops tell the others."""
        if self._tracker is not None and phase not in PHASES:
            self._tracker.enter(phase)

    def resume(self) -> None:
        """Ends such a phase: what follows is forward."""
        assert self._tracker is not None
        self._tracker.enter("forward")

    def end(self) -> Peaks:
        trace = self._stop().trace("cpu")
        if self.fullest is None or trace.peak_allocated > self.fullest.peak_allocated:
            self.fullest = trace
        return {phase: {"allocated": nbytes} for phase, nbytes in trace.peaks.items() if nbytes}

    def cancel(self) -> None:
        if self._tracker is not None:
            self._stop()

    def latest(self) -> StepTrace | None:
        """The trace of the current step so far; between steps, of the step with the highest peak."""
        return self.fullest if self._tracker is None else self._tracker.trace("cpu")

    def _stop(self) -> Tracker:
        tracker, self._tracker = self._tracker, None
        assert tracker is not None, "end() follows begin()"
        self._eager.__exit__(None, None, None)
        tracker.__exit__(None, None, None)
        return tracker


class CudaMeter:
    """Reads the caching allocator's counters and resets their peaks where a phase begins, without synchronisation.

    The reset affects the whole process: `torch.cuda.max_memory_allocated()` then covers the last phase only.
    """

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()  # the counters exist only then
        self.device = device
        self._peaks: Peaks = {}
        self._phase = "forward"

    def begin(self) -> None:
        self._peaks, self._phase = {}, "forward"
        torch.cuda.reset_peak_memory_stats(self.device)

    def enter(self, phase: str) -> None:
        if phase != self._phase:
            self._close()
            self._phase = phase

    def end(self) -> Peaks:
        self._close()
        return self._peaks

    def resume(self) -> None:
        self.enter("forward")

    def cancel(self) -> None:
        pass

    def counters(self) -> tuple[int, int]:
        """Allocation retries and failed allocations of the process so far."""
        stats = torch.cuda.memory_stats(self.device)
        return stats.get("num_alloc_retries", 0), stats.get("num_ooms", 0)

    def _close(self) -> None:
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)  # the flat one sorts 150 keys
        known = self._peaks.setdefault(self._phase, {})
        for figure in ("allocated", "reserved", "active"):
            known[figure] = max(known.get(figure, 0), stats[f"{figure}_bytes"]["all"]["peak"])
        torch.cuda.reset_peak_memory_stats(self.device)


FIGURES = ("allocated", "reserved", "active")  # of torch's allocator; on a CPU only the first exists


class Outline(NamedTuple):
    """A tensor's shape and dtype, and `values` on the host for masks, positions and labels, which decide what runs."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    values: torch.Tensor | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Outline:
        with no_modes():  # the copy must not be measured
            values = tensor.detach().to("cpu", copy=True) if is_small(tensor) else None
        return cls(tuple(tensor.shape), tensor.dtype, values)


def elements_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    found = 0
    for value in (*args, *kwargs.values()):  # once for every forward of a run
        if isinstance(value, torch.Tensor):
            found += value.numel()
        elif value is not None:
            found += sum(leaf.numel() for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return found


class LargestBatch:
    """The arguments of the call with the most tensor elements. Only outlines of tensors are kept: no device memory."""

    def __init__(self) -> None:
        self.elements = 0
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}

    def note(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Keeps these arguments if they have more elements than those before."""
        elements = elements_of(args, kwargs)
        if elements > self.elements:
            self.elements = elements
            self.args, self.kwargs = tree_map_only(torch.Tensor, Outline.of, (args, dict(kwargs)))

    @property
    def shapes(self) -> dict[str, list[int]]:
        named = {**{f"input {i}": value for i, value in enumerate(self.args)}, **self.kwargs}
        return {name: list(value.shape) for name, value in named.items() if isinstance(value, Outline) and value.shape}

    def rebuilt(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """New arguments like these, for a trace. Tensors whose values were not kept are zeros."""

        def fill(value: Any) -> Any:
            if not isinstance(value, Outline):
                return value
            if value.values is None:
                return torch.zeros(value.shape, dtype=value.dtype)
            return torch.tensor(value.values.tolist(), dtype=value.dtype)  # a new tensor that lives as long as a batch

        given: tuple[tuple[Any, ...], dict[str, Any]] = (self.args, self.kwargs)
        return tree_map(fill, given, is_leaf=lambda value: isinstance(value, Outline))


class MemoryProfiler:
    """Measures the steps of a loop; a context manager.

    Args:
        accelerator: its device is measured, figures are logged to its trackers and gathered from its processes.
        model: its forward and backward are the phases and its modules are named. Without a model the forward and
            backward peaks on CUDA are not separated.
        optimizer: its state counts as "optimizer" from the start.
        sample, total_steps: on a CPU, choose the measured steps, as the module's docstring says.
        limit: on a CPU, bytes; the step that exceeds it raises torch.OutOfMemoryError. Every step is then measured.
        auxiliary_models: models on the device that are not trained, such as a reference model.

    Attributes:
        batch: the largest batch that the model was given in the measured step with the highest peak.
        fullest: that step's number, from 1.
        loss_batches: what the loss was given for each micro-batch of that step, if `note_loss` was called.

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
        limit: int | None = None,
        auxiliary_models: Sequence[nn.Module] = (),
    ) -> None:
        if sample < 1:
            raise UserError(f"memory profiler: sample={sample}: measure every step (1) or every so many")
        if accelerator is not None and model is not None:
            model = accelerator.unwrap_model(model)
        self.accelerator, self.model, self.optimizer = accelerator, model, optimizer
        self.sample, self.total_steps = 1 if limit else sample, total_steps
        self.device = _device(accelerator, model)
        self.meter: CpuMeter | CudaMeter = CpuMeter(model, optimizer, limit, auxiliary_models)
        if self.device.type == "cuda":
            self.meter = CudaMeter(self.device)
        self.auxiliary_models = tuple(auxiliary_models)
        self.steps = self.sampled = 0
        self.peaks: Peaks = {}
        self.history = History()
        self.batch = self._batch = LargestBatch()  # of the step with the highest peak, and of the current step
        self.fullest = self._most = 0
        self._of_fullest: Peaks = {}
        self.loss_batches: list[LargestBatch] = []
        self._loss_batches: list[LargestBatch] = []
        self._resident: dict[str, int] = {}
        self._between: dict[str, list[int]] = defaultdict(list)  # what ran between steps: after which, each time
        self._batches: Counter[tuple[int, tuple[int, ...]]] = Counter()  # elements and shape of each batch
        self._open = False
        self._failed: StepTrace | None = None  # of a step that raised
        self._began = self._timed_seconds = 0.0
        self._timed_steps = 0
        self._hooks: list[Any] = []

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
        """Stops measuring; may be called twice. After a step that `failed`, `holders` describes that step."""
        try:
            if failed and self._open and isinstance(self.meter, CpuMeter):
                self._failed = self.meter.latest()
        finally:
            self._cancel()
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()

    @property
    def measuring(self) -> bool:
        """Whether the current step is measured."""
        return self._open

    def note_loss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Records the arguments of a loss that computes more than the model's own, for `loss_batches`."""
        noted = LargestBatch()
        noted.note(args, kwargs)
        self._loss_batches = [*self._loss_batches, noted]  # also those before the one that opens the step

    def note_between(self, name: str) -> None:
        """Records that something is run between two steps, such as "saving"; it is not measured as part of a step."""
        self._cancel()
        self._between[name] += [self.steps] if self._between[name][-1:] != [self.steps] else []

    def begin_step(self) -> None:
        """Begins the next step here instead of where the last one ended (after an evaluation, for example)."""
        self._cancel()
        self._failed, self._loss_batches = None, []
        last = self.total_steps is not None and self.steps == self.total_steps - 1
        if self.device.type == "cuda" or self.steps < 2 or last or self.steps % self.sample == 0:
            self.meter.begin()
            self._batch, self._open = LargestBatch(), True
        self._began = time.perf_counter()

    @contextmanager
    def phase(self, name: str, between: bool = False) -> Iterator[None]:
        """Measures what runs inside as a phase of its own, such as "generation" or "evaluation".

        between: it runs between two steps. On a CPU only the first two such phases of a name are measured.
        """
        if between:
            self._cancel()
        inside, meter = self._open, self.meter
        if not inside:
            self.note_between(name)
            if isinstance(meter, CpuMeter) and len(self._between[name]) > 2:
                yield
                return
            meter.begin()
        meter.enter(name)
        try:
            yield
        except BaseException:
            if not inside:
                meter.cancel()
            raise
        if inside:
            meter.resume()
        else:
            merge_peaks(self.peaks, {name: meter.end().get(name, {})})

    def step(self) -> dict[str, float]:
        """Ends an optimizer step, begins the next, and logs this process's figures to the accelerator's trackers.

        Returns the figures in GiB ("memory/allocated_gib", "memory/backward_gib", ...), empty for a step that was not
        measured.
        """
        seconds = time.perf_counter() - self._began
        if self.steps > 0 and not (self._open and self.device.type == "cpu"):  # the first step warms up
            self._timed_seconds += seconds
            self._timed_steps += 1
        self.steps += 1
        scalars: dict[str, float] = {}
        if self._open:
            self._open = False
            peaks = self.meter.end()
            self.sampled += 1
            if self.device.type == "cuda" and not self._resident and self.model is not None:
                self._resident = resident_bytes(nn.ModuleList([self.model, *self.auxiliary_models]), self.optimizer)
            if self._batch.elements and _of_step(peaks) >= _of_step(self.peaks):
                self.fullest, self._of_fullest = self.steps, peaks
                self.batch, self.loss_batches = self._batch, self._loss_batches
            merge_peaks(self.peaks, peaks)
            self.history.add(self.steps, peaks)
            scalars = _scalars(peaks)
            if self.accelerator is not None and self.accelerator.trackers:
                self.accelerator.log(scalars, step=self.steps)
        if self.steps != self.total_steps:
            self.begin_step()
        else:  # a loop may still make more steps than it announced
            self._began, self._loss_batches = time.perf_counter(), []
        return scalars

    def holders(self, n: int = 5) -> list[Holder]:
        """What held the peak of the running or failed step, else of the one with the highest peak; empty on CUDA."""
        trace = self._failed or (self.meter.latest() if isinstance(self.meter, CpuMeter) else None)
        return [] if trace is None else trace.grouped_holders(n)

    def report(
        self,
        predicted: StepTrace | None = None,
        *,
        notes: Sequence[str] = (),
        phases: Mapping[str, StepTrace] | None = None,
        max_batch: MaxBatch | None = None,
        **facts: Any,
    ) -> MemoryReport:
        """The report of all ranks' steps so far; every process must call it.

        Args:
            predicted: a trace of this process's step, to be shown beside the measurement.
            phases: traces of what runs besides the step, by the names of `phase`.
            notes: this process's sentences; a sentence that several processes say is printed once.
            facts: for the provenance, such as policy and batch_size.
        """
        self._cancel()
        recorded = self.meter.fullest if isinstance(self.meter, CpuMeter) else None
        mine = self._rank_memory(
            recorded, None if predicted is None else Prediction.from_trace(predicted, phases or {})
        )
        gathered = [(mine, list(notes))]
        if self.accelerator is not None:
            from accelerate.utils import gather_object

            gathered = sorted(gather_object(gathered), key=lambda rank: rank[0].rank)
        shown = recorded or predicted
        return MemoryReport(
            provenance(**{"shapes": self.batch.shapes, **facts}),
            [rank for rank, _ in gathered],
            max_batch,
            None if shown is None else Timeline.from_trace(shown),
            list(dict.fromkeys(note for _, said in gathered for note in said)),
            self.accelerator is None or self.accelerator.is_main_process,
            None if shown is None else step_view(shown),
        )

    def _rank_memory(self, recorded: StepTrace | None, predicted: Prediction | None) -> RankMemory:
        figures: dict[str, Any] = {}
        if isinstance(self.meter, CudaMeter):
            figures["retries"], figures["ooms"] = self.meter.counters()
            if self._resident:
                rest = _allocated(self.peaks) - sum(self._resident.values())
                figures["at_peak"] = {**self._resident, "gradients, activations and temporary": max(rest, 0)}
        elif recorded is not None:
            figures = {"at_peak": recorded.at_peak, "holders": recorded.grouped_holders()}
        return RankMemory(
            0 if self.accelerator is None else self.accelerator.process_index,
            torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type,
            self.steps,
            self.sampled,
            self.peaks,
            seconds=self._timed_seconds / self._timed_steps if self._timed_steps else None,
            history=self.history,
            predicted=predicted,
            fullest={phase: figures["allocated"] for phase, figures in self._of_fullest.items()},
            step=self.fullest,
            batch=self.batch.shapes,
            median=self._median(),
            between=dict(self._between),
            host=_host_bytes(self.device),
            **figures,
        )

    def _median(self) -> list[int]:
        """The shape of the batch that half of all batches do not exceed."""
        left = self._batches.total() / 2
        for (_, shape), times in sorted(self._batches.items()):
            left -= times
            if left <= 0:
                return list(shape)
        return []

    def _cancel(self) -> None:
        if self._open:
            self.meter.cancel()
            self._open = False

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():  # generation: its batch would keep the KV cache alive
            return
        if module.training:
            elements = elements_of(args, kwargs)
            shapes = (tuple(value.shape) for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
            self._batches[elements, next(filter(None, shapes), ())] += 1
            if elements > self._most and not self._open:  # a step that would not be measured
                self.meter.begin()
                self._batch, self._open = LargestBatch(), True
            self._most = max(self._most, elements)
        self.meter.enter("forward")
        if self._open and module.training:
            self._batch.note(args, kwargs)

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for tensor in tree_leaves(dict(output) if isinstance(output, dict) else output):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                # backward begins when it reaches the first of them
                tensor.grad_fn.register_prehook(lambda *_: self.meter.enter("backward"))


def merge_peaks(into: Peaks, step: Peaks) -> None:
    for phase, figures in step.items():
        for figure, nbytes in figures.items():
            known = into.setdefault(phase, {})
            known[figure] = max(known.get(figure, 0), nbytes)


def resident_bytes(model: nn.Module, optimizer: Optimizer | None) -> dict[str, int]:
    """Bytes on the GPU of a model's parameters, buffers and optimizer state; a shared storage counts once."""
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


def _host_bytes(device: torch.device) -> dict[str, int]:
    """The most bytes of this process in host memory so far (see `RankMemory.host`)."""
    try:
        import resource
    except ImportError:  # Windows
        return {}
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2)
    found = {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    if device.type == "cuda":
        stats = torch.cuda.host_memory_stats()
        found |= {"pinned": stats.get("active_bytes.peak", 0), "pinned blocks": stats.get("allocated_bytes.peak", 0)}
    return found


def _allocated(peaks: Peaks) -> int:
    return max((phase["allocated"] for phase in peaks.values()), default=0)


def _of_step(peaks: Peaks) -> int:
    return _allocated({phase: figures for phase, figures in peaks.items() if phase in PHASES})


def _scalars(peaks: Peaks) -> dict[str, float]:
    """A step's peak of each figure and the peak allocated in each phase, in GiB, under "memory/"."""
    scalars = {}
    for figure in FIGURES:
        values = [phase[figure] for phase in peaks.values() if figure in phase]
        if values:
            scalars[f"memory/{figure}_gib"] = max(values) / 2**30
    return scalars | {f"memory/{phase}_gib": peaks[phase]["allocated"] / 2**30 for phase in PHASES if phase in peaks}
