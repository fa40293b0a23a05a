"""A block's second run draws the same random numbers as its first, from PyTorch, Python and numpy."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from vision_models import assert_same

from ckpt_ft import apply_policy
from ckpt_ft.checkpointing import rng

DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(()).item(),
    "random": random.random,
    "gauss": lambda: random.gauss(0, 1),  # draws two numbers at a time and keeps one
    "numpy": np.random.rand,
    "randn": np.random.randn,  # this too
}


class Block(nn.Module):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * (1 + self.draw())).tanh()


class Net(nn.Module):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(draw) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def step(net: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the gradients, and the next number of each generator after two steps."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    for _ in range(2):
        net(torch.ones(2, 4)).sum().backward()
    after = {f"next {name}": torch.tensor(draw()) for name, draw in DRAWS.items()}
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None} | after


@pytest.mark.parametrize("policy", ["full", "every:2", "segments:2", "save:matmul"])
@pytest.mark.parametrize("kind", DRAWS)
def test_second_run_draws_the_same_numbers(kind: str, policy: str) -> None:
    plain, model = Net(DRAWS[kind]), Net(DRAWS[kind])
    apply_policy(model, policy)
    assert_same(step(model), step(plain))


@pytest.mark.parametrize("kind", DRAWS)
def test_snapshot_notices_each_draw_and_repeats_it(kind: str) -> None:
    draw = DRAWS[kind]
    draw()
    for _ in range(3):
        before = rng.snapshot(host=True)
        assert before == rng.snapshot(host=True)
        drawn = draw()
        moved = before.moved(rng.snapshot(host=True))
        assert len(moved.states) == 1
        moved.restore()
        assert draw() == drawn


def test_other_bit_generator_of_numpy() -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        test_snapshot_notices_each_draw_and_repeats_it("randn")
    finally:
        np.random.set_bit_generator(before)


class OnTwoDevices(nn.Module):
    """Its first argument is on the CPU, and it draws on the accelerator."""

    def forward(self, index: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.dropout(inputs["x"], 0.5).sin() * index.to(inputs["x"].device)


class DeviceNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([OnTwoDevices() for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(torch.ones(()), {"x": x})
        return x


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the accelerator's generator needs an accelerator")
@pytest.mark.parametrize("policy", ["full", "segments:2"])
def test_random_state_of_the_accelerator_with_a_cpu_argument_first(policy: str) -> None:
    found = []
    for applied in ("none", policy):
        model = DeviceNet()
        apply_policy(model, applied)
        x = torch.ones(64, device="cuda", requires_grad=True)
        torch.manual_seed(0)
        model(x).sum().backward()
        found.append({"grad": x.grad, "next": torch.rand(2, device="cuda")})
    assert_same(found[1], found[0])


def test_random_state_of_every_device_among_the_arguments_is_kept() -> None:
    from ckpt_ft.checkpointing.recompute import Checkpointed, runs

    class Elsewhere(torch.Tensor):
        device = torch.device("cuda", 3)
        is_cpu = False

    region = Checkpointed(OnTwoDevices(), None)
    contexts = runs(region, (torch.ones(()),), {"inputs": [{"x": torch.ones(2).as_subclass(Elsewhere)}]})
    assert contexts is not None
    assert contexts[0].devices == {torch.device("cuda", 3)}


@pytest.mark.filterwarnings("ignore")  # warnings of torch's own imports
@pytest.mark.parametrize("policy", ["full", "save:matmul", "segments:2"])
def test_compiled_blocks_with_dropout_keep_the_bits(policy: str) -> None:
    """Gradients equal those of compiled blocks without a policy."""

    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.dropout(self.linear(x).tanh())

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(Dropping() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    found = []
    for applied in ("none", policy):
        torch._dynamo.reset()
        model = Stack().train()
        apply_policy(model, applied)
        for layer in model.layers:
            layer.compile(backend="aot_eager")
        torch.manual_seed(1)
        model(torch.ones(4, 8)).square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *found))
    assert any(gradient.count_nonzero() < gradient.numel() for gradient in found[0])  # dropout was active
