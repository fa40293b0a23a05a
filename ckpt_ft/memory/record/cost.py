"""Seconds of a step on a GPU: a roofline for each kernel on the device's clock, the time to issue it on the host's.

A kernel takes what its arithmetic or its memory traffic needs, whichever is longer (roofline: Williams et al. 2009).
Large matmuls reach the rates in gpus.py; small ones do not fill the last wave of SMs. The device starts a kernel when
the host has issued it and the one before has ended, so that a step of many small kernels takes the host's time.
Copies between host and device (`offload`) run beside it on an engine of their own: the step lasts at least as long.

What it leaves out: the caches, which speed up small tensors; the allocator's stalls; and the Python that SAC and
checkpoint hooks run around each op, which makes a launch-bound step slower than is said here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ckpt_ft.memory.distributed.links import collective_seconds
from ckpt_ft.memory.gpus import GPU

from .events import Op

if TYPE_CHECKING:
    from ckpt_ft.memory.distributed.launch import Launch

COPIES = "copies"  # what the copy engine's clock is called
TILE = 128 * 128  # elements of the output that one thread block of a large cuBLAS or CUTLASS kernel computes
KERNEL_SHORTEST, KERNEL_GAP = 2e-6, 0.9e-6  # seconds: an empty kernel, and between two of them (see Host.per_launch)

# Shares of a large matmul's rate, read off figure 4 of FlashAttention-2 (arXiv:2307.08691: A100, forward and backward,
# long sequences): about 180 TFLOP/s against cuBLAS's 260, and 100 for CUTLASS's memory-efficient attention.
_ATTENTION = {"flash": 0.7, "cudnn": 0.7, "efficient": 0.38}
# Statistics first, then the normalised values: the input is read twice (ATen/native/cuda/{Normalization,group_norm}).
_TWO_PASSES = ("batch_norm", "group_norm")


@dataclass(frozen=True)
class Host:
    """Seconds that the host needs to issue work.

    per_op: dispatch, autograd and its share of a model's Python, for every op, views included. Measured with a small
        Llama (12 layers, width 32, on CPU with one thread; forward, backward, AdamW; torch 2.13, a Xeon server).
    per_launch: cudaLaunchKernel, for every kernel: launched one after another, kernels of 2.9 µs come every 3.8 µs
        (developer.nvidia.com/blog/cuda-graphs).
    """

    per_op: float = 5e-6
    per_launch: float = 3.8e-6


DEFAULT_HOST = Host()


class Span(NamedTuple):
    """When an op runs, in seconds from the step's begin: the host is done issuing it at `issued`, the device works on
    it from `start` to `end`, on the stream "copies" where a copy engine does; `start` is `end` without a kernel."""

    op: Op
    issued: float
    start: float
    end: float
    stream: str


def step_seconds(ops: Iterable[Op], gpu: GPU, host: Host = DEFAULT_HOST, launch: Launch | None = None) -> float:
    """Seconds from the first op's dispatch to the last kernel's end on `gpu`."""
    return max((max(span.issued, span.end) for span in schedule(ops, gpu, host, launch)), default=0.0)


def schedule(ops: Iterable[Op], gpu: GPU, host: Host = DEFAULT_HOST, launch: Launch | None = None) -> Iterator[Span]:
    """When each op of a step runs, in the order in which they are issued.

    Each stream has a clock; an event that is recorded in one holds up the stream that waits for it. Collectives of one
    process group follow one another, whichever stream they are issued to. The copy engine's clock waits for nobody:
    it says what the copies need at least.
    """
    issued = copying = network = 0.0
    free: defaultdict[str, float] = defaultdict(float)  # stream -> when its last kernel ends
    events: dict[str, float] = {}
    for op in ops:
        if op.name.startswith("prim."):
            continue  # a question to a fake tensor, not work
        if op.name == "event.record":
            events[op.module] = free[op.stream]
        elif op.name == "event.wait":
            free[op.stream] = max(free[op.stream], events.get(op.module, 0.0))
        elif op.wire and launch is not None:
            issued += host.per_op + host.per_launch
            start = max(free[op.stream], issued, network)
            free[op.stream] = network = start + collective_seconds(op.wire, launch, gpu)
            yield Span(op, issued, start, network, op.stream)
        else:
            issued += host.per_op + op.kernels * host.per_launch
            if op.kernels:
                start = max(free[op.stream], issued)
                free[op.stream] = start + device_seconds(op, gpu)
                yield Span(op, issued, start, free[op.stream], op.stream)
            elif op.nbytes:
                start, copying = copying, copying + op.nbytes / gpu.host_bandwidth
                yield Span(op, issued, start, copying, COPIES)
            else:
                start = max(free[op.stream], issued)
                yield Span(op, issued, start, start, op.stream)


def device_seconds(op: Op, gpu: GPU) -> float:
    """Seconds that the kernels of one op keep `gpu` busy."""
    passes = 1.5 if any(name in op.name for name in _TWO_PASSES) else 1.0
    memory = op.nbytes * passes / (gpu.bandwidth * gpu.bandwidth_efficiency)
    arithmetic = op.flops / _rate(op, gpu) if op.flops else 0.0
    return max(memory, arithmetic, op.kernels * KERNEL_SHORTEST) + op.kernels * KERNEL_GAP


def _rate(op: Op, gpu: GPU) -> float:
    """FLOP/s of an op that multiplies matrices."""
    # torch's defaults: convolutions may round fp32 to TF32 (cudnn.allow_tf32), matmuls may not.
    rate = gpu.matmul_rate(op.dtype, tf32="convolution" in op.name)
    if "attention" in op.name:
        return rate * next((share for kind, share in _ATTENTION.items() if kind in op.name), 1.0)
    return rate * _wave_fill(op.flops, gpu.sms)


def _wave_fill(flops: int, sms: int) -> float:
    """Share of the SMs' time that a matmul's tiles fill: its last wave is partly empty.

    An op's record holds no shapes: rows, columns and terms of each sum are taken to be equally many. Where they are
    far from it, with an edge of a few dozen, the matmul takes the time of its memory traffic anyway.
    """
    tiles = max((flops / 2) ** (2 / 3) / TILE, 1.0)
    return tiles / (math.ceil(tiles / sms) * sms)
