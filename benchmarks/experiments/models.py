"""Small models of the documents, and their training steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .common import Case, Step


def linear_stack(depth: int = 8, width: int = 4096) -> nn.Sequential:
    """Linear layers in sequence, without activations."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def relu_stack(depth: int = 10, width: int = 1024) -> nn.Sequential:
    """Linear layers, each followed by a ReLU."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)))


class FeedForward(nn.Module):
    """Residual block: norm, linear to four times the width, GELU, linear back, dropout."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return out


class SelfAttention(nn.Module):
    """Residual block: norm, causal scaled-dot-product attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = x + self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention, self.mlp = SelfAttention(width, heads), FeedForward(width, dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.attention(x))
        return out


def feed_forwards(depth: int, width: int) -> nn.Sequential:
    """A stack of residual feed-forward blocks."""
    return nn.Sequential(*(FeedForward(width) for _ in range(depth)))


def transformer(depth: int, width: int, heads: int) -> nn.Sequential:
    """A stack of transformer blocks."""
    return nn.Sequential(*(Block(width, heads) for _ in range(depth)))


def mean_step(*shape: int) -> Step:
    """Returns a step: zero_grad, forward on random inputs of `shape`, the mean as loss, backward, optimizer step."""

    def step(model: nn.Module, optimizer: Any) -> None:
        weight = next(model.parameters())
        x = torch.randn(*shape, device=weight.device, dtype=weight.dtype)
        model.zero_grad(set_to_none=True)
        model(x).mean().backward()
        if optimizer is not None:
            optimizer.step()

    return step


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with PyTorch's defaults."""
    return torch.optim.AdamW(model.parameters())


def case(build: Callable[[], nn.Module], *shape: int, optimizer: bool = False) -> Case:
    """Returns a case with a `mean_step`."""
    return Case(build, mean_step(*shape), adamw if optimizer else None)
