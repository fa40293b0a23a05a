"""`offload` and `swap` on an emulated CUDA device: numbers stay plain training's, and each wait is needed."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cuda_emulator import PACES, Emulator
from torch import nn

from ckpt_ft import apply_policy
from ckpt_ft.checkpointing import offload, swap

POLICIES = ["offload", "full,offload", "pointwise,offload", "swap:3", "full,swap:3", "offload,swap:4"]
WIDTH = 8


class Block(nn.Module):
    """Frozen matrices with trained biases and scales."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.up.weight.requires_grad_(False)
        self.down.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


Numbers = dict[str, torch.Tensor]


def steps(model: nn.Module, x: torch.Tensor, policy: str = "none", verify: Any = "never") -> Numbers:
    """Losses and gradients of two steps, and what a model computes whose weights are read and loaded in between."""
    applied = apply_policy(model, policy, verify=verify)
    found: Numbers = {}
    for number in range(2):
        model.zero_grad()
        if number:
            with torch.no_grad():
                found["evaluation"] = model(x)
            last = model.get_submodule("blocks.4").up.bias  # what its gradient prefetches is never used
            (found["last"],) = torch.autograd.grad(model(2 * x).square().sum(), last)
        loss = model(x).square().sum()
        loss.backward()
        found[f"{number} loss"] = loss.detach()
        found |= {f"{number} {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    blocks: Any = model.get_submodule("blocks")
    for number, block in enumerate(blocks):  # what is prefetched for the block behind it is never used
        found[f"only {number}"], _ = torch.autograd.grad(block(x).square().sum(), [block.up.bias, block.norm.weight])
    with torch.no_grad():
        begun = blocks[0](x)  # the weights of the next block are on their way
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
        found["loaded"] = model(begun)
        found["alone"] = blocks[1].up(blocks[0](x))
        blocks[0](x)
    applied.remove()
    found["removed"] = model(x).detach()
    return found


# as many bytes in an activation as in a weight, so that each can get the memory of the other
X = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1))
PLAIN = steps(Model(), X.clone())


def emulated(policy: str, pace: str, seed: int, monkeypatch: pytest.MonkeyPatch, verify: Any = "never") -> list[str]:
    """Returns the names of numbers that differ from plain training's."""
    monkeypatch.setitem(offload.install.__kwdefaults__, "min_bytes", 1)
    model, x = Model(), X.clone()
    with Emulator(pace, seed) as device:
        device.to_device(x, *model.parameters())
        found = {name: device.read(value) for name, value in steps(model, x, policy, verify).items()}
    assert device.reused > 20
    assert len(device.streams) > 1
    assert found.keys() == PLAIN.keys()
    return [name for name, value in found.items() if not torch.equal(value, PLAIN[name])]


RUNS = [*((pace, 0) for pace in PACES[:-1]), *(("random", seed) for seed in range(40))]
QUICK = [RUNS[0], *RUNS[3:6]]  # RUNS[3] and those behind it, whose other streams run seldom, are the hardest
MANY = [run if run in QUICK else pytest.param(*run, marks=pytest.mark.slow) for run in RUNS[:11]]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("pace", "seed"), MANY)
def test_numbers_do_not_depend_on_order(policy: str, pace: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert emulated(policy, pace, seed, monkeypatch) == []


# what is taken out of the code: class, method, the text, what stands there instead, and a policy that uses it
FAULTS: list[tuple[type, str, str, str, str]] = [
    (offload.CopyStream, "start", "self.side.wait_stream(self.streams.current_stream(self.device))", "", "offload"),
    (offload.CopyStream, "start", "self.side.wait_stream(self.streams.current_stream(self.device))", "", "swap:3"),
    (offload.CopyStream, "start", "with self.streams.stream(self.side):", "ended = self.side.record_event()\n    "
     "self.side.record_event = lambda: ended\n    with self.streams.stream(self.side):", "offload"),
    (offload.Parked, "__init__", "parking.leaving.append((flat, copied))", "", "offload"),
    (offload.Parked, "__del__", "self.copies.wait(self.ready)", "", "offload"),
    (offload.Parked, "get", "self.copies.wait(self.ready)", "", "full,offload"),
    (offload.Parking, "release", "self.copies.wait(copied)", "", "offload"),
    (swap.Swapper, "end", "self.wait(number)", "", "swap:3"),
    (swap.Swapper, "use", "self.wait(number)", "", "full,swap:3"),
    (swap.Swapper, "drop", "self.wait(number)", "", "swap:3"),
    (swap.Swapper, "stay", "self.wait(number)", "", "swap:3"),
    (swap.Swapper, "before_load", "self.wait(number)", "", "swap:3"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "method", "text", "instead", "policy"), FAULTS)
def test_missing_wait_is_seen(
    kind: type, method: str, text: str, instead: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = textwrap.dedent(inspect.getsource(vars(kind)[method]))
    assert source.count(text) == 1
    made: dict[str, Any] = {}
    exec(source.replace(text, instead or "pass"), vars(inspect.getmodule(kind)), made)
    with patch.object(kind, method, made[method]):
        assert any(emulated(policy, pace, seed, monkeypatch) for pace, seed in RUNS)
