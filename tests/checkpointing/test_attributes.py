"""A module that carries a tensor to its next call in a plain attribute, under every policy that re-runs it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ckpt_ft import apply_policy


class Causal(nn.Module):
    """Sees the last two frames of the chunk before, or none: the first chunk is shorter by that."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3)
        self.mlp = nn.Conv1d(4, 4, 1)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.__dict__.pop("last", None)
        self.last = x[..., -2:].clone()
        self.calls += 1
        seen = x if before is None else torch.cat([before, x], dim=-1)
        return torch.tanh(self.mlp(torch.tanh(self.conv(seen))))


class Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Causal() for _ in range(3)])

    def forward(self, clip: torch.Tensor) -> torch.Tensor:
        out = []
        for x in clip.split(8, dim=-1):
            for block in self.blocks:
                x = block(x)
            out.append(x)
        return torch.cat(out, dim=-1).square().mean()


def numbers(model: Clip, steps: int = 2) -> dict[str, torch.Tensor]:
    found = {}
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(torch.randn(2, 4, 24))
        loss.backward()
        found[f"loss {step}"] = loss.detach()
        for index, block in enumerate(model.blocks):
            found[f"last {step} {index}"] = block.last.detach()
            block.__dict__.pop("last")
    return found | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("policy", ["full", "every:2", "segments:2", "segments:1", "save:conv", "full,offload"])
@pytest.mark.parametrize("training", [True, False])
def test_the_same_bits(policy: str, training: bool) -> None:
    torch.manual_seed(0)
    model = Clip().train(training)
    plain = numbers(copy.deepcopy(model))
    apply_policy(model, policy)
    found = numbers(copy.deepcopy(model))
    assert found.keys() == plain.keys()
    assert [name for name, value in plain.items() if not torch.equal(found[name], value)] == []


def test_the_last_tensor_is_the_first_runs_own() -> None:
    model = Clip()
    apply_policy(model, "full")
    loss = model(torch.randn(2, 4, 24))
    last = [block.last for block in model.blocks]
    loss.backward()
    assert all(block.last is tensor for block, tensor in zip(model.blocks, last, strict=True))
    assert [block.calls for block in model.blocks] == [3, 3, 3]  # three chunks: the second runs count for nothing
