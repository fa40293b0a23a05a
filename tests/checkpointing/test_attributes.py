"""Modules that carry a tensor from call to call in an attribute, under every policy that re-runs them."""

from __future__ import annotations

import copy
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_ft import apply_policy


class Causal(nn.Module):
    """Prepends the last two frames of the previous chunk; the first chunk has none and is therefore shorter."""

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
def test_tensor_carried_between_calls_keeps_the_bits(policy: str, training: bool) -> None:
    torch.manual_seed(0)
    model = Clip().train(training)
    plain = numbers(copy.deepcopy(model))
    apply_policy(model, policy)
    found = numbers(copy.deepcopy(model))
    assert found.keys() == plain.keys()
    assert [name for name, value in plain.items() if not torch.equal(found[name], value)] == []


def test_attribute_holds_the_tensor_of_the_first_run() -> None:
    model = Clip()
    apply_policy(model, "full")
    loss = model(torch.randn(2, 4, 24))
    last = [block.last for block in model.blocks]
    loss.backward()
    assert all(block.last is tensor for block, tensor in zip(model.blocks, last, strict=True))
    assert [block.calls for block in model.blocks] == [3, 3, 3]  # three chunks; the second runs do not count


class Hooked(nn.Module):
    """Registers backward hooks in its first forward and notes that in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.act = nn.Linear(4, 4), nn.Linear(4, 4)
        self.hooked = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.hooked:
            self.mlp.weight.register_hook(lambda grad: grad * 2)
            self.mlp.bias.register_post_accumulate_grad_hook(_double)
            self.act.register_full_backward_hook(lambda module, given, grads: (given[0] * 2,))
            self.act.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 2,))
            self.hooked = True
        return self.act(torch.tanh(self.mlp(x)))


def _double(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad * 2


@pytest.mark.parametrize("policy", ["full", "segments:2"])
def test_hook_registered_in_forward_is_registered_once(policy: str) -> None:
    def gradients(policy: str | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.ModuleList([Hooked(), Hooked()]))
        if policy is not None:
            apply_policy(model, policy, verify="never")
        x = torch.randn(3, 4, requires_grad=True)
        found = []
        for _ in range(2):  # an effect of the second run would show in the next step
            model[0][1](model[0][0](x)).square().sum().backward()
            found += [p.grad for p in (x, *model.parameters()) if p.grad is not None]
            x.grad = None
            model.zero_grad()
        return found

    plain, ours = gradients(None), gradients(policy)
    assert len(ours) == len(plain) == 18
    assert all(map(torch.equal, ours, plain))


class Linear8bitLt(nn.Linear):
    """As in bitsandbytes: the first forward moves the quantised weight to its state, so a second finds none."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width, bias=False)
        weight: Any = self.weight.requires_grad_(False)
        weight.CB = (32 * weight.data).round()
        self.state = SimpleNamespace(CB=None, is_training=None)

    def init_8bit_state(self) -> None:
        weight: Any = self.weight
        self.state.CB, weight.CB = weight.CB, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state.is_training = self.training
        if self.weight.CB is not None:
            self.init_8bit_state()
        return nn.functional.linear(x, self.state.CB / 32)


@pytest.mark.parametrize("policy", ["full", "save:matmul", "segments:2", "tile:2", "full,tile:2"])
def test_8bit_layer_initialized_in_its_first_forward(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.nn", SimpleNamespace(Linear8bitLt=Linear8bitLt))

    def train(policy: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Layers()
        apply_policy(model.eval(), policy)
        for _ in range(2):
            model.train()(torch.randn(4, 8)).backward()
            with torch.no_grad():
                model.eval()(torch.randn(4, 8))
        return [p.grad for p in model.parameters() if p.grad is not None]

    found, plain = train(policy), train("none")
    assert len(plain) == 6
    for ours, gradient in zip(found, plain, strict=True):
        assert (ours - gradient).norm() <= (1e-6 * gradient.norm() if "tile" in policy else 0)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Layer() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(Linear8bitLt(8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x)  # type: ignore[no-any-return]
