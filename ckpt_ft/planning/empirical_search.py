"""Confirms a predicted batch size by real steps within a memory limit; each measured peak corrects the prediction."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ckpt_ft.checkpointing import rng
from ckpt_ft.errors import is_oom
from ckpt_ft.memory.record.tracker import Tracker
from ckpt_ft.workloads.workload import Workload

from .budget import MemoryBudget, largest_fitting

_SHRINK = 0.97  # after an OOM at a batch that should fit, the next guess is made for this share of the limit


@dataclass(frozen=True)
class Trial:
    """One real step. `peak`: bytes reserved (allocated on a CPU); None if it ran out of memory."""

    batch: int
    peak: int | None

    @property
    def fits(self) -> bool:
        return self.peak is not None


def agreed(value: int) -> int:
    """The minimum of `value` over all ranks."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return value
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    shared = torch.tensor(value, device=device)
    torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MIN)
    return int(shared)


def prove(runner: Runner, predicted_bytes: Callable[[int], int], first: int, most: int) -> int:
    """Try `first`, then the batches that the corrected prediction names, until the largest that fits is known."""
    known: dict[int, int] = {}  # batch -> measured bytes; limit + 1 if it ran out of memory
    limit = runner.room.limit
    ratio, aim, batch = 1.0, float(limit), min(max(first, 1), most)
    while True:
        peak = runner.attempt(batch)
        known[batch] = (
            limit + 1 if peak is None else min(peak, limit)
        )  # a step that ran fits, regardless of the counters
        if peak is None:
            aim *= _SHRINK
        else:
            ratio, aim = peak / predicted_bytes(batch), float(limit)
        scale = ratio * limit / aim
        guess = largest_fitting(lambda n, scale=scale: round(predicted_bytes(n) * scale), limit, most, known)  # type: ignore[misc]
        guess = agreed(guess)
        if guess == 0 and 1 not in known:
            guess = 1  # nothing is predicted to fit: try a single sample
        if guess in known or guess == 0:
            return guess
        batch = guess


class Runner:
    """Runs real steps within a memory limit; keeps the optimizer between steps until one runs out of memory."""

    def __init__(self, workload: Workload, room: MemoryBudget, device: torch.device) -> None:
        self.workload, self.model = workload, workload.model
        self.room, self.device = room, device
        self.trials: list[Trial] = []
        self.optimizer: Any = None
        self.warm = False

    def attempt(self, batch: int) -> int | None:
        """Peak of a steady-state step, maximum over ranks; None if it ran out of memory."""
        if not self.warm:
            make = self.workload.make_optimizer
            self.optimizer = make(self.model) if make else None
            if self._step(batch) is None:
                return None
            self.warm = True
        return self._step(batch)

    def _step(self, batch: int) -> int | None:
        peak = None
        try:
            peak = self._measured(batch)
        except Exception as error:
            if not is_oom(error):
                raise
            traceback.clear_frames(error.__traceback__)  # its frames hold activations
        everywhere = agreed(int(peak is not None))
        peak = -agreed(-(peak or 0)) if everywhere else None
        if peak is None:
            self.clean()
        self.trials.append(Trial(batch, peak))
        return peak

    def _measured(self, batch: int) -> int | None:
        step = self.workload.step(batch)
        if self.device.type != "cuda":
            tracker = Tracker(self.model, self.optimizer, limit=self.room.limit, ops=False)
            tracker.add_beside(self.workload.auxiliary_models)
            with tracker:
                tracker.start_step()
                step(self.model, self.optimizer)
            return tracker.peak
        torch.cuda.empty_cache()
        with _limited(self.device, self.room.limit):
            torch.cuda.reset_peak_memory_stats(self.device)
            retries = torch.cuda.memory_stats(self.device)["num_alloc_retries"]
            step(self.model, self.optimizer)
            torch.cuda.synchronize(self.device)
            retried = torch.cuda.memory_stats(self.device)["num_alloc_retries"] > retries
            return (
                None if retried else torch.cuda.max_memory_reserved(self.device)
            )  # such a retry would stall every step

    def clean(self) -> None:
        """Free memory left by steps: gradients, optimizer state, the graph of an interrupted step."""
        self.model.zero_grad(set_to_none=True)
        self.optimizer, self.warm = None, False
        torch.clear_autocast_cache()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


@contextmanager
def _limited(device: torch.device, nbytes: int) -> Iterator[None]:
    """Limits the allocator to `nbytes` on `device`, or to the user's own fraction if that is less."""
    total = torch.cuda.get_device_properties(device).total_memory
    fraction = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(min(fraction, nbytes / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(fraction, device)


@contextmanager
def restored(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restores trained parameters, buffers, gradients, modes and random state on exit, from copies on the host.

    Existing gradients are moved to the host meanwhile: a step would add to them, and its peak would include them.
    """
    modes = [(module, module.training) for module in model.modules()]
    changing = [*(p for p in model.parameters() if p.requires_grad), *model.buffers()]
    copies = [tensor.detach().to("cpu", copy=True) for tensor in changing]
    gradients = [(p, p.grad.to("cpu")) for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    drawn = rng.snapshot(device, host=True)
    try:
        yield
    finally:
        drawn.restore()
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for tensor, copy in zip(changing, copies, strict=True):
                tensor.copy_(copy)
        for parameter, gradient in gradients:
            parameter.grad = gradient.to(parameter.device)
