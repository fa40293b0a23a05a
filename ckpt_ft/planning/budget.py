"""Candidates (a policy at a batch size), their ranking, and the memory budget that they have to fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Lt

from ckpt_ft.errors import UserError
from ckpt_ft.memory.cost.collectives import nccl_bytes
from ckpt_ft.memory.cost.schedule import Host
from ckpt_ft.memory.gpus import GPU
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.spec.launch import Launch
from ckpt_ft.units import GIB, format_bytes, parse_budget
from ckpt_ft.validation import Bytes, Count, Seconds

if TYPE_CHECKING:
    from ckpt_ft.workloads.workload import Workload

TARGETS = ("throughput", "memory", "effective_batch")
# The speed of a CPU is known after `ckpt-ft calibrate` alone. These round figures (100 GFLOP/s, 10 GB/s, free
# launches) only rank policies by the arithmetic and memory traffic that they add.
NOMINAL_CPU = GPU("cpu", (8, 0), 1, 64 * GIB, 0, 10e9, 1e11, 0, 1e11, 1e11, 0, 1.0, 1.0, 1.0)
_NOMINAL_HOST = Host(per_op=5e-6, per_launch=0.0)


@dataclass(frozen=True)
class Candidate:
    """A policy at a batch size with its predicted memory and time.

    Attributes:
        batch, accumulation: samples of a micro-batch, and micro-batches of a step.
        peak, reserved: peak bytes allocated and reserved, which are the same on "cpu".
        seconds: of one optimizer step; nominal on "cpu" (see `NOMINAL_CPU`), for ranking only.
        launch: the processes, each with its own micro-batch; None for one process.
        bound: what limits the speed of the step: "compute", "host", "network" or "copies"; "" on "cpu".
        host: peak bytes in host memory.
    """

    policy: str
    batch: Count
    peak: Bytes
    reserved: Bytes
    seconds: Seconds
    accumulation: Count = 1
    launch: Launch | None = None
    bound: str = ""
    host: Bytes = 0

    @property
    def samples_per_second(self) -> float:
        """Samples a second of one process; those that several processes work on together are shared among them."""
        together = 1 if self.launch is None else self.launch.ranks_of_a_sample
        return self.batch * self.accumulation / self.seconds / together

    @classmethod
    def of(
        cls, policy: str, batch: int, trace: StepTrace, accumulation: int = 1, peaks: tuple[int, int] | None = None
    ) -> Candidate:
        """The candidate of a trace. peaks: bytes allocated and reserved if known; else the trace is replayed."""
        peak, reserved = peaks or (trace.peak_allocated, trace.peak_reserved)
        bound = trace.seconds_parts.bound if trace.timed else ""
        return cls(policy, batch, peak, reserved, seconds(trace), accumulation, trace.launch, bound, trace.peak_host)


def seconds(trace: StepTrace) -> float:
    """Predicted seconds of the measured step; nominal on a CPU that was not calibrated."""
    return trace.seconds if trace.timed else trace.seconds_on(NOMINAL_CPU, _NOMINAL_HOST).total


def better(target: str) -> Callable[[Candidate], tuple[float, ...]]:
    """A sort key for a target; the best candidate has the largest key.

    "throughput" prefers samples a second; if they agree to three digits, fewer bytes. "memory" prefers fewer bytes
    reserved, "effective_batch" the larger batch, then the faster step.

    Raises:
        UserError: an unknown target.
    """
    if target not in TARGETS:
        raise UserError(f"target '{target}': choose one of {', '.join(TARGETS)}")
    if target == "memory":
        return lambda candidate: (-candidate.reserved, candidate.samples_per_second)
    if target == "effective_batch":
        return lambda candidate: (candidate.batch, candidate.samples_per_second)
    return lambda candidate: (float(f"{candidate.samples_per_second:.3g}"), -candidate.reserved)


def frontier(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The Pareto frontier of bytes reserved and samples a second, fastest first."""
    best: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda candidate: (-candidate.samples_per_second, candidate.reserved)):
        if not best or candidate.reserved < best[-1].reserved:
            best.append(candidate)
    return best


MARGIN = 0.02  # share of a GPU's budget: for library handles and kernels' scratch, which no trace sees


@dataclass(frozen=True)
class MemoryBudget:
    """The memory of a step: `budget` bytes, less the CUDA context, less a margin for what no trace sees.

    Attributes:
        share: the margin as a share of the budget, 0 if it is an amount. A larger budget has a larger such margin.
        host: bytes of host memory that each process may take; None without a limit.
    """

    budget: Bytes
    context: Bytes = 0
    margin: Bytes = 0
    share: Annotated[float, Ge(0), Lt(1)] = 0.0
    host: Bytes | None = None

    @property
    def limit(self) -> int:
        """Bytes that the caching allocator may reserve."""
        return self.budget - self.context - self.margin

    def fits(self, candidate: Candidate) -> bool:
        return candidate.reserved <= self.limit and self.host_holds(candidate.host)

    def holds(self, trace: StepTrace) -> bool:
        return trace.peak_reserved <= self.limit and self.host_holds(trace.peak_host)

    def host_holds(self, nbytes: int) -> bool:
        return self.host is None or nbytes <= self.host

    def needs(self, candidate: Candidate) -> int:
        """The smallest budget in which `candidate` fits, with the same context and the same margin or share."""
        if not self.share:
            return candidate.reserved + self.context + self.margin
        rounded = 1  # because the margin is rounded
        return math.ceil((candidate.reserved + self.context + rounded) / (1 - self.share))


LESS = {
    "evaluation": "a smaller --eval-batch-size or --eval-accumulation-steps needs less",
    "generation": "a smaller steps_per_generation, max_completion_length or vLLM share needs less",
}


def limited_by_phases(workload: Workload, room: MemoryBudget, most: int, batch: int | None = None) -> int:
    """Returns the largest batch up to `most` beside which the phases between steps fit, under any policy.

    Bytes allocated by a phase grow linearly with the batch. A fixed `batch` is only checked.

    Raises:
        UserError: a phase does not fit beside a batch of 1, or beside `batch`.
    """
    first = batch or 1
    small = {name: trace.peak_allocated for name, trace in workload.trace_phases(first, before=1).items()}
    for name, needed in small.items():
        if needed > room.limit:
            raise UserError(
                f"the {name} beside a batch of {first} takes {format_bytes(needed)}, and there are "
                f"{format_bytes(room.limit)}: no policy changes that; {LESS[name]}"
            )
    if small and batch is None:
        for name, trace in workload.trace_phases(first + 2, before=1).items():
            grown = (trace.peak_allocated - small[name]) / 2
            most = min(most, first + int((room.limit - small[name]) / grown)) if grown > 0 else most
    return most


def memory_budget(
    budget: str | int | None, gpu: GPU | None, margin: str | float | None = None, launch: Launch | None = None,
    host: int | None = None,
) -> MemoryBudget:  # fmt: skip
    """The memory budget on `gpu`; None for the CPU, which has no context, and no margin unless one is given.

    Args:
        budget: bytes or text such as "24GiB"; None for all memory of the GPU.
        margin: an amount of memory, or a share of the budget as a float; None for 2 % on a GPU.
        launch: adds NCCL's buffers to the context.
        host: bytes of host memory that each process may take; None without a limit.

    Raises:
        UserError: no budget for the CPU, more than the GPU has, or a margin that is not a share of the budget.
    """
    if gpu is None:
        if budget is None:
            raise UserError("a plan for the CPU needs a budget, such as 600MiB: its memory is shared with all else")
        return _with_margin(parse_budget(budget), 0, margin or 0, host)
    given = gpu.memory if budget is None else parse_budget(budget)
    if given > gpu.memory:
        raise UserError(
            f"a budget of {format_bytes(given)}: {gpu.name} has {format_bytes(gpu.memory)}; "
            "give at most that, or a larger device"
        )
    context = gpu.context + (nccl_bytes(launch, gpu) if launch else 0)
    return _with_margin(given, context, MARGIN if margin is None else margin, host)


def _with_margin(budget: int, context: int, margin: str | float, host: int | None) -> MemoryBudget:
    if isinstance(margin, float):
        if not 0 <= margin < 1:
            raise UserError(f"margin {margin}: a share of the budget, from 0 up to, but not including, 1")
        return MemoryBudget(budget, context, round(margin * budget), margin, host)
    return MemoryBudget(budget, context, 0 if str(margin) == "0" else parse_budget(margin), host=host)


def largest_fitting(
    needs: Callable[[int], int], limit: int, most: int, known: Mapping[int, int] | None = None, tolerance: float = 0.0
) -> int:
    """The largest n of 1 ... `most` with needs(n) <= limit, 0 if there is none; `needs` must not fall with n.

    Interpolates between the ends of the bracket, which needs few calls if `needs` is linear, and halves the bracket
    every third time, which bounds the number of calls if it is not. `known` has values of `needs`. The result may miss
    the share `tolerance` of the largest n.
    """
    values = dict(known or {})

    def ask(n: int) -> int:
        if n not in values:
            values[n] = needs(n)
        return values[n]

    fits = max((n for n, need in values.items() if need <= limit and n <= most), default=0)
    over = min((n for n, need in values.items() if need > limit and fits < n <= most), default=most + 1)
    rounds = 0
    while over - fits > 1 + tolerance * fits:
        rounds += 1
        guess = _interpolated(values, fits, over, limit) if rounds % 3 else (fits + over) // 2
        n = min(max(guess, fits + 1), over - 1)
        if ask(n) <= limit:
            fits = n
        else:
            over = n
    return fits


def _interpolated(values: Mapping[int, int], fits: int, over: int, limit: int) -> int:
    """The n at which the line through the two known points nearest to the edge crosses `limit`."""
    below = sorted(n for n in values if n <= fits)
    points = [*below[-1:], over] if over in values else below[-2:]
    if len(points) < 2:
        return points[0] + 1 if below else 1
    a, b = points
    slope = (values[b] - values[a]) / (b - a)
    return over - 1 if slope <= 0 else int(a + (limit - values[a]) // slope)
