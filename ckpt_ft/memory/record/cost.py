"""Seconds of a step on a GPU: one model of the host that issues, the device that computes and the engines that move.

The host issues one operator after another; the device starts a kernel when the host has issued it and the one before
has ended, so that a step of many small kernels takes the host's time. Collectives and copies between host and device
run beside the computation, which waits for them where it needs what they bring. What a kernel takes is in kernels.py.

What it leaves out: the allocator's stalls, and Python beyond that of operators and checkpoints (data, logging).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from ckpt_ft.memory.distributed.links import collective_seconds, memory_left, network_share
from ckpt_ft.memory.gpus import GPU

from .events import Op
from .kernels import device_seconds

if TYPE_CHECKING:
    from ckpt_ft.spec.launch import Launch

COPIES = "copies"  # what the copy engine's clock is called
# Ops that hand a value to Python, or make a result whose size is a value: the host waits for the device.
_WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "aten.equal")
READ_BACK = 10e-6  # seconds from a kernel's end until the host has its result and has issued again
# Python around an op (benchmarks/results/host_overhead.json, less the plain step's and the ops run twice: 8 to 11 and
# 16 to 20 µs on three models): saved-tensor hooks and a checkpoint's own; a dispatch mode, SAC's.
_AROUND = {"": 0.0, "hooks": 10e-6, "mode": 17e-6}
# Python around one call, beyond an op's: bitsandbytes' dequantisation (its dequantize_4bit takes 46 µs for an 8 x 8
# block on a CPU, Linear4bit and its autograd function 30 more; bitsandbytes 0.50.2, the machine of `Host`); FSDP2's
# hooks around what it gathers and reduces (32 blocks of width 32 with and without `fully_shard`, less the ops that it
# runs: benchmarks/host_overhead.py --fsdp2).
_SLOW_CALLS = {
    "ckpt_ft.dequantize_nf4.default": 70e-6,
    "fsdp.all_gather_copy_in.default": 550e-6,
    "fsdp.chunk_cat.default": 270e-6,
}


@dataclass(frozen=True)
class Host:
    """Seconds that the host needs to issue work.

    per_op: dispatch, autograd and its share of a model's Python, for every op, views included. Measured with a small
        Llama (12 layers, width 32, on CPU with one thread; forward, backward, AdamW; torch 2.13, a Xeon server).
    per_launch: cudaLaunchKernel, for every kernel: launched one after another, kernels of 2.9 µs come every 3.8 µs
        (developer.nvidia.com/blog/cuda-graphs).
    slower: how many times slower than that the host at hand is.
    """

    per_op: float = 5e-6
    per_launch: float = 3.8e-6
    slower: float = 1.0

    @classmethod
    def beside(cls, gpu: GPU) -> Host:
        """The host that clouds put beside this card: of its years, by its compute capability.

        An assumption: Skylake and Cascade Lake at 2 to 2.5 GHz beside V100 and T4, Rome and Ice Lake beside A100 and
        A10, whose single threads are that much slower than the one that was measured.
        """
        return cls(slower={6: 1.7, 7: 1.7, 8: 1.3 if gpu.arch < (8, 9) else 1.0}.get(gpu.arch[0], 1.0))

    def issue(self, op: Op) -> float:
        """Seconds to issue one op."""
        python = _AROUND[op.around] + _SLOW_CALLS.get(op.name, 0.0)
        return (self.per_op + op.kernels * self.per_launch + python) * self.slower


@dataclass(frozen=True)
class Parts:
    """Where a step's seconds go.

    compute: its kernels run. host, network, copies: the device waits for the host to issue, for a collective, for
        copies between host and device; these four add up to `total`.
    issuing, communicating, copying: how long the host issues, collectives run and copies run, beside the rest or not.
    """

    compute: float = 0.0
    host: float = 0.0
    network: float = 0.0
    copies: float = 0.0
    issuing: float = 0.0
    communicating: float = 0.0
    copying: float = 0.0

    @property
    def total(self) -> float:
        """Seconds from the first op's dispatch to the end of the last kernel, collective or copy."""
        return self.compute + self.host + self.network + self.copies

    @property
    def bound(self) -> str:
        """What the step could not be faster than: "compute", "host", "network" or "copies"."""
        busy = {
            "compute": self.compute,
            "host": self.issuing,
            "network": self.communicating,
            "copies": self.copying,
        }
        return max(busy, key=busy.__getitem__)

    @property
    def parts(self) -> dict[str, float]:
        """What `total` consists of, by a name that people read; without what is nothing."""
        named = {
            "computing": self.compute,
            "waiting for the host": self.host,
            "waiting for the network": self.network,
            "waiting for copies": self.copies,
        }
        return {name: seconds for name, seconds in named.items() if seconds > 1e-6}

    def __add__(self, other: Parts) -> Parts:
        return Parts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, times: float) -> Parts:
        return Parts(*(times * part for part in astuple(self)))


class Span(NamedTuple):
    """When an op runs, in seconds from the step's begin: the host is done issuing it at `issued`, the device works on
    it from `start` to `end`, on the stream "copies" where a copy engine does; `start` is `end` without a kernel."""

    op: Op
    issued: float
    start: float
    end: float
    stream: str


def step_seconds(ops: Iterable[Op], gpu: GPU, host: Host | None = None, launch: Launch | None = None) -> Parts:
    """Seconds from the first op's dispatch to the last kernel's end on `gpu`, by what they go to."""
    host = host or Host.beside(gpu)
    compute = for_host = for_network = issuing = communicating = copying = issued = clock = last = 0.0
    for op, issued, start, end, stream in schedule(ops, gpu, host, launch):
        issuing += host.issue(op)
        collective = op.wire and launch is not None
        if stream == COPIES:
            copying = end
            continue
        communicating += end - start if collective else 0.0
        last = max(last, end)
        if stream == "" and end > start:
            late = start - clock
            for_host += late if start <= issued else 0.0
            for_network += (late if start > issued else 0.0) + (end - start if collective else 0.0)
            compute += 0.0 if collective else end - start
            clock = end
    for_host += max(issued - clock, 0.0)
    for_network += max(last - max(issued, clock), 0.0)
    return Parts(
        compute, for_host, for_network, max(copying - max(issued, last), 0.0), issuing, communicating, copying
    )


def schedule(ops: Iterable[Op], gpu: GPU, host: Host | None = None, launch: Launch | None = None) -> Iterator[Span]:
    """When each op of a step runs, in the order in which they are issued.

    Each stream has a clock; an event that is recorded in one holds up the stream that waits for it. Collectives of one
    process group follow one another, whichever stream they are issued to, and take SMs and memory's bandwidth from the
    kernels beside them.
    The copy engine's clock waits for nobody: it says what the copies need at least.
    """
    host = host or Host.beside(gpu)
    issued = copying = network = 0.0
    free: defaultdict[str, float] = defaultdict(float)  # stream -> when its last kernel ends
    events: dict[str, float] = {}
    busy: deque[tuple[float, float]] = deque()  # when collectives run, from and to
    slower, left = network_share(gpu), memory_left(launch, gpu) if launch is not None else 1.0
    for op in ops:
        if op.name.startswith("prim."):
            continue  # a question to a fake tensor, not work
        if op.name == "event.record":
            events[op.module] = free[op.stream]
            continue
        if op.name == "event.wait":
            free[op.stream] = max(free[op.stream], events.get(op.module, 0.0))
            continue
        if op.name == "event.await":
            issued = max([issued, *free.values()]) + READ_BACK * host.slower
            continue
        issued += host.issue(op)
        start = max(free[op.stream], issued)
        if op.wire and launch is not None:
            start = max(start, network)
            free[op.stream] = network = start + collective_seconds(op.wire, launch, gpu, op.name)
            busy.append((start, network))
            yield Span(op, issued, start, network, op.stream)
        elif op.kernels:
            seconds = device_seconds(op, gpu)
            if not op.stream and (beside := _overlap(busy, start, start + seconds)):
                seconds += beside * max(slower, device_seconds(op, gpu, left) / seconds - 1)
            free[op.stream] = start + seconds
            yield Span(op, issued, start, start + seconds, op.stream)
            if _is_read_back(op.name):
                issued = max(issued, start + seconds + READ_BACK * host.slower)
        elif op.nbytes:
            start, copying = copying, copying + op.nbytes / gpu.host_bandwidth
            yield Span(op, issued, start, copying, COPIES)
        else:
            yield Span(op, issued, start, start, op.stream)


@cache
def _is_read_back(name: str) -> bool:
    return any(part in name for part in _WAITS)


def _overlap(busy: deque[tuple[float, float]], start: float, end: float) -> float:
    """Seconds between `start` and `end` in which collectives run; those that ended before `start` are dropped."""
    while busy and busy[0][1] <= start:
        busy.popleft()
    return sum(max(0.0, min(end, to) - max(start, begin)) for begin, to in busy if begin < end)
