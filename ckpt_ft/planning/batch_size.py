"""find_max_batch_size: the largest batch that fits, predicted from traces, then proved by real steps.

Two steps at the prediction: the first makes the optimizer's state, the second is what every later one is like. Its
peak corrects the prediction; only where the corrected one leaves room for a larger batch is that tried too. On a
machine without a GPU the steps run under a Tracker that raises torch.OutOfMemoryError at the budget.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate.utils.memory import should_reduce_batch_size
from torch import nn

from ckpt_ft.checkpointing.apply import applied_policy
from ckpt_ft.checkpointing.standing import suspended
from ckpt_ft.errors import UserError
from ckpt_ft.memory.gpus import current_gpu, gpu_of
from ckpt_ft.memory.record.tracker import Tracker
from ckpt_ft.policy import Policy
from ckpt_ft.units import format_bytes
from ckpt_ft.workloads.workload import Workload, or_loop

from .fitting import Room, largest_fitting, make_room
from .search import Search
from .tracing import Report, Tracer

_SHRINK = 0.97  # after an OOM at a batch that should have fitted: the limit that the next guess is made for, each time


@dataclass(frozen=True)
class Trial:
    """One real step. `peak`: bytes reserved (on CPU, allocated); None where memory ran out."""

    batch: int
    peak: int | None

    @property
    def fits(self) -> bool:
        return self.peak is not None


@dataclass(frozen=True)
class MaxBatchSize:
    """The largest batch that fits, 0 if none does.

    Attributes:
        batch: proved; where nothing was run, as predicted.
        predicted: before any step was run.
        trials: the real steps in order, the first one included, which only makes the optimizer's state.
        room: the bytes that were to be kept to.
    """

    batch: int
    predicted: int
    room: Room
    trials: list[Trial] = field(default_factory=list)

    def __str__(self) -> str:
        if not self.trials:
            return f"largest batch in {format_bytes(self.room.budget)}: predicted {self.predicted}"
        out = sum(not trial.fits for trial in self.trials)
        steps = f"{len(self.trials)} step{'s' if len(self.trials) > 1 else ''}, {out} out of memory"
        within = format_bytes(self.room.budget)
        return f"largest batch in {within}: predicted {self.predicted}, proved {self.batch} ({steps})"


@or_loop
def find_max_batch_size(
    workload: Workload,
    budget: str | int | None = None,
    *,
    max_batch_size: int = 1024,
    margin: str | float | None = None,
    report: Report | None = None,
) -> MaxBatchSize:
    """The largest batch whose training step fits, under the policy that stands on the model: predicted, then proved.

    With a loop of one's own: `find_max_batch_size(model, step_for_batch, budget, make_optimizer=...)`, where
    `step_for_batch(samples)` is `step(model, optimizer)`, one optimizer step on the longest samples there are.

    Args:
        workload: its model has weights, on the device that it is to be trained on, unwrapped (no DDP). Weights,
            buffers, gradients and random state are afterwards as before; a host copy of what is trained is held
            meanwhile.
        budget: bytes or "24GiB"; None for the whole GPU. A CPU needs one.
        margin: kept free, as in `plan`.

    In a distributed run every rank calls it, and all get the smallest of their answers.

    Raises:
        UserError: a budget that the device does not have, or none on a CPU.
    """
    model = workload.model
    device = next(model.parameters()).device
    gpu = current_gpu(device.index) if device.type == "cuda" else None
    workload = replace(workload, device=gpu or "cpu")  # the one at hand, whatever was asked for
    standing = applied_policy(model)
    policy = str(standing.policy) if standing is not None else "none"
    room = make_room(budget, gpu, margin)
    room = replace(room, budget=room.budget - room.limit + agreed(room.limit))  # ranks try the same batches together
    curve, predicted = _predict(workload, policy, room, max_batch_size, report)
    predicted = agreed(predicted)
    runner = _Runner(workload, room, device)
    with _restored(model, device):
        try:
            batch = _prove(runner, lambda n: curve.reserved(policy, n), predicted, max_batch_size)
        finally:
            runner.clean()
    return MaxBatchSize(batch, predicted, room, runner.trials)


def predict_max_batch_size(
    workload: Workload,
    policy: str = "none",
    budget: str | int | None = None,
    *,
    max_batch_size: int = 1024,
    margin: str | float | None = None,
    report: Report | None = None,
) -> MaxBatchSize:
    """The largest batch that fits the workload's device under `policy`, predicted only: the model may be on meta.

    Raises:
        UserError: a budget that the device does not have, or a policy that does not suit the model.
    """
    room = make_room(budget, gpu_of(workload.device), margin, workload.launch)
    _, batch = _predict(workload, str(Policy.parse(policy)), room, max_batch_size, report)
    return MaxBatchSize(batch, batch, room)


def _predict(workload: Workload, policy: str, room: Room, most: int, report: Report | None) -> tuple[Search, int]:
    """The search with its traces, and the largest batch that they say fits."""
    with suspended(workload.model), Tracer(workload, report=report) as tracer:
        search = Search(tracer, room, "effective_batch", most=most)
        found = search.run([policy])
    if policy in search.rejected:
        raise UserError(f"policy '{policy}': {search.rejected[policy]}")
    return search, found[0].batch if found else 0


def keep_effective(batch: int, accumulation: int, largest: int) -> tuple[int, int, str]:
    """Micro-batch and accumulation steps for the same effective batch with micro-batches of at most `largest`.

    Returns them and a sentence that says what changed. Where the effective batch has no divisor between half of
    `largest` and `largest`, the nearest effective batch above it is taken, and the sentence says so.
    """
    total = batch * accumulation
    fits = [n for n in range(1, min(largest, total) + 1) if total % n == 0]
    if not fits:
        raise UserError("not even one sample fits: choose a policy that keeps less, or a larger budget")
    micro, steps = fits[-1], total // fits[-1]
    if 2 * micro <= min(largest, total):
        steps = -(-total // largest)
        micro = -(-total // steps)
    kept = (
        f"the effective batch stays {total}"
        if micro * steps == total
        else f"the effective batch becomes {micro * steps}, was {total}"
    )
    return (
        micro,
        steps,
        f"micro-batch {micro} (was {batch}) x {steps} accumulation steps (was {accumulation}): {kept} per device",
    )


def agreed(value: int) -> int:
    """The smallest `value` of all ranks."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return value
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    shared = torch.tensor(value, device=device)
    torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MIN)
    return int(shared)


def _prove(runner: _Runner, predicted_bytes: Callable[[int], int], first: int, most: int) -> int:
    """Try `first`, then what the measured peaks make of the prediction, until the largest batch that fits is known."""
    known: dict[int, int] = {}  # batch -> bytes measured, or more than the limit
    limit = runner.room.limit
    ratio, aim, batch = 1.0, float(limit), min(max(first, 1), most)
    while True:
        peak = runner.attempt(batch)
        known[batch] = limit + 1 if peak is None else min(peak, limit)  # it ran: it fits, whatever the counters say
        if peak is None:
            aim *= _SHRINK
        else:
            ratio, aim = peak / predicted_bytes(batch), float(limit)
        scale = ratio * limit / aim
        guess = largest_fitting(lambda n, scale=scale: round(predicted_bytes(n) * scale), limit, most, known)  # type: ignore[misc]
        guess = agreed(guess)
        if guess == 0 and 1 not in known:
            guess = 1  # nothing is predicted to fit any more: does a single sample?
        if guess in known or guess == 0:
            return guess
        batch = guess


class _Runner:
    """Runs real steps within a limit; keeps the optimizer from one to the next, until memory runs out."""

    def __init__(self, workload: Workload, room: Room, device: torch.device) -> None:
        self.workload, self.model = workload, workload.model
        self.room, self.device = room, device
        self.trials: list[Trial] = []
        self.optimizer: Any = None
        self.warm = False

    def attempt(self, batch: int) -> int | None:
        """The peak of a step as all later ones are like, the largest of all ranks; None where memory ran out."""
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
            if not (isinstance(error, torch.OutOfMemoryError) or should_reduce_batch_size(error)):
                raise
            traceback.clear_frames(error.__traceback__)  # they hold activations
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
            return None if retried else torch.cuda.max_memory_reserved(self.device)  # a retry stalls every step

    def clean(self) -> None:
        """Drop all that steps left: gradients, optimizer state, the graph of a step that broke off."""
        self.model.zero_grad(set_to_none=True)
        self.optimizer, self.warm = None, False
        torch.clear_autocast_cache()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


@contextmanager
def _limited(device: torch.device, nbytes: int) -> Iterator[None]:
    """The allocator may reserve `nbytes` on `device`, or less where the user has set a smaller fraction of it."""
    total = torch.cuda.get_device_properties(device).total_memory
    fraction = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(min(fraction, nbytes / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(fraction, device)


@contextmanager
def _restored(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Trained parameters, buffers, gradients, modes and random state as they were, from a copy on the host.

    Gradients that are there are put aside: a step would add to them, and they take room that it is not to count.
    """
    modes = [(module, module.training) for module in model.modules()]
    changing = [*(p for p in model.parameters() if p.requires_grad), *model.buffers()]
    copies = [tensor.detach().to("cpu", copy=True) for tensor in changing]
    gradients = [(p, p.grad.to("cpu")) for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for tensor, copy in zip(changing, copies, strict=True):
                tensor.copy_(copy)
        for parameter, gradient in gradients:
            parameter.grad = gradient.to(parameter.device)
