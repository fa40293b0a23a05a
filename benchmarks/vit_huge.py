"""torchao's compiled step of a ViT with five optimizers (its repository, benchmarks/benchmark_low_bit_adam.py).

timm's vit_huge_patch14_224 with 45 classes, compiled whole, bf16 autocast, batch 8, on an RTX 4070 Ti Super. torchao's
README has the bytes of the four optimizers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.workloads.optimizers import make_optimizer

ALLOCATED = {"adamw_fused": 12.23, "adamw_8bit": 8.32, "ao_adamw_8bit": 8.33, "ao_adamw_4bit": 7.72}  # GB


class Block(nn.Module):
    """A block of timm's ViT, with one layer for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        heads = self.qkv(self.norm1(x)).reshape(batch, tokens, 3, self.heads, width // self.heads)
        mixed = functional.scaled_dot_product_attention(*heads.permute(2, 0, 3, 1, 4).unbind(0))
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, tokens, width))
        out: Tensor = x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))
        return out


class ViT(nn.Module):
    """timm's vit_huge_patch14_224."""

    def __init__(self, width: int = 1280, blocks: int = 32, classes: int = 45) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 14, 14)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 257, width))
        self.blocks = nn.ModuleList(Block(width, 16) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x)[:, 0])
        return out


def trace(optimizer: str = "adamw_fused") -> StepTrace:
    """Traces torchao's step with the named `optimizer`."""
    with torch.device("meta"):
        model = ViT().train()

    def step(model: nn.Module, made: Any) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = functional.cross_entropy(model(torch.empty(8, 3, 224, 224)), torch.zeros(8, dtype=torch.long))
        loss.backward()
        made.step()
        made.zero_grad()

    model.compile(fullgraph=True)
    return trace_step(model, step, make_optimizer=lambda m: make_optimizer(m, optimizer), device="rtx-4070-ti-super")
