"""A block that counts outside of its modules counts again in its second run, and verified steps raise."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from ckpt_ft import apply_policy
from ckpt_ft.checkpointing.verify import VerificationError

COUNT = 0


def counts_in_a_closure() -> Callable[[], int]:
    count = 0

    def called() -> int:
        nonlocal count
        count += 1
        return count

    return called


def counts_in_a_list_of_a_closure() -> Callable[[], int]:
    seen: list[int] = []

    def called() -> int:
        seen.append(1)
        return len(seen)

    return called


def counts_in_a_global() -> Callable[[], int]:
    global COUNT
    COUNT = 0

    def called() -> int:
        global COUNT
        COUNT += 1
        return COUNT

    return called


def counts_in_a_class() -> Callable[[], int]:
    class Counter:
        calls = 0
        seen: ClassVar[list[int]] = []

    def called() -> int:
        Counter.calls += 1
        Counter.seen.append(1)
        return len(Counter.seen)

    return called


def counts_in_a_default() -> Callable[[], int]:
    def called(seen: list[int] = []) -> int:  # noqa: B006
        seen.append(1)
        return len(seen)

    return called


def counts_in_an_object() -> Callable[[], int]:
    class Slots:
        __slots__ = ("count",)

    def called(slots: Slots) -> int:
        slots.count += 1  # type: ignore[attr-defined]
        return int(slots.count)  # type: ignore[attr-defined]

    slots = Slots()
    slots.count = 0  # type: ignore[attr-defined]
    return functools.partial(called, slots)


def draws_from_a_forked_generator() -> Callable[[], int]:
    def called() -> int:
        with torch.random.fork_rng(devices=[]):
            return int(torch.randint(1000, ()))

    return called


KINDS = [
    counts_in_a_closure, counts_in_a_list_of_a_closure, counts_in_a_global, counts_in_a_class, counts_in_a_default,
    counts_in_an_object, draws_from_a_forked_generator,
]  # fmt: skip


class Net(nn.Module):
    """Blocks whose MLP scales its input by the number of its calls."""

    def __init__(self, called: Callable[[], int]) -> None:
        class Mlp(nn.Sequential):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                out: torch.Tensor = super().forward(x * (1 + called() / 100))
                return out

        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm, self.mlp = nn.LayerNorm(4), Mlp(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                out: torch.Tensor = x + self.mlp(self.norm(x))
                return out

        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def gradients(kind: Callable[[], Callable[[], int]], policy: str) -> dict[str, Any]:
    model = Net(kind())
    apply_policy(model, policy)
    torch.manual_seed(0)
    loss = model(torch.linspace(-1, 1, 48).view(3, 4, 4)).square().mean()
    torch.rand(1)
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("policy", ["full", "segments:2", "save:matmul", "modules:mlp"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_first_step_of_a_block_that_counts_outside_of_its_modules_raises(
    kind: Callable[[], Callable[[], int]], policy: str
) -> None:
    with pytest.raises(VerificationError, match="variable outside of its modules") as error:
        gradients(kind, policy)
    assert error.value.differs == "values"
    assert error.value.region.startswith("layers.0")


@pytest.mark.parametrize("policy", ["offload", "pointwise"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_policies_that_run_no_block_twice_take_such_a_block(
    kind: Callable[[], Callable[[], int]], policy: str
) -> None:
    expected, found = gradients(kind, "none"), gradients(kind, policy)
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=1e-6, atol=0), name
