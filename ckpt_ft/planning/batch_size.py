"""find_max_batch_size: the largest batch that fits, predicted from traces and then confirmed by real steps.

Two real steps run at the predicted batch: the first allocates the optimizer's state, the second is like all later
ones. Its peak corrects the prediction, and a larger batch is tried only if the corrected prediction allows one. On a
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
from torch import nn

from ckpt_ft.checkpointing import rng
from ckpt_ft.checkpointing.applied_policy import suspended
from ckpt_ft.checkpointing.apply import applied_policy
from ckpt_ft.errors import UserError, is_oom
from ckpt_ft.memory.gpus import current_gpu, gpu_of
from ckpt_ft.memory.record.tracker import Tracker
from ckpt_ft.policy import Policy
from ckpt_ft.units import format_bytes
from ckpt_ft.workloads.workload import Workload, or_loop

from .budget import MemoryBudget, largest_fitting, limited_by_phases, memory_budget
from .scaled_traces import Estimates
from .search import search
from .tracing import Report, Tracer

_SHRINK = 0.97  # after an OOM at a batch that should fit, the next batch is predicted for this share of the limit


@dataclass(frozen=True)
class Trial:
    """One real step. `peak`: bytes reserved (allocated on a CPU); None if it ran out of memory."""

    batch: int
    peak: int | None

    @property
    def fits(self) -> bool:
        return self.peak is not None


def minimum_over_ranks(value: int) -> int:
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
        guess = minimum_over_ranks(guess)
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
        everywhere = minimum_over_ranks(int(peak is not None))
        peak = -minimum_over_ranks(-(peak or 0)) if everywhere else None
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
            return tracker.recorder.peak
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


@dataclass(frozen=True)
class MaxBatchSize:
    """The largest batch that fits, 0 if none does.

    Attributes:
        batch: the proved batch; the predicted one if no step was run.
        predicted: the largest batch whose predicted bytes fit.
        trials: the real steps in order, with the first one, which only allocates the optimizer's state.
        last: only predicted: the largest batch that runs at all on a GPU, because the allocator returns cached
            segments before it runs out of memory.
        needed: the smallest budget that works, if not one sample fits; else 0.
    """

    batch: int
    predicted: int
    room: MemoryBudget
    trials: list[Trial] = field(default_factory=list)
    last: int = 0
    needed: int = 0

    def __str__(self) -> str:
        if not self.trials:
            found = f"largest batch in {format_bytes(self.room.budget)}: predicted {self.predicted}"
            return f"{found}; {self.beyond}" if self.last > self.predicted else found
        out = sum(not trial.fits for trial in self.trials)
        steps = f"{len(self.trials)} step{'s' if len(self.trials) > 1 else ''}, {out} out of memory"
        within = format_bytes(self.room.budget)
        return f"largest batch in {within}: predicted {self.predicted}, proved {self.batch} ({steps})"

    @property
    def beyond(self) -> str:
        """What larger batches than `predicted` cost."""
        return f"up to {self.last} runs, but waits for the device while the allocator gives cached memory back"


@or_loop
def find_max_batch_size(
    workload: Workload,
    budget: str | int | None = None,
    *,
    max_batch_size: int = 1024,
    margin: str | float | None = None,
    report: Report | None = None,
) -> MaxBatchSize:
    """The largest batch whose training step fits under the model's policy: predicted, then proved by real steps.

    For a training loop of your own: `find_max_batch_size(model, step_for_batch, budget, make_optimizer=...)`, where
    `step_for_batch(samples)` returns `step(model, optimizer)`, one optimizer step on the longest samples.

    In a distributed run every rank calls this function, and all ranks get the smallest of their results.

    Args:
        workload: its model has weights, lies on the device that it will be trained on, and is not wrapped (no DDP).
            Weights, buffers, gradients and random state are restored afterwards from a copy on the host. Under a
            launch ("ddp" or none) the steps run in one process, and the budget is lowered by DDP's buckets.
        budget: bytes or "24GiB"; None for the whole GPU. A CPU needs a budget.
        margin: memory to keep free, as in `plan`.

    Raises:
        UserError: a budget that the device does not have, or none on a CPU; a model without parameters.
    """
    model = workload.model
    device = next((parameter.device for parameter in model.parameters()), None)
    if device is None:
        raise UserError(f"{type(model).__name__} has no parameters: nothing of it is trained")
    gpu = current_gpu(device.index) if device.type == "cuda" else None
    workload = replace(workload, device=gpu or "cpu")  # the model's device
    applied = applied_policy(model)
    policy = str(applied.policy) if applied is not None else "none"
    room = memory_budget(budget, gpu, margin, workload.launch)
    # all ranks try the same batches
    room = replace(room, budget=room.budget - room.limit + minimum_over_ranks(room.limit))
    estimates, predicted, _ = largest_in_room(workload, policy, room, max_batch_size, report)
    predicted = minimum_over_ranks(predicted)
    buckets = 0 if workload.launch is None else sum(p.nbytes for p in model.parameters() if p.requires_grad)
    runner = Runner(replace(workload, launch=None), replace(room, budget=room.budget - buckets), device)
    with restored(model, device):
        try:
            batch = prove(runner, lambda n: estimates.reserved(policy, n) - buckets, predicted, max_batch_size)
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
    host_memory: int | None = None,
) -> MaxBatchSize:
    """The largest batch that fits the workload's device under `policy`, predicted only. The model may be on meta.

    host_memory: bytes of host memory that each process may take; None without a limit.

    Raises:
        UserError: a budget that the device does not have, or a policy that does not suit the model.
    """
    room = memory_budget(budget, gpu_of(workload.device), margin, workload.launch, host_memory)
    policy = str(Policy.parse(policy))
    estimates, batch, needed = largest_in_room(workload, policy, room, max_batch_size, report)
    if gpu_of(workload.device) is None:
        return MaxBatchSize(batch, batch, room, needed=needed)
    runs = largest_fitting(lambda n: int(not estimates.runs(policy, n)), 0, estimates.most, {batch: 0})
    return MaxBatchSize(batch, batch, room, last=runs, needed=needed)


def largest_in_room(
    workload: Workload, policy: str, room: MemoryBudget, most: int, report: Report | None = None
) -> tuple[Estimates, int, int]:
    """The estimates, the largest batch that fits, and the smallest budget for one sample if none fits (else 0).

    Raises:
        UserError: a policy that does not suit the model.
    """
    with suspended(workload.model), Tracer(workload, report=report) as tracer:
        most = limited_by_phases(workload, room, most)
        estimates = Estimates(tracer, room, "effective_batch", most=most)
        found = search(estimates, [policy])
        if policy in estimates.rejected:
            reason, named = estimates.rejected[policy], f"policy '{policy}'"
            raise UserError(reason if reason.startswith(named) else f"{named}: {reason}")
        if found:
            return estimates, found[0].batch, 0
        tracer.trace(policy, 1)
        return estimates, 0, room.needs(estimates.estimate(policy, 1))


def keep_effective(batch: int, accumulation: int, largest: int) -> tuple[int, int, str]:
    """Micro-batch (at most `largest`) and accumulation for the same effective batch, and what changed, as a sentence.

    If the effective batch has no divisor between half of `largest` and `largest`, the next larger one is used.
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
    said = f"micro-batch {micro} (was {batch}) x {steps} accumulation steps (was {accumulation}): {kept} per device"
    return micro, steps, said
