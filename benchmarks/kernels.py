"""Errors of predicted seconds of single kernels by GPU and kind: median, 90th percentile, worst.

python benchmarks/kernels.py    # benchmarks/data/kernel_latencies_fp32.csv
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.pages import DATA, table
from ckpt_ft.memory.cost.kernels import device_seconds
from ckpt_ft.memory.cost.op_work import measure
from ckpt_ft.memory.gpus import GPU, find_gpu
from ckpt_ft.memory.record.events import Op

# Seconds that a published timing includes besides the kernel. Two events are recorded around one call, and the GPU is
# idle when it starts: it waits while the host issues the call, which takes longer for a module, and for a Linear with
# a bias, for which cuBLASLt searches a kernel. On a busy GPU this time does not show.
CALL = {"linear": 32e-6, "bmm": 19e-6, "ln": 24e-6, "softmax": 15e-6}
ELEMENTWISE_CALL = 12e-6
LOAD = 0.02  # seconds: longer kernels were timed under load, because each was repeated
PCIE = {"a100-80gb-pcie": ("a100-80gb", 1935e9), "a100-40gb-pcie": ("a100-40gb", 1555e9)}
aten = torch.ops.aten
UNARY = {"relu": aten.relu, "tanh": aten.tanh, "gelu": aten.gelu}
BINARY = {"add": aten.add, "mul": aten.mul, "div": aten.div, "pow": aten.pow}


@cache
def card(name: str, under_load: bool) -> GPU:
    """Returns the GPU of a row; PCIe cards have their own memory."""
    known, bandwidth = PCIE.get(name, (name, 0.0))
    gpu = find_gpu(known) if under_load else replace(find_gpu(known), sustained=1.0)
    return replace(gpu, bandwidth=bandwidth) if bandwidth else gpu


SIZES = ("B", "M", "N", "K", "H")


@cache
def timed(op: str, *sizes: str) -> Op:
    """Returns the call that a row timed, on the meta device; other GPUs have rows of the same shapes.

    In rows of matmuls N is the number of terms of each sum, as the tiles of their kernels show.
    """
    b, m, n, k, h = (int(float(size or 0)) for size in sizes)
    func, args, out = call(op, b, m, n, k, h)
    flops, nbytes, dtype, kernels, shape, _ = measure(func, args, {}, out)
    return Op(str(func), flops, nbytes, dtype, "", "", 0, kernels, shape=shape)


def call(op: str, b: int, m: int, n: int, k: int, h: int) -> tuple[Any, tuple[Any, ...], Any]:
    """Returns an operator, its arguments and its result."""
    if op == "linear":
        return aten.mm.default, (meta(m, n), meta(k, n).t()), meta(m, k)
    if op == "bmm":
        return aten.bmm.default, (meta(b, m, n), meta(b, n, k)), meta(b, m, k)
    x = meta(b, h)
    if op == "softmax":
        return aten._softmax.default, (x, -1, False), x
    if op == "ln":
        return aten.native_layer_norm.default, (x, [h], meta(h), meta(h), 1e-5), (x, meta(b, 1), meta(b, 1))
    if op in UNARY:
        return UNARY[op].default, (x,), x
    overload = "Tensor_Scalar" if op == "powu" else "Tensor_Tensor" if op == "pow" else "Tensor"
    return getattr(BINARY[op.removesuffix("u")], overload), (x, 2.0 if op.endswith("u") else x), x


def meta(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


def predicted(row: dict[str, str]) -> float:
    """Returns the predicted seconds of a row's call."""
    op = timed(row["op"], *(row[name] for name in SIZES))
    call_seconds = CALL.get(row["op"], ELEMENTWISE_CALL)
    burst, loaded = (call_seconds + device_seconds(op, card(row["gpu"], under_load)) for under_load in (False, True))
    return loaded if burst > LOAD else burst


def rows() -> Iterator[dict[str, str]]:
    """Returns the published rows of single kernels, each shape once."""
    seen = set()
    with (DATA / "kernel_latencies_fp32.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            key = tuple(row[name] for name in ("op", "gpu", *SIZES))
            if key not in seen:
                seen.add(key)
                yield row


KINDS = {"linear": "matmul", "bmm": "batched matmul", "softmax": "softmax", "ln": "layer norm"}
Errors = dict[tuple[str, str], list[tuple[float, dict[str, str]]]]


def errors() -> Errors:
    """Returns, for each (kind, GPU), signed errors with their rows, the smallest first."""
    found: Errors = defaultdict(list)
    for row in rows():
        error = predicted(row) / (float(row["latency_ms"]) / 1e3) - 1
        found[KINDS.get(row["op"], "elementwise"), row["gpu"]].append((error, row))
    return {key: sorted(pairs, key=lambda pair: abs(pair[0])) for key, pairs in sorted(found.items())}


def of_kinds(found: Errors) -> str:
    """Returns the Markdown table of `errors`."""
    lines = []
    for (kind, gpu), pairs in found.items():
        signed = [error for error, _ in pairs]
        middle, most = (f"{abs(signed[int(share * len(signed))]):.1%}" for share in (0.5, 0.9))
        lines.append(
            [kind, gpu, str(len(signed)), middle, most, f"{signed[-1]:+.1%}", f"{statistics.median(signed):+.1%}"]
        )
    return table(("kernel", "card", "rows", "median error", "90th percentile", "worst", "bias"), lines, words=2)


def under_load(found: Errors) -> str:
    """Returns a sentence with the median errors of matmuls on T4 and L4 that ran longer than `LOAD`."""
    said = []
    for (kind, gpu), pairs in found.items():
        long = [abs(error) for error, row in pairs if float(row["latency_ms"]) > LOAD * 1e3]
        if gpu in ("l4", "t4") and "matmul" in kind:
            said.append(f"{statistics.median(long):.1%} of {len(long)} ({kind}, {gpu.upper()})")
    return ", ".join(said)


if __name__ == "__main__":
    print(of_kinds(errors()))
