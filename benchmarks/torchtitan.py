"""torchtitan's Llama 2 and 3 as in its published runs, and their step under FSDP2.

Unlike transformers' it repeats key and value heads before attention, turns queries and keys as complex numbers, and
has norms of its own in fp32 (github.com/pytorch/torchtitan, torchtitan/models/llama/model.py of February 2025).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.loops import rows_of
from benchmarks.pages import DATA
from ckpt_ft.checkpointing.apply import apply_policy, remove_policy
from ckpt_ft.memory.distributed.group import rank_of
from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.spec.launch import Launch
from ckpt_ft.standins.float8 import E4M3, Float8Linear, to_float8

REACHED = 0.9  # share of a network's rate (memory/cost/collectives.py)
# cards: torchtitan's H100; torchao's rows, by the same authors, do not name theirs
KNOWN = json.loads((DATA / "torchtitan.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Shape:
    width: int
    inner: int
    heads: int
    kv_heads: int
    blocks: int
    vocabulary: int
    length: int
    fused_norms: bool = False  # one fused kernel, as in its configurations for 64 A100 in 2024

    @property
    def head(self) -> int:
        return self.width // self.heads


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Norm(nn.Module):
    def __init__(self, of: Shape) -> None:
        super().__init__()
        self.fused = of.fused_norms
        self.weight = nn.Parameter(torch.ones(of.width))

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            return functional.rms_norm(x, self.weight.shape, self.weight, 1e-5)
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return normed.type_as(x) * self.weight


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary positions. x: batch, tokens, heads, size of a head."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    turns = turns[: x.shape[1]].view(1, x.shape[1], 1, -1)
    return torch.view_as_real(pairs * turns).flatten(3).type_as(x)


def repeated(x: Tensor, times: int) -> Tensor:
    """Repeats each key or value head for all of its queries."""
    if times == 1:
        return x
    batch, tokens, heads, size = x.shape
    return x.unsqueeze(3).expand(batch, tokens, heads, times, size).reshape(batch, tokens, heads * times, size)


class Attention(nn.Module):
    def __init__(self, of: Shape) -> None:
        super().__init__()
        self.of = of
        self.wq, self.wo = linear(of.width, of.width), linear(of.width, of.width)
        self.wk, self.wv = (linear(of.width, of.kv_heads * of.head) for _ in range(2))

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        q, k, v = (layer(x).view(*x.shape[:2], -1, self.of.head) for layer in (self.wq, self.wk, self.wv))
        q, k = turned(q, turns), turned(k, turns)
        times = self.of.heads // self.of.kv_heads
        q, k, v = (heads.transpose(1, 2) for heads in (q, repeated(k, times), repeated(v, times)))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        joined: Tensor = self.wo(out.transpose(1, 2).contiguous().flatten(2))
        return joined


class FeedForward(nn.Module):
    def __init__(self, of: Shape) -> None:
        super().__init__()
        self.w1, self.w3 = (linear(of.width, of.inner) for _ in range(2))
        self.w2 = linear(of.inner, of.width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return out


class TransformerBlock(nn.Module):
    def __init__(self, of: Shape) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(of), FeedForward(of)
        self.attention_norm, self.ffn_norm = Norm(of), Norm(of)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Transformer(nn.Module):
    def __init__(self, of: Shape) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(of.vocabulary, of.width)
        self.register_buffer("freqs_cis", torch.empty(of.length, of.head // 2, dtype=torch.complex64))
        self.layers = nn.ModuleDict({str(number): TransformerBlock(of) for number in range(of.blocks)})
        self.norm, self.output = Norm(of), linear(of.width, of.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for block in self.layers.values():
            x = block(x, self.freqs_cis)
        logits: Tensor = self.output(self.norm(x))
        return logits


@cache
def llama(name: str, fused_norms: bool, float8: str = "", tp: int = 1) -> nn.Module:
    """Returns the model of one of the shapes in data/torchtitan.json, on the meta device.

    float8: 8-bit matrix products in all blocks (torchao): "tensorwise", or "tensorwise, gathered" if FSDP2 gathers
        the weights in 8 bits too.
    tp: number of ranks over which `trace` shards it; part of the cache key, so that other steps get a whole model.
    """
    with torch.device("meta"):
        model = Transformer(Shape(**KNOWN["shapes"][name], fused_norms=fused_norms)).train()
    for block in model.layers.values() if float8 else ():
        to_float8(nn.ModuleList([nn.Linear(1, 1), block, nn.Linear(1, 1)]))
    for layer in float8_layers(model):
        layer.gathers = float8.endswith("gathered")
    return model


def float8_layers(model: nn.Module) -> list[Float8Linear]:
    return [module for module in model.modules() if isinstance(module, Float8Linear)]


@torch.no_grad()
def agree_on_scales(layers: list[Float8Linear]) -> None:
    """Computes the scales of all weights by one all-reduce (torchao: precompute_float8_dynamic_scale_for_fsdp)."""
    largest: Any = torch.stack(torch._foreach_norm([layer.weight for layer in layers], math.inf)).clamp(1e-12)
    scales = (torch.finfo(E4M3).max / largest.to(torch.float64)).to_local().to(torch.float32)
    for number, layer in enumerate(layers):
        layer.scale = scales[number]


def divide(model: Any, mesh: DeviceMesh) -> None:
    """Applies its plan of tensor parallelism (torchtitan/models/llama3/infra/parallelize.py), with a sharded loss."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    rows, whole = Shard(1), Replicate()
    parallelize_module(
        model,
        mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=whole, output_layouts=rows),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=rows, output_layouts=Shard(-1), use_local_output=False),
        },
    )
    for block in model.layers.values():
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(rows, None), desired_input_layouts=(whole, None)),
            **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
            "attention.wo": RowwiseParallel(output_layouts=rows),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(whole,)),
            **{f"feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")},
            "feed_forward.w2": RowwiseParallel(output_layouts=rows),
        }
        parallelize_module(block, mesh, plan)


@dataclass(frozen=True)
class Row:
    """A published run; `reserved` in GiB, if published, and `seconds` of a step.

    keeps: whether gathered parameters are kept after forward; otherwise only those of the last block are.
    compiled: whether torch.compile compiles each block; loss_too: and the loss, as in torchtitan since 2025.
    tp: ranks over which weight matrices are sharded, and norms and residuals along the sequence.
    """

    model: str
    gpus: int
    card: str
    batch: int
    tokens: int
    checkpointing: str
    keeps: bool
    reserved: float | None
    seconds: float
    compiled: bool
    tp: int
    float8: str
    loss_too: bool

    @property
    def shape(self) -> str:
        return f"{self.batch} x {self.tokens}"

    @property
    def resharding(self) -> str:
        return "kept" if self.keeps else "resharded"


def trace(model: Any, row: Row, card: str) -> StepTrace:
    """Traces one rank's step: each block is sharded, then the rest; loss of complete logits, fused AdamW, clipping."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor.parallel import loss_parallel

    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def make_optimizer(model: Any) -> torch.optim.Optimizer:
        if row.tp > 1:
            divide(model, columns)
        *others, last = model.layers.values()
        for block in (*others, last):
            resharded = not row.keeps and block is not last
            fully_shard(block, mesh=rows, mp_policy=precision, reshard_after_forward=resharded)
        fully_shard(model, mesh=rows, mp_policy=precision, reshard_after_forward=False)  # as in PyTorch at that time
        return torch.optim.AdamW(model.parameters(), fused=True)

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))

    compute_loss: Any = torch.compile(loss_of) if row.loss_too else loss_of
    gathered = [layer for layer in float8_layers(model) if layer.gathers]

    def step(model: Any, optimizer: Any) -> None:
        ids = torch.zeros(row.batch, row.tokens, dtype=torch.long)
        labels = ids.clone()
        optimizer.zero_grad()
        # the attention backend of these runs' PyTorch on Hopper
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), loss_parallel() if row.tp > 1 else nullcontext():
            logits = model(ids)
            loss = compute_loss(logits, labels)
            del logits
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        if gathered:
            agree_on_scales(gathered)

    apply_policy(model, KNOWN["policies"][row.checkpointing])
    for block in model.layers.values() if row.compiled else ():
        block.compile()
    try:
        with rank_of(row.gpus // row.tp, row.tp, names=("dp_shard", "tp")) as mesh:
            rows, columns = mesh["dp_shard"], mesh["tp"]
            return trace_step(model, step, make_optimizer=make_optimizer, device=card)
    finally:
        remove_policy(model)
        for block in model.layers.values():
            block._compiled_call_impl = None


def published(rows: str) -> Iterator[tuple[Row, StepTrace]]:
    """Returns each row of a file in data/ with its trace."""
    for cells in rows_of(rows):
        batch, tokens, tp = int(cells["batch_per_gpu"].split()[0]), int(cells["seq"]), int(cells.get("tp", 1))
        row = Row(
            cells["model"], int(cells["gpus"]), cells["gpu"].split()[0], batch, tokens,
            cells["activation_checkpointing"], cells["reshard_after_forward"] == "never",
            float(cells["reserved"]) if cells["reserved"] else None,
            batch * tokens / tp / float(cells["tokens_per_s_per_gpu"]),
            cells.get("compiled") == "each block", tp, cells.get("float8") or "", cells.get("loss") == "compiled",
        )  # fmt: skip
        model = llama(row.model, cells.get("norms") == "fused", row.float8, tp)
        found = trace(model, row, "h100" if cells["gpu"] == "H100 SXM" else KNOWN["cards"][row.card])
        network = cells.get("network_of_a_machine")  # as "400 Gb/s"
        link = REACHED * float(network.split()[0]) * 1e9 / 8 if network else None
        launch = Launch("fsdp2", row.gpus, tp=tp, link=link)  # for the seconds of its collectives
        yield row, replace(found, launch=launch, alloc_conf=cells["allocator"].replace("not printed", ""))
