"""Modules that `pointwise` must not recompute, or recompute specially: unusual norms, keyword calls, containers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.checkpointing.verify import VerificationError

WIDTH = 8


class RMSNorm(nn.Module):
    """A norm as libraries define it, which is treated."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * self.scaled(x)

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class DropoutRMSNorm(RMSNorm):
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().scaled(x), 0.5, self.training)


class NoisyLayerNorm(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * _noise(x)


def _noise(x: torch.Tensor) -> torch.Tensor:
    return 1 + 0.1 * torch.randn_like(x)


class RunningRMSNorm(RMSNorm):
    """Its output reads a statistic that it updates."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.mul_(0.9).add_(x.detach().pow(2).mean().sqrt(), alpha=0.1)
        return x / self.scale


class CountingRMSNorm(RMSNorm):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().scaled(x) * self.calls


class ListingLayerNorm(nn.LayerNorm):
    """Its state is in a list, so the attribute's identity does not change."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(1.0)
        return super().forward(x) * sum(self.seen)


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = norm, nn.Linear(WIDTH, 16), nn.SiLU(), nn.Linear(16, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(input=self.act(input=self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks, self.drop = nn.ModuleList(blocks), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.drop(block(x))
        return x


def _train(model: nn.Module, steps: int = 3, autocast: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(1)
    optimizer, found = torch.optim.SGD(model.parameters(), 0.01), []
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16, autocast):
            loss = model(torch.randn(4, WIDTH)).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.zero_grad()
    return found + [b.clone() for b in model.buffers()] + [torch.get_rng_state()]


def _assert_same_training(model: nn.Module, autocast: bool = False) -> None:
    plain = _train(copy.deepcopy(model), autocast=autocast)
    apply_policy(model, "pointwise")
    for ours, wanted in zip(_train(model, autocast=autocast), plain, strict=True):
        assert torch.allclose(ours.double(), wanted.double(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("norm", [CountingRMSNorm, RMSNorm], ids=lambda norm: norm.__name__)
def test_norm_that_is_rebuilt_or_writes_an_attribute_has_the_plain_gradients(norm: Any) -> None:
    torch.manual_seed(0)
    _assert_same_training(Stack(*(Block(norm()) for _ in range(3))))


@pytest.mark.parametrize(
    "norm", [DropoutRMSNorm, NoisyLayerNorm, RunningRMSNorm, ListingLayerNorm], ids=lambda norm: norm.__name__
)
def test_norm_that_draws_or_has_hidden_state_is_refused_in_the_first_step(norm: Any) -> None:
    args = (WIDTH,) if norm is NoisyLayerNorm else ()
    model = Stack(*(Block(norm(*args)) for _ in range(3)))
    weights = [p.detach().clone() for p in model.parameters()]
    apply_policy(model, "pointwise")
    with pytest.raises(
        (VerificationError, RuntimeError), match="drawn in a norm(.|\n)*try 'offload', which|modified in place"
    ):
        _train(model)
    assert all(torch.equal(p, before) for p, before in zip(model.parameters(), weights, strict=True))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.act = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Named(nn.Module):
    """Calls everything with keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.drop = nn.LayerNorm(WIDTH), Gated(), nn.Dropout(0.2)
        self.relu, self.products = nn.ReLU(inplace=True), Products()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(input=x + self.mlp(x=self.norm(input=x)))
        return self.relu(input=x + self.products(x))


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.back, self.act = (
            nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), nn.SiLU(),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.act(self.one(input=x)), self.two(x)
        out = torch.mul(input=a, other=b) + torch.add(a, b, alpha=2) + F.gelu(input=b, approximate="tanh")
        return self.back(out + torch.mul(a, other=b))


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_cheap_calls_with_keywords_have_the_plain_gradients(autocast: bool) -> None:
    torch.manual_seed(0)
    _assert_same_training(Stack(Named(), Named(), Named()), autocast)


def test_recomputation_uses_the_attributes_of_the_call() -> None:
    """A slope, a rate and an epsilon follow a schedule; also in steps that are not verified."""

    class Scheduled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.LeakyReLU(0.1), nn.Linear(4, 4), nn.Dropout(0.1))
                for _ in range(2)
            )

        def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
            for norm, up, act, down, drop in self.blocks:
                norm.eps, act.negative_slope, drop.p = 1e-3 * scale, 0.1 * scale, 0.1 * scale
                x = x + down(drop(act(up(norm(x)))))
            return x

    def train(policy: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Scheduled()
        apply_policy(model, policy, verify="never")
        x = torch.randn(3, 4)
        (model(x, 1.0).square().sum() + model(x, 5.0).square().sum()).backward()
        assert model.blocks[0][0].eps == 5e-3
        return [p.grad for p in model.parameters()]  # type: ignore[misc]

    for found, expected in zip(train("pointwise"), train("none"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
