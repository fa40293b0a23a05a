"""Candidate: a policy at a batch size with its bytes and seconds, and what makes one better than another."""

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
# A CPU's speed is not modelled. These round figures (100 GFLOP/s, 10 GB/s, nothing for a launch) only rank policies by
# the arithmetic and traffic that they add.
NOMINAL_CPU = GPU("cpu", (8, 0), 1, 64 * GIB, 0, 10e9, 1e11, 0, 1e11, 1e11, 0, 1.0, 1.0, 1.0)
_NOMINAL_HOST = Host(per_op=5e-6, per_launch=0.0)


@dataclass(frozen=True)
class Candidate:
    """A policy at a batch size, as traced.

    Attributes:
        batch: samples of a micro-batch.
        peak, reserved: bytes; the same on "cpu".
        seconds: of one optimizer step, predicted. On "cpu" nominal (see `NOMINAL_CPU`): good for ranking only.
        accumulation: micro-batches of the step.
        launch: on how many processes, each with its own micro-batch; None for one.
        bound: what the step could not be faster than: "compute", "host", "network", "copies"; "" on "cpu".
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
        """Of one process."""
        return self.batch * self.accumulation / self.seconds

    @classmethod
    def of(
        cls, policy: str, batch: int, trace: StepTrace, accumulation: int = 1, peaks: tuple[int, int] | None = None
    ) -> Candidate:
        """peaks: bytes allocated and reserved, where they are known without a replay of the trace."""
        peak, reserved = peaks or (trace.peak_allocated, trace.peak_reserved)
        bound = "" if trace.device == "cpu" else trace.seconds_parts.bound
        return cls(policy, batch, peak, reserved, seconds(trace), accumulation, trace.launch, bound)


def seconds(trace: StepTrace) -> float:
    """Predicted seconds of the measured step; nominal ones on "cpu"."""
    return trace.seconds_on(NOMINAL_CPU, _NOMINAL_HOST).total if trace.device == "cpu" else trace.seconds


def spans(trace: StepTrace) -> Iterator[Span]:
    """When each op of the measured step runs; nominally on "cpu"."""
    return trace.schedule_on(NOMINAL_CPU, _NOMINAL_HOST) if trace.device == "cpu" else trace.schedule()


def better(target: str) -> Callable[[Candidate], tuple[float, ...]]:
    """A sort key by which the best candidate is the largest.

    throughput: most samples a second. memory: fewest bytes reserved. effective_batch: the largest batch, then the
    faster. Between predicted speeds that agree to three digits the smaller footprint decides.
    """
    if target not in TARGETS:
        raise UserError(f"target '{target}': choose one of {', '.join(TARGETS)}")
    if target == "memory":
        return lambda candidate: (-candidate.reserved, candidate.samples_per_second)
    if target == "effective_batch":
        return lambda candidate: (candidate.batch, candidate.samples_per_second)
    return lambda candidate: (float(f"{candidate.samples_per_second:.3g}"), -candidate.reserved)


def frontier(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The candidates that no other beats in both bytes reserved and samples a second, fastest first."""
    best: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda candidate: (-candidate.samples_per_second, candidate.reserved)):
        if not best or candidate.reserved < best[-1].reserved:
            best.append(candidate)
    return best
