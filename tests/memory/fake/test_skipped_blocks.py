"""Blocks that are alike are skipped, and the record is that of all of them: event for event, op for op."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import language_models
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from trace_models import adamw, language_model, training_step, vit

from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.memory.fake.step import trace_step, trace_steps
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.spec.launch import Launch

BLOCKS = 7
FOUR = 4  # that run
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
Step = Callable[[nn.Module, Any], None]


def deep(name: str) -> tuple[nn.Module, Step]:
    """The model of an architecture, with `BLOCKS` blocks, and a training step of it."""
    sizes = language_models.CONFIGS[name]
    with pytest.MonkeyPatch.context() as patch:
        layers = {key: BLOCKS for key in _LAYERS if key in sizes}
        patch.setitem(language_models.CONFIGS, name, {**sizes, **layers, "use_cache": False})
        model = language_models.make(name)
    inputs = language_models.batch()

    def step(model: nn.Module, optimizer: Any) -> None:
        model(**inputs).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def both(model: nn.Module, step: Step, policy: str = "none", **options: Any) -> tuple[StepTrace, StepTrace, int]:
    """The trace in which every block runs, the one in which some are skipped, and how many blocks ran in that."""
    options = {"make_optimizer": adamw, **options}
    ran = 0

    def count(module: nn.Module, args: Any) -> None:
        nonlocal ran
        ran += torch._C._current_graph_task_id() < 0

    applied = apply_policy(model, policy)
    whole = trace_step(model, step, **options)
    applied.remove()
    applied = apply_policy(model, policy)
    hooks = [block.register_forward_pre_hook(count) for block in applied.found.blocks.values() or blocks_of(model)]
    skipping = trace_steps(model, [step, step], **options)
    applied.remove()
    for hook in hooks:
        hook.remove()
    return whole, skipping, ran // 2


def blocks_of(model: nn.Module) -> list[nn.Module]:
    applied = apply_policy(model, "full")
    applied.remove()
    return list(applied.found.blocks.values())


def rows(trace: StepTrace) -> list[int]:
    """Events; frees in a row sorted: autocast drops its cache of weights in the order of a hash map of addresses."""
    told: list[int] = []
    freed: list[int] = []
    for event in trace.events:
        if event < 0:
            freed.append(event)
        else:
            told += [*sorted(freed), event]
            freed = []
    return told + sorted(freed)


def assert_same(one: StepTrace, other: StepTrace) -> None:
    assert one.storages == other.storages
    assert one.ops == other.ops
    assert rows(one) == rows(other)
    assert (one.marks, one.notes) == (other.marks, other.notes)
    assert (one.peaks, one.at_peak, one.peak_reserved) == (other.peaks, other.at_peak, other.peak_reserved)
    if one.device != "cpu":
        assert one.seconds == other.seconds


def few(every: Iterable[str], *fast: str) -> list[Any]:
    """All of them, those that are not `fast` as slow tests."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in every]


# blocks that differ are traced one by one: jamba's alternate; of T5 the first of each stack has a bias of its own
RAN = {"jamba": BLOCKS, "t5": 2 * (FOUR + 1)}


@pytest.mark.parametrize("name", few(language_models.CONFIGS, "t5", "mixtral", "jamba"))
def test_every_architecture(name: str) -> None:
    whole, skipping, ran = both(*deep(name))
    assert whole.to_json() == skipping.to_json()
    assert ran == RAN.get(name, FOUR)


# a segment's own blocks repeat each other where they are many; every second one is another kind
POLICIES = {
    "full": FOUR,
    "pointwise,head": FOUR,
    "save:attention+matmul": FOUR,
    "save:matmul/2": FOUR,
    "modules:mlp": FOUR,
    "first:6": FOUR + 1,
    "full,offload": FOUR,
    "segments:1": FOUR + 1,
    "every:2": BLOCKS,
    "sqrt": BLOCKS,
}


@pytest.mark.parametrize("policy", few(POLICIES, "full", "segments:1", "every:2"))
def test_every_kind_of_policy(policy: str) -> None:
    whole, skipping, ran = both(*deep("phi"), policy, device="cpu")
    assert whole.to_json() == skipping.to_json()
    assert ran == POLICIES[policy]


@pytest.mark.parametrize("policy", few(["none", "full", "pointwise"], "full"))
def test_under_autocast(policy: str) -> None:
    """Weights that autocast has cast are freed when it ends, those of all blocks together."""
    model, loss = vit(num_hidden_layers=BLOCKS)
    whole, skipping, ran = both(model, training_step(loss, autocast=True), policy, device="cpu")
    assert_same(whole, skipping)
    assert ran == FOUR


def test_micro_batches_add_to_gradients() -> None:
    model, loss = language_model(num_hidden_layers=BLOCKS)

    def step(model: nn.Module, optimizer: Any) -> None:
        for _ in range(3):
            loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    whole, skipping, ran = both(model, step)
    assert whole.to_json() == skipping.to_json()
    assert ran == 3 * FOUR


def test_gradients_may_outlive_a_step() -> None:
    model, loss = language_model(num_hidden_layers=BLOCKS)

    def step(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    whole, skipping, ran = both(model, step, make_optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    assert whole.to_json() == skipping.to_json()
    assert ran == FOUR


def test_frozen_blocks_and_a_forward_without_gradients() -> None:
    model, loss = language_model(num_hidden_layers=BLOCKS)
    model.model.requires_grad_(False)

    def step(model: nn.Module, optimizer: Any) -> None:
        with torch.no_grad():
            teacher = loss(model)
        (loss(model) + teacher).backward()
        optimizer.step()
        optimizer.zero_grad()

    whole, skipping, ran = both(model, step)
    assert whole.to_json() == skipping.to_json()
    assert ran == 2 * FOUR


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).relu()


class Stack(nn.Module):
    """Blocks in a list, with a loop that tests give."""

    def __init__(self, loop: Callable[[nn.ModuleList, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.loop = loop

    def forward(self, x: Tensor) -> Tensor:
        return self.loop(self.blocks, x)


def _plain(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def _works_in_between(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for k, block in enumerate(blocks):
        x = block(x) * 2 if k == 4 else block(x)
    return x


def _keeps_one(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    kept = x
    for k, block in enumerate(blocks):
        x = block(x)
        kept = x if k == 4 else kept
    return x + kept


def _keeps_all(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    kept = []
    for block in blocks:
        x = block(x)
        kept.append(x)
    return torch.stack(kept).sum()


def _drops_one(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for k, block in enumerate(blocks):
        x = x if k == 4 else block(x)
    return x


def _goes_back(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in [*blocks, *blocks]:
        x = block(x)
    return x


def _forks(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    return torch.stack([block(x) for block in blocks]).sum()


LOOPS = {  # and how many blocks run where nothing is seen to be otherwise too late
    _plain: FOUR, _works_in_between: BLOCKS, _keeps_one: BLOCKS, _keeps_all: BLOCKS, _drops_one: BLOCKS - 1,
    _goes_back: 2 * FOUR, _forks: BLOCKS,
}  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_loop_of_ones_own(loop: Callable[[nn.ModuleList, Tensor], Tensor]) -> None:
    def step(model: nn.Module, optimizer: Any) -> None:
        model(torch.zeros(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    whole, skipping, _ = both(Stack(loop), step)
    assert whole.to_json() == skipping.to_json()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_all_of_them(reentrant: bool) -> None:
    """Its second run calls what the first one skipped: every block is traced."""

    def step(model: nn.Module, optimizer: Any) -> None:
        x = torch.zeros(2, 4, requires_grad=True)
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    whole, skipping, _ = both(Stack(_plain), step)
    assert whole.to_json() == skipping.to_json()


def _tie(blocks: nn.ModuleList) -> None:
    blocks[5].linear.weight = blocks[2].linear.weight


def _freeze(blocks: nn.ModuleList) -> None:
    blocks[3].linear.weight.requires_grad_(False)


def _widen(blocks: nn.ModuleList) -> None:
    blocks[4].linear = nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 4))


def _listen(blocks: nn.ModuleList) -> None:
    blocks[4].register_forward_hook(lambda module, args, out: out * 2)


def _pair(blocks: nn.ModuleList) -> None:
    for k, block in enumerate(blocks):
        block.frame = [] if k % 2 == 0 else blocks[k - 1].frame


@pytest.mark.parametrize("change", [_tie, _freeze, _widen, _listen, _pair], ids=lambda f: f.__name__)
def test_blocks_that_differ_all_run(change: Callable[[nn.ModuleList], None]) -> None:
    model = Stack(_plain)
    change(model.blocks)

    def step(model: nn.Module, optimizer: Any) -> None:
        model(torch.zeros(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    whole, skipping, ran = both(model, step)
    assert whole.to_json() == skipping.to_json()
    assert ran == BLOCKS


class Dropped(Block):
    """A block that a coin drops."""

    def forward(self, x: Tensor) -> Tensor:
        return x if random.random() < 0.1 else super().forward(x)


class Late(Block):
    """A block that works more from the fourth on, told by its number when it runs."""

    number = 0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh() if self.number > 3 else super().forward(x)


class Counting(Block):
    """A block that counts, beside what it computes, in a tensor whose value is known."""

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, count = given
        return super().forward(x) + count.nonzero().sum(), count + 1


@pytest.mark.parametrize("kind", [Dropped, Late, Counting], ids=lambda kind: kind.__name__)
def test_blocks_of_one_kind_that_do_not_do_the_same(kind: type[Block]) -> None:
    model = Stack(_counted if kind is Counting else _plain)
    for k in range(BLOCKS):
        model.blocks[k] = kind()
        model.blocks[k].number = k

    def step(model: nn.Module, optimizer: Any) -> None:
        random.seed(1)
        model(torch.zeros(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    whole, skipping, ran = both(model, step)
    assert whole.to_json() == skipping.to_json()
    assert ran >= BLOCKS


def _counted(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    given = x, torch.tensor([-2, 1, 3])
    for block in blocks:
        given = block(given)
    return given[0]


def test_only_the_step_in_which_blocks_differ_is_traced_whole() -> None:
    """The trace begins anew, once; the other steps keep what was skipped in them."""
    model = Stack(_plain)
    calls: list[str] = []

    def plain(model: nn.Module, optimizer: Any) -> None:
        calls.append("plain")
        model(torch.zeros(2, 4)).sum().backward()
        model.zero_grad()

    def odd(model: nn.Module, optimizer: Any) -> None:
        calls.append("odd")
        _works_in_between(model.blocks, torch.zeros(2, 4)).sum().backward()
        model.zero_grad()

    skipping = trace_steps(model, [plain, odd, plain])
    assert calls == ["plain", "odd", "plain", "odd", "plain"]
    assert [op.name for op in skipping.ops].count("aten.addmm.default") == 3 * BLOCKS


def test_what_changes_between_steps_is_seen() -> None:
    """A block frozen before the second step: it and its neighbours no longer repeat each other."""
    model = Stack(_plain)

    def first(model: nn.Module, optimizer: Any) -> None:
        model.blocks.requires_grad_(True)
        model(torch.zeros(2, 4)).sum().backward()
        model.zero_grad()

    def second(model: nn.Module, optimizer: Any) -> None:
        model.blocks[4].requires_grad_(False)
        model(torch.zeros(2, 4)).sum().backward()
        model.zero_grad()

    calls = iter([first, second])
    whole = trace_step(model, lambda model, optimizer: next(calls)(model, optimizer))
    assert trace_steps(model, [first, second]).to_json() == whole.to_json()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_what_several_processes_share_is_traced_whole(strategy: str) -> None:
    model, loss = language_model(num_hidden_layers=6)
    launch = Launch(strategy, 4)
    whole = trace_step(model, training_step(loss), make_optimizer=adamw, launch=launch)
    skipping = trace_steps(model, [training_step(loss)] * 2, make_optimizer=adamw, launch=launch)
    assert replace(whole, notes=[]).to_json() == replace(skipping, notes=[]).to_json()
