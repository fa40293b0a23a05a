"""Errors of predicted seconds of single kernels by GPU and kind: median, 90th percentile, worst.

python benchmarks/kernels.py             # benchmarks/data/kernel_latencies_fp32.csv and hf_op_latencies.csv
python benchmarks/kernels.py --worst 5   # and the worst shapes of each
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ckpt_ft.errors import run
from ckpt_ft.memory.cost.kernels import device_seconds
from ckpt_ft.memory.cost.op_work import measure
from ckpt_ft.memory.gpus import GPU, find_gpu
from ckpt_ft.memory.record.events import Op

DATA = Path(__file__).resolve().parent / "data"
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


def card(name: str, under_load: bool) -> GPU:
    """Returns the GPU of a row; PCIe cards have their own memory."""
    known, bandwidth = PCIE.get(name, (name, 0.0))
    gpu = find_gpu(known) if under_load else replace(find_gpu(known), sustained=1.0)
    return replace(gpu, bandwidth=bandwidth) if bandwidth else gpu


def call(row: dict[str, str]) -> tuple[Any, tuple[Any, ...], Any]:
    """Returns the operator that a row timed, its arguments and its result, on the meta device.

    In rows of matmuls N is the number of terms of each sum, as the tiles of their kernels show.
    """
    b, m, n, k, h = (int(float(row[name] or 0)) for name in ("B", "M", "N", "K", "H"))
    op = row["op"]
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
    func, args, out = call(row)
    flops, nbytes, dtype, kernels, shape, _ = measure(func, args, {}, out)
    op = Op(str(func), flops, nbytes, dtype, "", "", 0, kernels, shape=shape)
    call_seconds = CALL.get(row["op"], ELEMENTWISE_CALL)
    burst, loaded = (call_seconds + device_seconds(op, card(row["gpu"], under_load)) for under_load in (False, True))
    return loaded if burst > LOAD else burst


def rows() -> Iterator[dict[str, str]]:
    """Returns the published rows of single kernels, each shape once."""
    seen = set()
    with (DATA / "kernel_latencies_fp32.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            key = tuple(row[name] for name in ("op", "gpu", "B", "M", "N", "K", "H"))
            if key not in seen:
                seen.add(key)
                yield row


KINDS = {"linear": "matmul", "bmm": "batched matmul", "softmax": "softmax", "ln": "layer norm"}
HEADER = ("kernel", "card", "rows", "median error", "90th percentile", "worst", "bias")
Errors = dict[tuple[str, str], list[tuple[float, dict[str, str]]]]


def errors() -> Errors:
    """Returns, for each (kind, GPU), signed errors with their rows, the smallest first."""
    found: Errors = defaultdict(list)
    for row in rows():
        error = predicted(row) / (float(row["latency_ms"]) / 1e3) - 1
        found[KINDS.get(row["op"], "elementwise"), row["gpu"]].append((error, row))
    return {key: sorted(pairs, key=lambda pair: abs(pair[0])) for key, pairs in sorted(found.items())}


def table(found: Errors) -> str:
    """Returns the Markdown table of `errors`."""
    lines = ["| " + " | ".join(line) + " |" for line in (HEADER, ("---", "---", *["---:"] * 5))]
    for (kind, gpu), pairs in found.items():
        signed = [error for error, _ in pairs]
        middle, most = (abs(signed[int(share * len(signed))]) for share in (0.5, 0.9))
        figures = f"{middle:.1%} | {most:.1%} | {signed[-1]:+.1%} | {statistics.median(signed):+.1%}"
        lines.append(f"| {kind} | {gpu} | {len(signed)} | {figures} |")
    return "\n".join(lines)


def under_load(found: Errors) -> str:
    """Returns a sentence with the median errors of matmuls on T4 and L4 that ran longer than `LOAD`."""
    said = []
    for (kind, gpu), pairs in found.items():
        long = [abs(error) for error, row in pairs if float(row["latency_ms"]) > LOAD * 1e3]
        if gpu in ("l4", "t4") and "matmul" in kind:
            said.append(f"{statistics.median(long):.1%} of {len(long)} ({kind}, {gpu.upper()})")
    return ", ".join(said)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worst", type=int, default=0, help="also print so many worst shapes of each kind and card")
    arguments = parser.parse_args()
    found = errors()
    print(table(found))
    for (kind, gpu), pairs in found.items() if arguments.worst else ():
        print(f"\n{kind}, {gpu}")
        for error, row in pairs[-arguments.worst :]:
            sizes = " ".join(f"{name}={row[name]}" for name in "BMNKH" if row[name])
            print(f"    {error:+.1%} {sizes} {row['latency_ms']} ms {row['kernel'][:40]}")
    return 0


if __name__ == "__main__":
    run(main)
