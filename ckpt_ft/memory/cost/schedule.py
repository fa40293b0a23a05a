"""Seconds of a step on a GPU: the schedule of the host that issues ops, the device, collectives and copies.

The host issues one op after another. The device starts a kernel when the host has issued it and the kernel before it
on its stream has ended, so a step of many small kernels takes the host's time. Collectives and copies between host and
device on streams of their own run beside the computation, which waits for them where the code lets it wait. kernels.py
has the seconds of a kernel.

Not modelled: stalls of the allocator, and Python outside of ops and checkpoints (data, logging).
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from ckpt_ft.memory.gpus import GPU

from .collectives import collective_seconds, memory_left, network_share
from .kernels import as_issued, device_seconds

if TYPE_CHECKING:
    from ckpt_ft.memory.record.events import Op
    from ckpt_ft.spec.launch import Launch

COPIES = "copies"  # the name of the copy engine's stream
HOST = "host"  # the name of the stream of what the host computes, such as an optimizer whose states are there
# Ops that give Python a value, or whose result has a size that depends on values: the host waits for the device.
_WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "aten.equal")
READ_BACK = 10e-6  # seconds from the end of a kernel until the host has its result and issues again
# Seconds of Python around an op: saved-tensor hooks and a checkpoint's own, or the dispatch mode of SAC
# (benchmarks/results/host_overhead.json, minus the plain step and the ops that run twice: 8 to 11 and 16 to 20 µs on
# three models).
_AROUND = {"": 0.0, "hooks": 10e-6, "mode": 17e-6}
# Further seconds of Python around one call: bitsandbytes' dequantisation (dequantize_4bit takes 46 µs for an 8 x 8
# block on a CPU, Linear4bit and its autograd function 30 µs; bitsandbytes 0.50.2, the machine of `Host`), and FSDP2's
# hooks around what it gathers and reduces (32 blocks of width 32 with and without `fully_shard`, minus the ops that it
# runs: benchmarks/host_overhead.py --fsdp2).
_SLOW_CALLS = {
    "ckpt_ft.dequantize_nf4.default": 70e-6,
    "fsdp.all_gather_copy_in.default": 550e-6,
    "fsdp.chunk_cat.default": 270e-6,
}
# Bytes per second that one thread reads and writes: 16 lines of 64 bytes are on their way from memory at a time, each
# for about 80 ns (Little's law with the L1 fill buffers of Golden Cove; Intel's optimization reference manual). One
# thread of PyTorch's fused AdamW reached 17 to 49e9 on an EPYC of 2026.
_OF_THREAD = 12.8e9
# Bytes per second of a machine's memory channels, by compute capability: two sockets with 6 channels of DDR4-2933
# (Cascade Lake), 8 of DDR4-3200 (DGX A100), 8 of DDR5-4800 (DGX H100), 8 of DDR5-5600 (DGX B200); else a desktop's two
# channels of DDR5-5600. 8 bytes a transfer.
_CHANNELS: dict[tuple[int, ...], float] = {(7,): 281.6e9, (8, 0): 409.6e9, (9,): 614.4e9, (10,): 716.8e9}
_DESKTOP = 89.6e9
_REACHED = 0.8  # share of it that a stream of reads and writes reaches (STREAM, cs.virginia.edu/stream)


def host_threads() -> int:
    """Threads of a process on the host: `accelerate launch` sets OMP_NUM_THREADS to 1, unless it is set."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return max(int(given), 1) if given.isdecimal() else 1


@dataclass(frozen=True)
class Host:
    """Seconds that the host needs to issue work.

    per_op: dispatch, autograd and the op's share of a model's Python, for every op, views included. Measured with a
        small Llama (12 layers, width 32, on CPU with one thread; forward, backward, AdamW; torch 2.13, a Xeon server).
    per_launch: cudaLaunchKernel, for every kernel: in a row, kernels of 2.9 µs start every 3.8 µs
        (developer.nvidia.com/blog/cuda-graphs).
    slower: how many times slower this host is than the measured one.
    bandwidth: bytes per second that the threads of one process read and write.
    """

    per_op: float = 5e-6
    per_launch: float = 3.8e-6
    slower: float = 1.0
    bandwidth: float = _OF_THREAD

    @classmethod
    def beside(cls, gpu: GPU, processes: int = 1) -> Host:
        """The host that clouds combine with this card, by its compute capability.

        A calibrated card has its own. Otherwise this is an assumption: Skylake and Cascade Lake at 2 to 2.5 GHz with
        V100 and T4, Rome and Ice Lake with A100 and A10, whose single threads are slower than the measured one by this
        factor.

        processes: of the machine, which share the bandwidth of its memory.
        """
        own = gpu.calibration
        share = _REACHED * (_CHANNELS.get(gpu.arch) or _CHANNELS.get(gpu.arch[:1], _DESKTOP)) / processes
        bandwidth = min(host_threads() * _OF_THREAD, share)
        if own is not None and own.per_op:
            return cls(own.per_op, own.per_launch, bandwidth=own.host_memory or bandwidth)
        slower = {6: 1.7, 7: 1.7, 8: 1.3 if gpu.arch < (8, 9) else 1.0}.get(gpu.arch[0], 1.0)
        return cls(slower=slower, bandwidth=bandwidth)

    def issue(self, op: Op) -> float:
        python = _AROUND[op.around] + _SLOW_CALLS.get(op.name, 0.0)
        return (self.per_op + op.kernels * self.per_launch + python) * self.slower


@dataclass(frozen=True)
class Parts:
    """The seconds of a step by what the device does.

    compute: kernels run. host, network, copies: the device waits for the host to issue ops, for a collective, or for
        copies between host and device. These four add up to `total`.
    issuing, communicating, copying: how long the host issues, collectives run and copies run in total, overlapped with
        computation or not.
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
        """The part that limits the step: "compute", "host", "network" or "copies"."""
        busy = {"compute": self.compute, "host": self.issuing, "network": self.communicating, "copies": self.copying}
        return max(busy, key=busy.__getitem__)

    @property
    def parts(self) -> dict[str, float]:
        """The parts of `total` above a microsecond, by names for people."""
        named = {
            "computing": self.compute, "waiting for the host": self.host,
            "waiting for the network": self.network, "waiting for copies": self.copies,
        }  # fmt: skip
        return {name: seconds for name, seconds in named.items() if seconds > 1e-6}

    def __add__(self, other: Parts) -> Parts:
        return Parts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, times: float) -> Parts:
        return Parts(*(times * part for part in astuple(self)))


class Span(NamedTuple):
    """When an op runs, in seconds from the step's begin.

    The host has issued it at `issued`; the device works on it from `start` to `end`, which are equal without a kernel.
    `stream` is "copies" for work of the copy engine.
    """

    op: Op
    issued: float
    start: float
    end: float
    stream: str


def step_seconds(ops: Iterable[Op], gpu: GPU, host: Host | None = None, launch: Launch | None = None) -> Parts:
    """Seconds from the first op's dispatch to the end of the last kernel on `gpu`, by part."""
    host = host or _host(gpu, launch)
    compute = for_host = for_network = for_copies = issuing = communicating = copying = 0.0
    copied = issued = clock = last = 0.0
    ends = set()  # of copies
    for op, issued, start, end, stream in schedule(ops, gpu, host, launch):
        issuing += host.issue(op)
        collective = op.wire and launch is not None
        if stream == COPIES:
            copying, copied = copying + end - start, end
            ends.add(end)
            continue
        issuing += end - start if stream == HOST else 0.0
        communicating += end - start if collective else 0.0
        last = max(last, end)
        if stream == "" and end > start:
            late = start - clock
            if start <= issued:
                for_host += late
            elif start in ends:
                for_copies += late
            else:
                for_network += late
            for_network += end - start if collective else 0.0
            compute += 0.0 if collective else end - start
            clock = end
    for_host += max(issued - clock, 0.0)
    for_network += max(last - max(issued, clock), 0.0)
    for_copies += max(copied - max(issued, last), 0.0)
    return Parts(compute, for_host, for_network, for_copies, issuing, communicating, copying)


def schedule(ops: Iterable[Op], gpu: GPU, host: Host | None = None, launch: Launch | None = None) -> Iterator[Span]:
    """When each op of a step runs, in the order in which they are issued.

    Each stream has a clock. A stream or host that waits for an event continues when the stream that recorded it gets
    there. Collectives of one process group run one after another, on whatever stream they are issued, and take SMs and
    memory bandwidth from the kernels beside them. Copies between host and device run one after another, too: a slot
    has both directions at once, which is not counted on.
    """
    host = host or _host(gpu, launch)
    issued = copying = network = 0.0
    free: defaultdict[str, float] = defaultdict(float)  # stream -> when its last kernel ends
    events: list[float] = []  # when each recorded one happens
    busy: deque[tuple[float, float]] = deque()  # when collectives run, from and to
    slower, left = network_share(gpu), memory_left(launch, gpu) if launch is not None else 1.0
    for op in as_issued(ops, gpu):
        if op.name.startswith("prim."):
            continue  # a query of a fake tensor, not work
        if op.name.startswith("event."):
            back = 1 + sum(op.shape)
            happens = events[-back] if back <= len(events) else 0.0
            if op.name == "event.record":
                events.append(free[op.stream])
            elif op.name == "event.wait":
                free[op.stream] = max(free[op.stream], happens)
            elif op.name == "event.await":
                issued = max([issued, *free.values()]) + READ_BACK * host.slower
            else:
                issued = max(issued, happens + READ_BACK * host.slower)
            continue
        issued += host.issue(op)
        start = max(free[op.stream], issued)
        if op.wire and launch is not None:
            start = max(start, network)
            free[op.stream] = network = start + collective_seconds(op.wire, launch, gpu, op.name, op.group)
            busy.append((start, network))
            yield Span(op, issued, start, network, op.stream)
        elif op.kernels:
            seconds = device_seconds(op, gpu)
            if not op.stream and (beside := _overlap(busy, start, start + seconds)):
                seconds += beside * max(slower, device_seconds(op, gpu, left) / seconds - 1)
            free[op.stream] = start + seconds
            yield Span(op, issued, start, start + seconds, op.stream)
            if gpu.is_cpu:
                issued = start + seconds
            elif _is_read_back(op.name):
                issued = max(issued, start + seconds + READ_BACK * host.slower)
        elif op.stream == HOST:
            start, issued = issued, issued + op.nbytes / host.bandwidth
            yield Span(op, issued, start, issued, HOST)
        elif op.nbytes:
            start = max(start, copying)
            free[op.stream] = copying = start + op.nbytes / gpu.host_bandwidth
            yield Span(op, issued, start, copying, COPIES)
        else:
            yield Span(op, issued, start, start, op.stream)


def _host(gpu: GPU, launch: Launch | None) -> Host:
    return Host.beside(gpu, 1 if launch is None else max(launch.processes // launch.machines, 1))


@cache
def _is_read_back(name: str) -> bool:
    return any(part in name for part in _WAITS)


def _overlap(busy: deque[tuple[float, float]], start: float, end: float) -> float:
    """Seconds between `start` and `end` in which collectives run; removes those that ended before `start`."""
    while busy and busy[0][1] <= start:
        busy.popleft()
    return sum(max(0.0, min(end, to) - max(start, begin)) for begin, to in busy if begin < end)
