"""Equal blocks are skipped, and the record equals the one with all blocks, event by event and operator by operator."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import language_models
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from trace_models import adamw, language_model, sorted_events, training_step, vit
from versions import slow_except

from ckpt_ft.checkpointing import offload
from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.memory.fake.step import trace_step, trace_steps
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.spec.launch import Launch

BLOCKS = 7
FOUR = 4  # blocks that run
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
Step = Callable[[nn.Module, Any], None]


def model_with_many_blocks(name: str) -> tuple[nn.Module, Step]:
    """Returns a model of the architecture with `BLOCKS` blocks, and its training step."""
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


def trace_complete_and_skipping(
    model: nn.Module, step: Step, policy: str = "none", **options: Any
) -> tuple[StepTrace, StepTrace, int]:
    """Returns the trace with every block, the trace with skipped blocks, and the number of blocks that ran in it."""
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


def assert_same(one: StepTrace, other: StepTrace) -> None:
    assert one.storages == other.storages
    assert one.ops == other.ops
    assert sorted_events(one) == sorted_events(other)
    assert (one.marks, one.notes) == (other.marks, other.notes)
    assert (one.peaks, one.at_peak, one.peak_reserved) == (other.peaks, other.at_peak, other.peak_reserved)
    if one.device != "cpu":
        assert one.seconds == other.seconds


# Blocks that differ are traced one by one: jamba's kinds alternate; T5's first block of each stack has its own bias.
RAN = {"jamba": BLOCKS, "t5": 2 * (FOUR + 1)}


@pytest.mark.parametrize("name", slow_except(language_models.CONFIGS, "t5", "mixtral", "jamba"))
def test_skipped_trace_of_every_architecture_equals_the_complete_one(name: str) -> None:
    whole, skipping, ran = trace_complete_and_skipping(*model_with_many_blocks(name))
    assert whole.to_json() == skipping.to_json()
    assert ran == RAN.get(name, FOUR)


# With many segments, their blocks repeat each other; under every:2, two kinds of blocks alternate.
POLICIES = {
    "full": FOUR, "pointwise,head": FOUR, "save:attention+matmul": FOUR, "save:matmul/2": FOUR, "modules:mlp": FOUR,
    "first:6": FOUR + 1, "full,offload": FOUR + 1, "segments:1": FOUR + 1, "every:2": BLOCKS, "sqrt": BLOCKS,
}  # fmt: skip


@pytest.mark.parametrize("policy", slow_except(POLICIES, "full", "segments:1", "every:2", "full,offload"))
def test_skipped_trace_under_every_kind_of_policy_equals_the_complete_one(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(offload.install.__kwdefaults__, "min_bytes", 1)
    card = "rtx-4090" if "offload" in policy else "cpu"  # where its copies have a stream of their own
    whole, skipping, ran = trace_complete_and_skipping(*model_with_many_blocks("phi"), policy, device=card)
    assert whole.to_json() == skipping.to_json()
    assert ran == POLICIES[policy]


@pytest.mark.parametrize("policy", slow_except(["none", "full", "pointwise"], "full"))
def test_skipped_trace_under_autocast_equals_the_complete_one(policy: str) -> None:
    """When autocast ends, it frees the cast weights of all blocks together."""
    model, loss = vit(num_hidden_layers=BLOCKS)
    whole, skipping, ran = trace_complete_and_skipping(model, training_step(loss, autocast=True), policy, device="cpu")
    assert_same(whole, skipping)
    assert ran == FOUR


def test_blocks_are_skipped_in_each_micro_batch() -> None:
    model, loss = language_model(num_hidden_layers=BLOCKS)

    def step(model: nn.Module, optimizer: Any) -> None:
        for _ in range(3):
            loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    whole, skipping, ran = trace_complete_and_skipping(model, step)
    assert whole.to_json() == skipping.to_json()
    assert ran == 3 * FOUR


def test_blocks_are_skipped_if_gradients_outlive_the_step() -> None:
    model, loss = language_model(num_hidden_layers=BLOCKS)

    def step(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    whole, skipping, ran = trace_complete_and_skipping(
        model, step, make_optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1)
    )
    assert whole.to_json() == skipping.to_json()
    assert ran == FOUR


def test_frozen_blocks_are_skipped_in_a_forward_without_gradients() -> None:
    model, loss = language_model(num_hidden_layers=BLOCKS)
    model.model.requires_grad_(False)

    def step(model: nn.Module, optimizer: Any) -> None:
        with torch.no_grad():
            teacher = loss(model)
        (loss(model) + teacher).backward()
        optimizer.step()
        optimizer.zero_grad()

    whole, skipping, ran = trace_complete_and_skipping(model, step)
    assert whole.to_json() == skipping.to_json()
    assert ran == 2 * FOUR


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).relu()


class Stack(nn.Module):
    """Blocks in a list, run by a loop that the test passes."""

    def __init__(self, loop: Callable[[nn.ModuleList, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.loop = loop

    def forward(self, x: Tensor) -> Tensor:
        return self.loop(self.blocks, x)


def _in_sequence(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def _scales_after_one(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for k, block in enumerate(blocks):
        x = block(x) * 2 if k == 4 else block(x)
    return x


def _adds_one_output_at_the_end(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    kept = x
    for k, block in enumerate(blocks):
        x = block(x)
        kept = x if k == 4 else kept
    return x + kept


def _stacks_all_outputs(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    kept = []
    for block in blocks:
        x = block(x)
        kept.append(x)
    return torch.stack(kept).sum()


def _leaves_one_out(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for k, block in enumerate(blocks):
        x = x if k == 4 else block(x)
    return x


def _runs_twice(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in [*blocks, *blocks]:
        x = block(x)
    return x


def _runs_side_by_side(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    return torch.stack([block(x) for block in blocks]).sum()


LOOPS = {  # loops, and the number of blocks that run if every difference is seen in time
    _in_sequence: FOUR, _scales_after_one: BLOCKS, _adds_one_output_at_the_end: BLOCKS, _stacks_all_outputs: BLOCKS,
    _leaves_one_out: BLOCKS - 1, _runs_twice: 2 * FOUR, _runs_side_by_side: BLOCKS,
}  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_skipped_trace_of_custom_loops_equals_a_complete_one(loop: Callable[[nn.ModuleList, Tensor], Tensor]) -> None:
    def step(model: nn.Module, optimizer: Any) -> None:
        model(torch.zeros(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    whole, skipping, _ = trace_complete_and_skipping(Stack(loop), step)
    assert whole.to_json() == skipping.to_json()


@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_inside_one_checkpoint_are_not_skipped(reentrant: bool) -> None:
    """The checkpoint's second run calls blocks that the first run skipped."""

    def step(model: nn.Module, optimizer: Any) -> None:
        x = torch.zeros(2, 4, requires_grad=True)
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    whole, skipping, _ = trace_complete_and_skipping(Stack(_in_sequence), step)
    assert whole.to_json() == skipping.to_json()


def _tie_weights(blocks: nn.ModuleList) -> None:
    blocks[5].linear.weight = blocks[2].linear.weight


def _freeze_one(blocks: nn.ModuleList) -> None:
    blocks[3].linear.weight.requires_grad_(False)


def _replace_linear(blocks: nn.ModuleList) -> None:
    blocks[4].linear = nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 4))


def _add_hook(blocks: nn.ModuleList) -> None:
    blocks[4].register_forward_hook(lambda module, args, out: out * 2)


def _share_in_pairs(blocks: nn.ModuleList) -> None:
    for k, block in enumerate(blocks):
        block.frame = [] if k % 2 == 0 else blocks[k - 1].frame


@pytest.mark.parametrize(
    "change", [_tie_weights, _freeze_one, _replace_linear, _add_hook, _share_in_pairs], ids=lambda f: f.__name__
)
def test_blocks_that_differ_are_not_skipped(change: Callable[[nn.ModuleList], None]) -> None:
    model = Stack(_in_sequence)
    change(model.blocks)

    def step(model: nn.Module, optimizer: Any) -> None:
        model(torch.zeros(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    whole, skipping, ran = trace_complete_and_skipping(model, step)
    assert whole.to_json() == skipping.to_json()
    assert ran == BLOCKS


class RandomlyDropped(Block):
    """A block that is skipped at random."""

    def forward(self, x: Tensor) -> Tensor:
        return x if random.random() < 0.1 else super().forward(x)


class MoreWorkLater(Block):
    """A block that does more work from the fourth one on, according to its number at run time."""

    number = 0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh() if self.number > 3 else super().forward(x)


class Counting(Block):
    """A block that also counts in an integer tensor, whose values a trace knows."""

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, count = given
        return super().forward(x) + count.nonzero().sum(), count + 1


@pytest.mark.parametrize("kind", [RandomlyDropped, MoreWorkLater, Counting], ids=lambda kind: kind.__name__)
def test_blocks_of_one_class_that_behave_differently_are_not_skipped(kind: type[Block]) -> None:
    model = Stack(_counted if kind is Counting else _in_sequence)
    for k in range(BLOCKS):
        model.blocks[k] = kind()
        model.blocks[k].number = k

    def step(model: nn.Module, optimizer: Any) -> None:
        random.seed(1)
        model(torch.zeros(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    whole, skipping, ran = trace_complete_and_skipping(model, step)
    assert whole.to_json() == skipping.to_json()
    assert ran >= BLOCKS


def _counted(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    given = x, torch.tensor([-2, 1, 3])
    for block in blocks:
        given = block(given)
    return given[0]


def test_only_the_step_in_which_blocks_differ_is_traced_completely() -> None:
    """The trace restarts once; blocks of the other steps stay skipped."""
    model = Stack(_in_sequence)
    calls: list[str] = []

    def plain(model: nn.Module, optimizer: Any) -> None:
        calls.append("plain")
        model(torch.zeros(2, 4)).sum().backward()
        model.zero_grad()

    def odd(model: nn.Module, optimizer: Any) -> None:
        calls.append("odd")
        _scales_after_one(model.blocks, torch.zeros(2, 4)).sum().backward()
        model.zero_grad()

    skipping = trace_steps(model, [plain, odd, plain])
    assert calls == ["plain", "odd", "plain", "odd", "plain"]
    assert [op.name for op in skipping.ops].count("aten.addmm.default") == 3 * BLOCKS


def test_change_between_steps_is_noticed() -> None:
    """A block is frozen before the second step, so that it no longer repeats its neighbours."""
    model = Stack(_in_sequence)

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
def test_skipped_trace_of_a_launch_equals_the_complete_one(strategy: str) -> None:
    model, loss = language_model(num_hidden_layers=6)
    launch = Launch(strategy, 4)
    whole = trace_step(model, training_step(loss), make_optimizer=adamw, launch=launch)
    skipping = trace_steps(model, [training_step(loss)] * 2, make_optimizer=adamw, launch=launch)
    assert replace(whole, notes=[]).to_json() == replace(skipping, notes=[]).to_json()
