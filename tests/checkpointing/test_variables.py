"""Variables outside modules that blocks change: the step equals plain training under every policy, or is refused."""

from __future__ import annotations

import functools
import queue
import random
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from ckpt_ft import apply_policy
from ckpt_ft.errors import UserError

POLICIES = [
    "full", "every:2", "segments:2", "sqrt", "stages", "save:matmul", "modules:mlp", "offload", "pointwise",
]  # fmt: skip
COUNT, LIST, DEQUE, QUEUE, LOCAL = 0, [0] * 5000, deque([0], maxlen=3), queue.Queue[int](), threading.local()
TENSOR, ARRAY, COUNTER, DEFAULT, RECORD = (
    torch.zeros(4),
    np.zeros(3),
    Counter[str](),
    defaultdict(list),
    SimpleNamespace(),
)
GLOBALS = ("COUNT", "LIST", "DEQUE", "QUEUE", "LOCAL", "TENSOR", "ARRAY", "COUNTER", "DEFAULT", "RECORD")


class Slots:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


def append_to_global() -> float:
    LIST.append(len(LIST))
    return len(LIST) - 5000


class Twice(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Twice.calls += 1
        ctx.factor = 1 + Twice.calls / 100
        return x * ctx.factor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.factor


def make_mlp_that_changes_variables() -> tuple[type[nn.Module], Callable[[], Any]]:
    """Returns a class of MLPs whose forward changes variables of each kind, and a function that reads their values."""
    global COUNT, LIST, DEQUE, QUEUE, LOCAL, TENSOR, ARRAY, COUNTER, DEFAULT, RECORD
    COUNT, LIST, DEQUE, QUEUE, LOCAL = 0, [0] * 5000, deque([0], maxlen=3), queue.Queue(), threading.local()
    TENSOR, ARRAY, COUNTER, DEFAULT, RECORD = (
        torch.zeros(4),
        np.zeros(3),
        Counter(),
        defaultdict(list),
        SimpleNamespace(n=0),
    )
    Twice.calls = LOCAL.count = 0
    closed, count, slots, made = [0.0], 0, Slots(), random.Random(0)

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        calls = {"count": 0}

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            calls["count"] += 1
            return function(*args) * (1 + calls["count"] / 100)

        return call

    @functools.lru_cache
    def table(size: int) -> torch.Tensor:
        return torch.linspace(0, 1, size)

    def hook(module: nn.Module, given: Any, out: torch.Tensor) -> torch.Tensor:
        closed.append(float(out.detach().sum()))
        return out * len(closed)

    class Mlp(nn.Module):
        calls = 0
        seen: ClassVar[dict[int, float]] = {}
        unread: ClassVar[list[int]] = []
        mean = torch.zeros(4)
        generator = torch.Generator().manual_seed(0)
        numpy = np.random.default_rng(0)

        def __init__(self) -> None:
            super().__init__()
            self.up, self.act, self.down = nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)
            self.act.register_forward_hook(hook)

        @classmethod
        def called(cls) -> int:
            cls.calls += 1
            return cls.calls

        @counted
        def change(self, x: torch.Tensor, given: list[int] = [], *, named: dict[int, int] = {}) -> torch.Tensor:  # noqa: B006
            global COUNT
            nonlocal count
            COUNT, count = COUNT + 1, count + 1
            LOCAL.count, slots.count, RECORD.n = LOCAL.count + 1, slots.count + 1, RECORD.n + 1
            self.seen[len(self.seen)] = float(x.detach().sum())
            self.unread.append(self.called())
            if "late" not in vars(Mlp):
                Mlp.late = torch.rand(4)  # type: ignore[attr-defined]
            Mlp.mean = Mlp.mean * 0.9 + x.detach().mean((0, 1))
            TENSOR.add_(1)
            ARRAY[0] += 1
            DEQUE.append(len(self.unread))
            QUEUE.put(1)
            COUNTER["calls"] += 1
            DEFAULT["calls"].append(COUNT)
            given.append(1)
            named[len(named)] = 1
            append_to_global.calls = getattr(append_to_global, "calls", 0) + 1  # type: ignore[attr-defined]
            counts = (COUNT, count, LOCAL.count, slots.count, RECORD.n, len(self.seen), float(ARRAY[0]), sum(DEQUE))
            counts += (
                QUEUE.qsize(),
                COUNTER["calls"],
                len(DEFAULT["calls"]),
                len(given),
                len(named),
                append_to_global(),
            )
            drawn = made.random() + float(self.numpy.random()) + torch.rand(4, generator=self.generator)
            np.random.seed(3)
            drawn = drawn + random.random() + np.random.rand() + table(4)
            return x * sum(counts) / 100 + Mlp.mean + TENSOR + drawn + Mlp.late  # type: ignore[attr-defined]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.down(self.act(self.up(Twice.apply(self.change(x)))))
            return out

    append_to_global.calls = 0  # type: ignore[attr-defined]
    state = {name: value for name, value in vars(Mlp).items() if name in ("seen", "unread")}

    def values() -> dict[str, Any]:
        found = {name: globals()[name] for name in GLOBALS} | {"QUEUE": list(QUEUE.queue), "LOCAL": LOCAL.count}
        found |= state | {"calls": Mlp.calls, "mean": Mlp.mean, "late": Mlp.late}  # type: ignore[attr-defined]
        found |= {"generator": Mlp.generator.get_state(), "numpy": Mlp.numpy.random(), "made": made.random()}
        found |= {"function": append_to_global.calls, "autograd": Twice.calls}  # type: ignore[attr-defined]
        defaults = Mlp.change.__wrapped__  # type: ignore[attr-defined]
        found |= {"default": defaults.__defaults__, "named": defaults.__kwdefaults__}
        return {**found, "closure": (closed, count, slots.count)}

    return Mlp, values


class Block(nn.Module):
    def __init__(self, mlp: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(4), mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.mlp(self.norm(x))
        return out


class Net(nn.Module):
    def __init__(self, mlp: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        stages = (nn.Sequential(Block(mlp), Block(mlp)), nn.Sequential(Block(mlp), Block(mlp)))
        self.stages, self.head = nn.ModuleList(stages), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        out: torch.Tensor = self.head(x)
        return out


def train(policy: str, verify: str = "never") -> dict[str, Any]:
    mlp, values = make_mlp_that_changes_variables()
    model = Net(mlp)
    random.seed(0)
    np.random.seed(0)
    apply_policy(model, policy, verify=verify)
    found: dict[str, Any] = {}
    for step in range(3):
        torch.manual_seed(step)
        model.zero_grad()
        loss = model(torch.randn(3, 4, 4)).square().mean()
        found[f"draws {step}"] = (random.random(), np.random.rand())  # also between forward and backward
        loss.backward()
        found |= {f"{name} {step}": p.grad for name, p in model.named_parameters()} | {f"loss {step}": loss.detach()}
        found[f"random {step}"] = (torch.get_rng_state(), random.random(), np.random.rand())
    return found | values()


def bit_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple):
        return all(map(bit_equal, one, other))
    return bool(np.all(one == other))


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return train("none")


@pytest.mark.parametrize(
    ("policy", "verify"),
    [*((policy, "first") for policy in POLICIES), *((policy, "never") for policy in POLICIES[:5:2])],
)
def test_variables_changed_outside_of_modules(policy: str, verify: str, plain: dict[str, Any]) -> None:
    found = train(policy, verify)
    assert found.keys() == plain.keys()
    assert [name for name, value in plain.items() if not bit_equal(found[name], value)] == []
    assert plain["closure"][1:] == (12, 12)
    assert plain["loss 2"] != plain["loss 1"]


def test_tile_refuses_an_mlp_that_writes_a_class_attribute() -> None:
    class Counting(nn.Sequential):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Counting.calls += 1
            out: torch.Tensor = super().forward(x)
            return out

    model = Net(lambda: Counting(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)))  # type: ignore[arg-type]
    apply_policy(model, "tile:2")
    with pytest.raises(UserError, match="'tile': a Counting writes a class attribute of Counting in its forward"):
        model(torch.randn(3, 4, 4))


@pytest.mark.parametrize("made", [lambda: iter(range(100)), lambda: (i for i in range(100))])
def test_iterator_that_cannot_be_reset_is_refused(made: Callable[[], Any]) -> None:
    numbers = made()

    class Reading(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * next(numbers)

    model = Net(lambda: Reading(4, 4))  # type: ignore[arg-type]
    apply_policy(model, "full", verify="never")
    with pytest.raises(UserError, match="forward changes 'numbers', which .*Reading.forward uses .*set it back"):
        model(torch.randn(3, 4, 4))


class FrozenList(list[int]):
    """Like pandas' FrozenList, whose `__radd__` raises when it is added to a list."""

    def __radd__(self, other: list[Any]) -> Any:
        raise TypeError("does not support mutable operations")


def test_list_subclass_as_a_class_attribute() -> None:
    class Block(nn.Linear):
        of = FrozenList([1, 2])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).sin() * self.of[0]

    model = nn.Sequential(Block(4, 4), Block(4, 4))
    apply_policy(model, "full", blocks=["0", "1"])
    model(torch.ones(2, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


class Lazy(dict[str, int]):
    """As transformers' tables of models, which import a model when they are asked for it."""

    def values(self) -> Any:
        raise AssertionError("a lookup reads its entries")


LAZY = Lazy(block=1)


class NamesLazyTable(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if "block" in LAZY else x


def test_a_table_that_loads_its_entries_is_not_asked_for_them() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), NamesLazyTable()) for _ in range(2)))
    x = torch.ones(1, 2, requires_grad=True)
    apply_policy(model, "full")
    model(x).sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0
