"""Single operators of Hugging Face's models, plain, fused and tiled: seconds and peaks against published ones.

    python benchmarks/operators.py    # prints every row, and writes the table of peaks of docs/fused_kernels.md

linkedin/Liger-Kernel published both. Seconds (data/hf_op_latencies.csv) are medians of triton.testing.do_bench, which
clears the cache before each call and lets the host run ahead; gradients add up from one call to the next where the
script let them. For peaks (data/liger_operator_memory.csv) each row does what `benchmark/scripts/benchmark_*.py` does:
the input, its gradient and the operator's parameters stay, the operator runs forward and backward, and the median peak
of ten iterations is reported. Both threads have a cuBLAS workspace by then, and the graph is retained. Most rows were
measured with older versions than the one that is modelled; `RMSNorm021` and `Loss042` do what two of them did.
"""

from __future__ import annotations

import csv
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.pages import DATA, DOCS, prose, table
from ckpt_ft import trace_step
from ckpt_ft.checkpointing.tile import Tiled
from ckpt_ft.errors import run
from ckpt_ft.memory.cost.kernels import device_seconds
from ckpt_ft.memory.gpus import find_gpu
from ckpt_ft.standins import liger_kernels

CARDS = {"NVIDIA A100-SXM4-80GB": "a100-80gb", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA GeForce RTX 4090": "rtx-4090"}
PROVIDERS = {"liger": "Liger", "huggingface": "PyTorch", "deepspeed_tiled": "DeepSpeed's TiledMLP"}
NO_MATMUL = ("cross_entropy", "rms_norm", "layer_norm")  # their processes have no cuBLAS workspace
BENCH = 6e-6  # seconds that do_bench's two events add to a kernel between them
Forward = Callable[..., Any]
Config = dict[str, Any]


class Operator(nn.Module):
    """An operator with its input `x`, and the gradient `dy` of its output unless each iteration draws it."""

    def __init__(self, x: Tensor, layer: nn.Module, call: Forward, dy: Tensor | None = None) -> None:
        super().__init__()
        self.x, self.layer, self.call = nn.Parameter(x) if x.is_floating_point() else x, layer, call
        if dy is not None:
            self.register_buffer("dy", dy)

    def run(self, backward: bool = True) -> None:
        y = self.call(self.layer, self.x)
        if backward and y.dim() == 0:
            y.backward()
        elif backward:
            y.backward(self.dy if hasattr(self, "dy") else torch.randn_like(y), retain_graph=True)


def _rms_norm(config: Config, fused: bool) -> nn.Module:
    x = torch.empty(config["M"], config["H"], dtype=torch.bfloat16)
    norm: Any = LlamaRMSNorm(config["H"])
    call = (lambda n, x: liger_kernels.RMSNorm.apply(x, n.weight)) if fused else (lambda n, x: n(x))
    return Operator(x, norm, call, torch.empty_like(x))


def _layer_norm(config: Config, fused: bool) -> nn.Module:
    x = torch.empty(config["M"], config["N"])
    norm: Any = nn.LayerNorm(config["N"])
    call = (lambda n, x: liger_kernels.LayerNorm.apply(x, n.weight, n.bias)) if fused else (lambda n, x: n(x))
    return Operator(x, norm, call, torch.empty_like(x))


def _gated(config: Config, fused: bool) -> nn.Module:
    x = torch.empty(config.get("bsz") or config["B"], config["T"], config["hidden_size"], dtype=torch.bfloat16)
    mlp: Any = LlamaMLP(LlamaConfig(**{k: config[k] for k in ("hidden_size", "intermediate_size", "hidden_act")}))

    def call(mlp: Any, x: Tensor) -> Tensor:
        if not fused:
            return mlp(x)
        return mlp.down_proj(liger_kernels.GatedProduct.apply(mlp.gate_proj(x), mlp.up_proj(x)))

    return Operator(x, mlp.to(torch.bfloat16), call)


def _cross_entropy(config: Config, fused: bool) -> nn.Module:
    layer: Any = nn.Module()
    layer.register_buffer("target", torch.zeros(config["B"] * config["T"], dtype=torch.long, device="cpu"))

    def call(layer: Any, x: Tensor) -> Tensor:
        return liger_kernels.CrossEntropy.apply(x, layer.target, "mean") if fused else F.cross_entropy(x, layer.target)

    return Operator(torch.empty(len(layer.target), config["V"]), layer, call)


def _fused_linear_cross_entropy(config: Config, fused: bool) -> nn.Module:
    x = torch.empty(config["BT"], config["H"], dtype=torch.bfloat16)
    head: Any = nn.Linear(config["H"], config["V"], bias=False, dtype=torch.bfloat16)
    head.register_buffer("target", torch.zeros(config["BT"], dtype=torch.long, device="cpu"))
    head.other = nn.Parameter(torch.empty_like(head.weight))  # the script creates the heads of both providers

    def call(head: Any, x: Tensor) -> Tensor:
        if fused:
            return liger_kernels.FusedLinearCrossEntropy.apply(x, head.weight, head.target, None, "mean")
        return F.cross_entropy(head(x), head.target)

    return Operator(x, head, call)


def _embedding(config: Config, fused: bool) -> nn.Module:
    ids = torch.zeros(config["B"], config["T"], dtype=torch.long, device="cpu")
    return Operator(ids, nn.Embedding(config["V"], config["D"]), lambda layer, x: layer(x))


class _Rope(nn.Module):
    """Rotary positions of queries and keys, which are transposed views as in attention."""

    def __init__(self, config: Config, fused: bool) -> None:
        super().__init__()
        tokens, width = config.get("seq_len") or config["T"], (config.get("hidden_size") or config["H"])
        heads, groups = config["num_q_heads"], config["num_kv_heads"]
        size = width // heads
        self.q, self.k = (nn.Parameter(torch.empty(1, tokens, n, size, dtype=torch.bfloat16)) for n in (heads, groups))
        self.dq, self.dk = nn.Buffer(torch.empty_like(self.q)), nn.Buffer(torch.empty_like(self.k))
        self.cos, self.sin = (nn.Buffer(torch.empty(1, tokens, size, dtype=torch.bfloat16)) for _ in range(2))
        self.fused = fused

    def run(self, backward: bool = True) -> None:
        q, k, dq, dk = (t.transpose(1, 2) for t in (self.q, self.k, self.dq, self.dk))
        rotate: Any = liger_kernels.Rotation.apply if self.fused else apply_rotary_pos_emb
        out = rotate(q, k, self.cos, self.sin)
        torch.autograd.grad(out, (q, k), (dq, dk), retain_graph=True)  # its script adds them to nothing


class RMSNorm021(liger_kernels.RMSNorm):
    """Sums the weight's gradient from a tensor as large as the input, in the weight's dtype, as version 0.2.1 did."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        dw = torch.empty_like(x, dtype=weight.dtype)
        liger_kernels.liger_rms_norm_backward([dy, x, scale, weight], out=[dy, dw])
        return dy.view(dy.shape), dw.sum(0)


class Loss042(liger_kernels.FusedLinearCrossEntropy):
    """Casts each chunk of logits to float32 and back and scales it, as version 0.4.2 did."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, *args: Any) -> Tensor:
        to_weight, to_hidden = torch.zeros_like(weight), torch.zeros_like(hidden)
        losses = torch.zeros(len(hidden), dtype=torch.float32)
        chunk = liger_kernels._chunk(len(hidden), hidden.shape[1], len(weight))
        for start in range(0, len(hidden), chunk):
            rows = hidden[start : start + chunk]
            logits = rows @ weight.t()
            logits = logits.float()
            liger_kernels.liger_cross_entropy([target], out=[logits, losses])
            logits = logits.to(hidden.dtype)
            scaled = logits * 0.5
            to_hidden[start : start + chunk] = scaled @ weight
            torch.addmm(to_weight, logits.t(), rows, out=to_weight)
        ctx.save_for_backward(to_hidden.detach(), to_weight.detach(), None)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return *liger_kernels.FusedLinearCrossEntropy.backward(ctx, grad)[:2], None


OLDER: dict[tuple[str, str], Forward] = {
    ("rms_norm", "0.2.1"): lambda norm, x: RMSNorm021.apply(x, norm.weight),
    ("fused_linear_cross_entropy", "0.4.2"): lambda head, x: Loss042.apply(x, head.weight, head.target),
}
OPERATORS: dict[str, Callable[[Config, bool], nn.Module]] = {
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "swiglu": _gated,
    "geglu": _gated,
    "cross_entropy": _cross_entropy,
    "fused_linear_cross_entropy": _fused_linear_cross_entropy,
    "rope": _Rope,
    "embedding": _embedding,
}

# --- seconds


def predicted_seconds(row: dict[str, str]) -> float:
    """Returns the predicted seconds of a row's passes."""
    config = json.loads(row["config"])
    name, _, value = row["x"].partition("=")
    named = {("rope", "H"): "hidden_size", ("rope", "T"): "seq_len"}.get((row["op"], name), name)
    with torch.device("meta"):
        made: Any = OPERATORS[row["op"]]({**config, named: int(value)}, False)
    made = made.to(torch.bfloat16 if "bfloat16" in config.get("dtype", "") else torch.float32)
    trace = trace_step(made, lambda model, _: model.run(), device=row["gpu"])  # type: ignore[operator]
    phases = {"forward": ("forward",), "backward": ("backward",), "full": ("forward", "backward")}[row["pass"]]
    gpu = find_gpu(row["gpu"])
    timed = [op for op in trace.ops if op.at >= trace.start and op.phase in phases and op.kernels]
    given = "ones_like", "randn_like"  # gradients of outputs, which the script has before it begins
    return BENCH + sum(device_seconds(op, gpu) for op in timed if not any(name in op.name for name in given))


def table_of_seconds() -> str:
    """Returns the Markdown table of all rows."""
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    with (DATA / "hf_op_latencies.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            error = predicted_seconds(row) / (float(row["median_ms"]) / 1e3) - 1
            found[row["op"], row["pass"], row["gpu"]].append(error)
    lines = []
    for key, signed in found.items():
        sizes = sorted(map(abs, signed))
        figures = (f"{share:.1%}" for share in (statistics.median(sizes), sizes[-1]))
        lines.append([*key, str(len(signed)), *figures, f"{statistics.median(signed):+.1%}"])
    return table(("operator", "pass", "card", "rows", "median error", "worst", "bias"), lines, words=3)


# --- peaks


class Row(NamedTuple):
    operator: str
    provider: str
    mode: str
    x: int
    mib: float  # measured
    config: Config
    gpu: str
    version: str


def rows() -> list[Row]:
    """Returns the published peaks of modelled operators."""
    found = []
    with (DATA / "liger_operator_memory.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            config = json.loads(row["config"])
            if row["x_name"]:
                config[row["x_name"]] = int(row["x"])
            kind, provider, x, mib = row["operator"], row["provider"], int(row["x"]), float(row["mb"])
            if kind.removeprefix("tiled_") in OPERATORS and provider in PROVIDERS and row["gpu"] in CARDS:
                gpu = CARDS[row["gpu"]]
                found.append(Row(kind, provider, row["mode"], x, mib, config, gpu, row["liger_version"]))
    return found


def predicted(row: Row, made: Any = None) -> float:
    """Returns the peak of the row's operator in MiB, or of another operator in its place."""
    if made is None:
        made = operator_of(row)
    steps = 0

    def step(model: Any, _: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 1 and row.operator not in NO_MATMUL:
            small = torch.zeros(8, 8, requires_grad=True)
            product = (small @ small).sum()
            if row.operator != "rope":  # only cos and sin come from a matmul
                product.backward()
        model.run(backward=row.mode != "forward")

    return trace_step(made, step, device=row.gpu, warmup_steps=2).peak_allocated / 2**20


def operator_of(row: Row) -> Any:
    """Returns the operator that the row measured, on the meta device."""
    kind = row.operator.removeprefix("tiled_")
    with torch.device("meta"):
        made: Any = OPERATORS[kind](row.config, row.provider == "liger")
    if row.provider == "liger" and (kind, row.version) in OLDER:
        made.call = OLDER[kind, row.version]
    if row.provider == "deepspeed_tiled":  # its own tiled MLP, as the script calls it
        mlp: Any = import_module("deepspeed.runtime.sequence_parallel.ulysses_sp").TiledMLP
        pieces = row.config["num_shards"]
        made.call = lambda layer, x: mlp.apply(LlamaMLP.forward, layer, x, pieces, list(layer.parameters()))
    return made


def tiled_by_policy(row: Row) -> float:
    """Returns the peak in MiB of the row's operator under the policy `tile`, which sums gradients in fp32."""
    with torch.device("meta"):
        made: Any = _gated(row.config, False)
    Tiled(made.layer, row.config["num_shards"])
    return predicted(row, made)


PAGE = DOCS / "fused_kernels.md"
START = "<!-- benchmarks/operators.py writes the rest of this page -->"


def table_of_peaks(found: list[tuple[Row, float]]) -> str:
    """Returns a Markdown table: per operator, kernel and mode the largest size and the worst error of all sizes."""
    groups: dict[Any, list[tuple[Row, float]]] = {}
    for row, mib in found:
        key = row.operator, PROVIDERS[row.provider], row.mode, row.gpu, row.version
        groups.setdefault(key, []).append((row, mib))
    lines = []
    for key, of in groups.items():
        worst = max((mib / row.mib - 1 for row, mib in of), key=abs)
        last, mib = max(of, key=lambda one: one[0].mib)
        lines.append([*key, str(len(of)), f"{last.mib:.2f}", f"{mib:.2f}", f"{100 * worst:+.2f} %"])
    header = ("operator", "kernel", "pass", "card", "Liger", "rows", "largest: measured MiB", "predicted")
    return table([*header, "worst error"], lines, words=5)


def table_of_tiles(found: list[tuple[Row, float]]) -> str:
    """Returns a Markdown table of DeepSpeed's tiled MLP and the policy `tile`."""
    lines = [
        [row.operator, row.mode, f"{row.x:,}", f"{row.mib:.2f}", f"{mib:.2f}", f"{100 * (mib / row.mib - 1):+.2f} %"]
        for row, mib in found
        if row.mode != "backward"  # as "full"
    ]
    header = ("operator", "pass", "tokens of a row", "DeepSpeed: measured MiB", "`tile`: predicted", "")
    return table(header, lines, words=2)


def main() -> None:
    print(table_of_seconds())
    found = []
    for row in rows():
        found.append((row, predicted(row)))
        print(*row[:5], *row[6:], f"{found[-1][1]:.2f}", f"{100 * (found[-1][1] / row.mib - 1):+.2f} %", flush=True)
    tiled = [(row, tiled_by_policy(row)) for row, _ in found if row.provider == "deepspeed_tiled"]
    head, said = PAGE.read_text(encoding="utf-8").partition(START)[0], prose("operators.md")["tiled"]
    text = f"{head}{START}\n\n{table_of_peaks(found)}\n\n{said}\n\n{table_of_tiles(tiled)}\n"
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    run(main)
