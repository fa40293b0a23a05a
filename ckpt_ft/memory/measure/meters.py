"""Meters of one process's memory: CUDA's own counters, or a tracker of storages on a CPU."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from ckpt_ft.memory.fake.faked_model import tensors_held
from ckpt_ft.memory.record.dispatch import run_eagerly
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.memory.record.tracker import Tracker

Peaks = dict[str, dict[str, int]]  # phase -> figure -> bytes


class Meter(Protocol):
    """`begin` opens a step in its forward phase, `enter` begins another phase, `end` returns the step's peaks and
    `cancel` drops the step."""

    def begin(self) -> None: ...
    def enter(self, phase: str) -> None: ...
    def end(self) -> Peaks: ...
    def cancel(self) -> None: ...


class CpuMeter:
    """Runs a Tracker for the length of a step and keeps the trace of the step with the highest peak.

    Compiled functions run eagerly in a measured step, and compiled in the others.

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
            self._tracker.add_resident(tensors_held(module).values(), "activations")
        self._tracker.__enter__()
        self._eager = run_eagerly()
        self._tracker.start_step()

    def enter(self, phase: str) -> None:
        pass

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


class OomSnapshot:
    """Writes the allocator's state to `path` when an allocation fails, before anything is freed.

    The file is for pytorch.org/memory_viz. It has stack traces if torch.cuda.memory._record_memory_history is on.
    """

    _current: weakref.ReferenceType[OomSnapshot] | None = None
    _attached = False

    def __init__(self, path: Path) -> None:
        self.path = path
        OomSnapshot._current = weakref.ref(self)
        if not OomSnapshot._attached:  # an observer cannot be detached, so the process has only one
            torch._C._cuda_attach_out_of_memory_observer(_observe)  # type: ignore[attr-defined]
            OomSnapshot._attached = True


def _observe(device: int, wanted: int, reserved: int, free: int) -> None:
    snapshot = OomSnapshot._current() if OomSnapshot._current is not None else None
    if snapshot is not None:
        snapshot.path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(snapshot.path))
