"""One row of a plan, the room that it must fit into, and what makes one row better than another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ckpt_ft.errors import UserError
from ckpt_ft.memory.gpus import GPU, find_gpu
from ckpt_ft.memory.record.cost import Host, step_seconds
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.units import GIB

TARGETS = ("throughput", "memory", "effective_batch")
# A CPU's speed is not modelled. These round figures (100 GFLOP/s, 10 GB/s, nothing for a launch) only rank policies by
# the arithmetic and traffic that they add.
NOMINAL_CPU = GPU("cpu", (8, 0), 1, 64 * GIB, 0, 10e9, 1e11, 0, 1e11, 1e11, 0, 1.0, 1.0, 1.0)
_NOMINAL_HOST = Host(per_op=5e-6, per_launch=0.0)
# Bytes a second between host and GPU, by its major compute capability: an x16 slot of PCIe 3.0, 4.0 and 5.0 by the
# specification (15.75, 31.5 and 63 GB/s), at 80 %: an assumption.
_SLOT = {7: 12.6e9, 8: 25.2e9, 9: 50.4e9, 10: 50.4e9, 12: 50.4e9}


@dataclass(frozen=True)
class Row:
    """A policy at a batch size, as traced.

    Attributes:
        peak, reserved: bytes; the same on "cpu".
        seconds: of one step, predicted. On "cpu" nominal (see `NOMINAL_CPU`): good for ranking only.
    """

    policy: str
    batch: int
    peak: int
    reserved: int
    seconds: float

    @property
    def samples_per_second(self) -> float:
        return self.batch / self.seconds

    @classmethod
    def of(cls, policy: str, batch: int, trace: StepTrace) -> Row:
        return cls(policy, batch, trace.peak_allocated, trace.peak_reserved, seconds(trace, policy))


def seconds(trace: StepTrace, policy: str = "none") -> float:
    """Predicted seconds of the measured step; nominal ones on "cpu".

    Under `offload` copies run beside the computation: the step takes at least as long as the slot needs for them.
    """
    start = trace.start
    ops = [op for op in trace.ops if op.at >= start]
    if trace.device == "cpu":
        return step_seconds(ops, NOMINAL_CPU, _NOMINAL_HOST)
    gpu = trace.gpu or find_gpu(trace.device)
    computing = step_seconds(ops, gpu)
    if "offload" not in policy.split(","):
        return computing
    copied = sum(op.nbytes // 2 for op in ops if op.name == "aten.copy_.default")  # each byte is read and written
    return max(computing, copied / _SLOT[gpu.arch[0]])


@dataclass(frozen=True)
class Room:
    """What a step may take: `budget` bytes, less the CUDA context, less a margin for what no trace sees."""

    budget: int
    context: int = 0
    margin: int = 0

    @property
    def limit(self) -> int:
        """Bytes that the allocator may reserve."""
        return self.budget - self.context - self.margin

    def fits(self, row: Row) -> bool:
        return row.reserved <= self.limit

    def needs(self, row: Row) -> int:
        """The smallest budget in which `row` fits with this context and margin."""
        return row.reserved + self.context + self.margin


def better(target: str) -> Callable[[Row], tuple[float, ...]]:
    """A sort key by which the best row is the largest.

    throughput: most samples a second. memory: fewest bytes reserved. effective_batch: the largest batch, then the
    faster. Between predicted speeds that agree to three digits the smaller footprint decides.
    """
    if target not in TARGETS:
        raise UserError(f"--target {target}: choose one of {', '.join(TARGETS)}")
    if target == "memory":
        return lambda row: (-row.reserved, row.samples_per_second)
    if target == "effective_batch":
        return lambda row: (row.batch, row.samples_per_second)
    return lambda row: (float(f"{row.samples_per_second:.3g}"), -row.reserved)


def frontier(rows: Iterable[Row]) -> list[Row]:
    """The rows that no other row beats in both bytes reserved and samples a second, fastest first."""
    best: list[Row] = []
    for row in sorted(rows, key=lambda row: (-row.samples_per_second, row.reserved)):
        if not best or row.reserved < best[-1].reserved:
            best.append(row)
    return best


def largest_fitting(needs: Callable[[int], int], limit: int, most: int, known: Mapping[int, int] | None = None) -> int:
    """The largest n of 1 ... `most` with needs(n) <= limit, 0 if there is none; `needs` must not fall with n.

    Interpolates between the ends of the bracket, which is exact after few calls where `needs` is linear, and halves
    it every third time, which bounds the calls where it is not. `known` holds values of `needs`.
    """
    values = dict(known or {})

    def ask(n: int) -> int:
        if n not in values:
            values[n] = needs(n)
        return values[n]

    fits = max((n for n, need in values.items() if need <= limit), default=0)
    over = min((n for n, need in values.items() if need > limit and n > fits), default=most + 1)
    rounds = 0
    while over - fits > 1:
        rounds += 1
        guess = _interpolated(values, fits, over, limit) if rounds % 3 else (fits + over) // 2
        n = min(max(guess, fits + 1), over - 1)
        if ask(n) <= limit:
            fits = n
        else:
            over = n
    return fits


def _interpolated(values: Mapping[int, int], fits: int, over: int, limit: int) -> int:
    """Where the line through the two known points nearest to the edge crosses `limit`."""
    below = sorted(n for n in values if n <= fits)
    points = [*below[-1:], over] if over in values else below[-2:]
    if len(points) < 2:
        return points[0] + 1 if below else 1
    a, b = points
    slope = (values[b] - values[a]) / (b - a)
    return over - 1 if slope <= 0 else int(a + (limit - values[a]) // slope)
