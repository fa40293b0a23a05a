"""Errors of predicted seconds of single operators of Hugging Face's models against published timings, by kind.

    python benchmarks/operators.py

The rows (benchmarks/data/hf_op_latencies.csv) are medians of triton.testing.do_bench, which clears the cache before
each call and lets the host run ahead. Here each operator is traced on fake tensors: forward, backward and both, with
gradients that add up from one call to the next where the published script let them.
"""

from __future__ import annotations

import csv
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ckpt_ft.errors import run
from ckpt_ft.memory.cost.kernels import device_seconds
from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.memory.gpus import find_gpu

ROWS = Path(__file__).resolve().parent / "data" / "hf_op_latencies.csv"
BENCH = 6e-6  # seconds that do_bench's two events add to a kernel between them


class RMSNorm(nn.Module):
    """The norm of transformers: in fp32, one operator after another."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), without biases."""

    def __init__(self, size: int, inner: int, act: str) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(size, inner, bias=False), nn.Linear(size, inner, bias=False)
        self.down, self.act = nn.Linear(inner, size, bias=False), ACT2FN[act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Rope(nn.Module):
    """Rotary positions of queries and keys, which are transposed views as in attention."""

    def __init__(self, size: int, tokens: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        head = size // heads
        self.q = nn.Parameter(torch.empty(1, tokens, heads, head))
        self.k = nn.Parameter(torch.empty(1, tokens, kv_heads, head))
        self.cos, self.sin = (nn.Buffer(torch.empty(1, tokens, head)) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.turned = self.q.transpose(1, 2), self.k.transpose(1, 2)
        rotated: tuple[Tensor, Tensor] = apply_rotary_pos_emb(*self.turned, self.cos, self.sin)
        return rotated


class Loss(nn.Module):
    """Cross entropy of logits, or after a linear layer."""

    def __init__(self, size: int, vocabulary: int) -> None:
        super().__init__()
        self.head = nn.Linear(size, vocabulary, bias=False) if size else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(x), torch.zeros(x.shape[0], dtype=torch.long))


def module(row: dict[str, str]) -> tuple[nn.Module, tuple[int, ...], torch.dtype]:
    """Returns the module that a row timed, the shape of its input and its dtype."""
    config = json.loads(row["config"])
    name, _, value = row["x"].partition("=")
    named = {("rope", "H"): "hidden_size", ("rope", "T"): "seq_len"}.get((row["op"], name), name)
    at = {**config, named: int(value)}
    dtype = torch.bfloat16 if "bfloat16" in config.get("dtype", "") else torch.float32
    made: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
        "cross_entropy": lambda: (Loss(0, 0), (at["B"] * at["T"], at["V"])),
        "fused_linear_cross_entropy": lambda: (Loss(at["H"], at["V"]), (at["BT"], at["H"])),
        "layer_norm": lambda: (nn.LayerNorm(at["N"]), (at["M"], at["N"])),
        "rms_norm": lambda: (RMSNorm(at["H"]), (at["M"], at["H"])),
        "swiglu": lambda: (GatedMLP(4096, 11008, "silu"), (at["B"], at["T"], 4096)),
        "geglu": lambda: (GatedMLP(4096, 11008, "gelu_pytorch_tanh"), (at["bsz"], at["T"], 4096)),
        "rope": lambda: (Rope(at["hidden_size"], at["seq_len"], 32, 8), (1,)),
        "embedding": lambda: (nn.Embedding(at["V"], at["D"]), (at["B"], at["T"])),
    }
    with torch.device("meta"):
        built, shape = made[row["op"]]()
    return built.to(dtype), shape, dtype


def predicted(row: dict[str, str]) -> float:
    """Returns the predicted seconds of a row's passes."""
    built, shape, dtype = module(row)
    x = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
    given = torch.zeros(shape, dtype=torch.long) if row["op"] == "embedding" else nn.Parameter(x)

    def step(model: nn.Module, _: object) -> None:
        out = model(given)
        results = out if isinstance(out, tuple) else (out,)
        gradients = None if results[0].dim() == 0 else [torch.ones_like(o) for o in results]
        if isinstance(model, Rope):  # its script requests them and adds them to nothing
            torch.autograd.grad(results, model.turned, gradients)
        else:
            torch.autograd.backward(results, gradients)

    trace = trace_step(built, step, device=row["gpu"])
    phases = {"forward": ("forward",), "backward": ("backward",), "full": ("forward", "backward")}[row["pass"]]
    gpu = find_gpu(row["gpu"])
    timed = [op for op in trace.ops if op.at >= trace.start and op.phase in phases and op.kernels]
    return BENCH + sum(device_seconds(op, gpu) for op in timed if "ones_like" not in op.name)


HEADER = ("operator", "pass", "card", "rows", "median error", "worst", "bias")


def table() -> str:
    """Returns the Markdown table of all rows."""
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    with ROWS.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            error = predicted(row) / (float(row["median_ms"]) / 1e3) - 1
            found[row["op"], row["pass"], row["gpu"]].append(error)
    lines = ["| " + " | ".join(line) + " |" for line in (HEADER, ("---", "---", "---", *["---:"] * 4))]
    for key, signed in found.items():
        sizes = sorted(map(abs, signed))
        figures = f"{statistics.median(sizes):.1%} | {sizes[-1]:.1%} | {statistics.median(signed):+.1%}"
        lines.append(f"| {' | '.join(key)} | {len(signed)} | {figures} |")
    return "\n".join(lines)


def main() -> int:
    print(table())
    return 0


if __name__ == "__main__":
    run(main)
