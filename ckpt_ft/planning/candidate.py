"""Candidate: a policy at a batch size with its bytes and seconds, and the ranking of candidates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ckpt_ft.errors import UserError
from ckpt_ft.memory.cost.schedule import Host, Span
from ckpt_ft.memory.gpus import GPU
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.reading import Bytes, Count, Seconds
from ckpt_ft.spec.launch import Launch
from ckpt_ft.units import GIB

TARGETS = ("throughput", "memory", "effective_batch")
# The speed of CPUs is not modelled. These round figures (100 GFLOP/s, 10 GB/s, free launches) only rank policies by
# the arithmetic and memory traffic that they add.
NOMINAL_CPU = GPU("cpu", (8, 0), 1, 64 * GIB, 0, 10e9, 1e11, 0, 1e11, 1e11, 0, 1.0, 1.0, 1.0)
_NOMINAL_HOST = Host(per_op=5e-6, per_launch=0.0)


@dataclass(frozen=True)
class Candidate:
    """A policy at a batch size with its predicted memory and time.

    Attributes:
        batch: samples of a micro-batch.
        peak: peak bytes allocated.
        reserved: peak bytes reserved; on "cpu" the same as `peak`.
        seconds: of one optimizer step; nominal on "cpu" (see `NOMINAL_CPU`), for ranking only.
        accumulation: micro-batches of a step.
        launch: the processes, each with its own micro-batch; None for one process.
        bound: what limits the speed of the step: "compute", "host", "network" or "copies"; "" on "cpu".
    """

    policy: str
    batch: Count
    peak: Bytes
    reserved: Bytes
    seconds: Seconds
    accumulation: Count = 1
    launch: Launch | None = None
    bound: str = ""

    @property
    def samples_per_second(self) -> float:
        """Samples a second of one process."""
        return self.batch * self.accumulation / self.seconds

    @classmethod
    def of(
        cls, policy: str, batch: int, trace: StepTrace, accumulation: int = 1, peaks: tuple[int, int] | None = None
    ) -> Candidate:
        """The candidate of a trace. peaks: bytes allocated and reserved if known; else the trace is replayed."""
        peak, reserved = peaks or (trace.peak_allocated, trace.peak_reserved)
        bound = "" if trace.device == "cpu" else trace.seconds_parts.bound
        return cls(policy, batch, peak, reserved, seconds(trace), accumulation, trace.launch, bound)


def seconds(trace: StepTrace) -> float:
    """Predicted seconds of the measured step; nominal on "cpu"."""
    return trace.seconds_on(NOMINAL_CPU, _NOMINAL_HOST).total if trace.device == "cpu" else trace.seconds


def spans(trace: StepTrace) -> Iterator[Span]:
    """The predicted time span of each op of the measured step; nominal on "cpu"."""
    return trace.schedule_on(NOMINAL_CPU, _NOMINAL_HOST) if trace.device == "cpu" else trace.schedule()


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
