"""torchtitan's Llama 3, as its published runs had it, and their step under FSDP2.

Unlike transformers' it repeats key and value heads before attention, turns queries and keys as complex numbers, and
has norms of its own in fp32 (github.com/pytorch/torchtitan, torchtitan/models/llama/model.py of February 2025).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ckpt_ft.checkpointing.apply import apply_policy, remove_policy
from ckpt_ft.memory.distributed.group import rank_of
from ckpt_ft.memory.distributed.launch import Launch
from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.memory.record.trace import StepTrace

WIDTH, INNER, HEADS, KV_HEADS, BLOCKS, VOCABULARY, LENGTH = 4096, 14336, 32, 8, 32, 128256, 8192  # the 8B
HEAD = WIDTH // HEADS


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return normed.type_as(x) * self.weight


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary positions. x: batch, tokens, heads, size of a head."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    turns = turns[: x.shape[1]].view(1, x.shape[1], 1, -1)
    return torch.view_as_real(pairs * turns).flatten(3).type_as(x)


def repeated(x: Tensor) -> Tensor:
    """Each key or value head as often as there are queries to it."""
    batch, tokens, heads, size = x.shape
    times = HEADS // heads
    return x.unsqueeze(3).expand(batch, tokens, heads, times, size).reshape(batch, tokens, HEADS, size)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)
        self.wk, self.wv = linear(WIDTH, KV_HEADS * HEAD), linear(WIDTH, KV_HEADS * HEAD)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        q, k, v = (layer(x).view(*x.shape[:2], -1, HEAD) for layer in (self.wq, self.wk, self.wv))
        q, k = turned(q, turns), turned(k, turns)
        q, k, v = (heads.transpose(1, 2) for heads in (q, repeated(k), repeated(v)))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        joined: Tensor = self.wo(out.transpose(1, 2).contiguous().view(x.shape))
        return joined


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = linear(WIDTH, INNER), linear(INNER, WIDTH), linear(WIDTH, INNER)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return out


class TransformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = Norm(), Norm()

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("freqs_cis", torch.empty(LENGTH, HEAD // 2, dtype=torch.complex64))
        self.layers = nn.ModuleDict({str(number): TransformerBlock() for number in range(BLOCKS)})
        self.norm, self.output = Norm(), linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for block in self.layers.values():
            x = block(x, self.freqs_cis)
        logits: Tensor = self.output(self.norm(x))
        return logits


def llama3_8b() -> nn.Module:
    """On the meta device."""
    with torch.device("meta"):
        return Transformer().train()


def trace(model: nn.Module, policy: str, batch: int, tokens: int, keeps: bool, processes: int, card: str) -> StepTrace:
    """One rank's step: each block sharded, then the rest; the loss over whole logits; fused AdamW, clipping.

    keeps: gathered parameters after forward; else those of all blocks but the last are dropped.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def make_optimizer(model: Any) -> torch.optim.Optimizer:
        *others, last = model.layers.values()
        for block in (*others, last):
            fully_shard(block, mesh=mesh, mp_policy=precision, reshard_after_forward=not keeps and block is not last)
        fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=False)  # the PyTorch of then did so
        return torch.optim.AdamW(model.parameters(), fused=True)

    def step(model: Any, optimizer: Any) -> None:
        ids = torch.zeros(batch, tokens, dtype=torch.long)
        labels = ids.clone()
        optimizer.zero_grad()
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # what the PyTorch of these runs took on Hopper
            logits = model(ids)
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))
            del logits
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()

    apply_policy(model, policy)
    try:
        with rank_of(processes) as mesh:
            traced = trace_step(
                model, step, make_optimizer=make_optimizer, device=card, alloc_conf="expandable_segments:True"
            )
            return replace(traced, launch=Launch("fsdp2", processes))  # for the seconds of its collectives
    finally:
        remove_policy(model)
