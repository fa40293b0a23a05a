"""Blocks whose gradients could be silently wrong when re-run: each step equals the plain one or raises."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import CheckpointError

from ckpt_ft import apply_policy
from ckpt_ft.checkpointing.verify import VerificationError
from ckpt_ft.errors import UserError
from ckpt_ft.memory.record.tracker import Tracker

POLICIES = ["full", "segments:2", "save:matmul"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)
        self.scale = 1.0

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)))) * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x)


class Net(nn.Module):
    def __init__(self, block: Callable[[], nn.Module], call: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([block() for _ in range(4)])
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) if self.call is None else self.call(block, x)
        return x


def numbers(model: nn.Module, steps: int = 2, between: Callable[[nn.Module], Any] | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for step in range(steps):
        torch.manual_seed(step)
        model.zero_grad()
        loss = model(torch.randn(3, 4)).square().sum()
        if between is not None:
            between(model)
        loss.backward()
        found[f"loss {step}"] = loss.detach()
        found |= {f"{name} {step}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    found |= {f"buffer {name}": value.clone() for name, value in model.named_buffers()}
    return found | {"random": torch.get_rng_state()}


def assert_equal(model: nn.Module, policy: str, **kwargs: Any) -> None:
    plain = copy.deepcopy(model)
    expected = numbers(plain, **kwargs)
    apply_policy(model, policy, verify="always")
    found = numbers(model, **kwargs)
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


class StatefulTuple(Block):
    """Carries a tuple from call to call, as a stateful LSTM does."""

    state: Any = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.mlp(x + (self.state[0] if self.state else 0))
        self.state = (out.detach().tanh(),)
        return out


class Counter(Block):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.mlp(x * self.calls)


class ListOfSeen(Block):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.history = {"last": [0.0]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(float(x.detach().sum()))
        self.history["last"] = [*self.history["last"], 1.0]
        return self.mlp(x * len(self.seen) + len(self.history["last"]))


class InPlaceAttribute(Block):
    """Has a tensor in an attribute and one in a list, both written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.average, self.more = torch.zeros(4), [torch.zeros(4)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.mlp(x + self.average + self.more[0])
        self.average.mul_(0.9).add_(x.detach().mean(0))
        self.more[0].add_(1)
        return out


class Memory:
    """A plain object that a block keeps."""

    def __init__(self) -> None:
        self.calls, self.mean, self.tree = 0, torch.zeros(4), {"counts": {"calls": 0.0}, "more": [[0.0]]}


class PlainObject(Block):
    """Autograd does not save its counts, so only the next call's result shows what a second run wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.generators = Memory(), [torch.Generator().manual_seed(0)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.memory
        out = self.mlp(x + memory.mean) * (1 + memory.calls + memory.tree["more"][0][-1])
        memory.calls += 1
        memory.mean += out.detach().mean(0)
        memory.tree["counts"]["calls"] += 1
        memory.tree["more"][0].append(memory.tree["counts"]["calls"])
        return out * torch.rand((), generator=self.generators[0])


class Aliases(Block):
    """Writes a buffer and reads a row of it through an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(2, 4))
        self.rows = [self.table[0], self.table[1]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table.add_(1)
        return self.mlp(x * self.rows[0].sin())


class LazyBuffer(Block):
    """Creates a buffer, a submodule and a parameter in its first forward, followed by dropout."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "position" not in self._buffers:
            self.register_buffer("position", torch.randn(4))
            self.extra = nn.Linear(4, 4)
        return self.mlp(F.dropout(self.extra(x) + self.position, 0.5))


class LazyLayer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.lazy = nn.LazyLinear(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(F.dropout(self.lazy(x), 0.5))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("block", [StatefulTuple, Counter, ListOfSeen, InPlaceAttribute, LazyBuffer, PlainObject])
def test_state_kept_from_call_to_call(block: type[Block], policy: str) -> None:
    assert_equal(Net(block), policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_written_tensors_that_share_memory_raise(policy: str) -> None:
    model = Net(Aliases)
    apply_policy(model, policy)
    with pytest.raises(VerificationError, match="blocks.0"):
        numbers(model, 4)


@pytest.mark.parametrize("policy", POLICIES)
def test_writes_into_given_objects_and_modules(policy: str) -> None:
    class Writer(Block):
        def __init__(self) -> None:
            super().__init__()
            self.owners: list[Any] = []

        def forward(self, x: torch.Tensor, memory: Memory) -> torch.Tensor:
            memory.calls += 1
            self.owners[0].total.add_(memory.calls)
            return self.mlp(x) * memory.calls + self.owners[0].total

    def train(policy: str) -> list[torch.Tensor]:
        memory = Memory()
        model = Net(Writer, lambda block, x: block(x, memory))
        model.register_buffer("total", torch.zeros(()))
        for block in model.blocks:
            block.owners.append(model)
        apply_policy(model, policy, verify="never")
        return [*numbers(model, 3).values(), torch.tensor(memory.calls)]

    assert all(map(torch.equal, train(policy), train("none")))


@pytest.mark.parametrize("policy", POLICIES)
def test_submodules_of_a_given_module_are_restored(policy: str) -> None:
    class Adapted(Block):
        def forward(self, x: torch.Tensor, adapter: nn.Module) -> torch.Tensor:
            return self.mlp(adapter(x))

    def train(policy: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        adapter = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.GELU()))
        model = Net(Adapted, lambda block, x: block(x, adapter))
        apply_policy(model, policy, verify="never")
        return [*numbers(model, 3).values(), *adapter.state_dict().values()]

    assert all(map(torch.equal, train(policy), train("none")))


@pytest.mark.parametrize("policy", ["full", "segments:2", "segments:4", "save:matmul"])
def test_attributes_of_tensors_reach_the_second_run(policy: str) -> None:
    class Deeper(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            depth: int = getattr(x, "depth", 1)
            if x.requires_grad:
                x.depth = 7  # type: ignore[attr-defined]
            y = (self.mlp(x) * depth).sin()
            y.depth = depth + 1  # type: ignore[attr-defined]
            return y

    plain, model = Net(Deeper), Net(Deeper)
    apply_policy(model, policy, verify="never")
    found, expected = numbers(model, 3), numbers(plain, 3)
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


def test_workspaces_of_kernels_are_not_compared() -> None:
    """An LSTM's on the CPU has bytes that its kernel does not write."""

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, torch.frombuffer(bytearray(os.urandom(64)), dtype=torch.uint8))
            return x.sin()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * ctx.saved_tensors[0].cos()

    class Workspace(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mlp(Kernel.apply(x))

    assert_equal(Net(Workspace), "full")


@pytest.mark.parametrize("entries", [1, 2000])
def test_written_tensor_in_a_tuple_is_refused(entries: int) -> None:
    class Tuples(Block):
        def __init__(self) -> None:
            super().__init__()
            self.kept = tuple(torch.zeros(4) for _ in range(entries))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept[0].add_(1)
            return self.mlp(x + self.kept[0])

    model = Net(Tuples)
    apply_policy(model, "full", verify="never")
    with pytest.raises(UserError, match="attribute 'kept' of Tuples is a tensor in a tuple"):
        numbers(model)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_lazy_layers_are_called_once_before(policy: str) -> None:
    plain, model = Net(LazyLayer), Net(LazyLayer)
    with pytest.raises(UserError, match="Net has lazy layers.*call it once before the policy is applied"):
        apply_policy(model, policy)
    for one in (plain, model):
        torch.manual_seed(0)
        one(torch.randn(3, 4))
    apply_policy(model, policy, verify="always")
    found, expected = numbers(model), numbers(plain)
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


@pytest.mark.parametrize("policy", POLICIES)
def test_attribute_set_around_forward_is_restored_for_the_second_run(policy: str) -> None:
    """diffusers and PEFT set a LoRA scale this way, in an attribute and in a dict of a layer."""

    class Scaled(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                block.scale, block.scaling["default"] = 0.5, 0.25
            try:
                return super().forward(x)
            finally:
                for block in self.blocks:
                    block.scale, block.scaling["default"] = 1.0, 1.0

    class Layer(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scaling = {"default": 1.0}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mlp(x) * self.scaling["default"]

    model = Scaled(Layer)
    assert_equal(model, policy)
    assert [(block.scale, block.scaling) for block in model.blocks] == [(1.0, {"default": 1.0})] * 4


@pytest.mark.parametrize("policy", POLICIES)
def test_attribute_changed_between_two_forwards_of_one_backward(policy: str) -> None:
    def step(model: Net) -> list[torch.Tensor]:
        torch.manual_seed(0)
        x = torch.randn(3, 4)
        first = model(x)
        for block in model.blocks:
            block.scale = 3.0
        (first.sum() + model(x).square().sum()).backward()
        return [p.grad for p in model.parameters()]

    plain, model = Net(Block), Net(Block)
    apply_policy(model, policy, verify="always")
    assert all(map(torch.equal, step(model), step(plain)))


def test_scaled_lora_layers_of_peft() -> None:
    peft = pytest.importorskip("peft")

    class Scaled(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            layers = [m for m in self.modules() if isinstance(m, peft.tuners.lora.LoraLayer)]
            for layer in layers:
                layer.scale_layer(0.5)
            out = super().forward(x)
            for layer in layers:
                layer.unscale_layer(0.5)
            return out

    model = Scaled(Block)
    config = peft.LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)
    for policy in ("full", "save:matmul"):
        assert_equal(copy.deepcopy(model), policy)


class Written(Block):
    """Normalises its own weight in forward (EDM2)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.up.weight.mul_(0.9)
        return self.mlp(x)


class WrittenThroughData(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.up.weight.data.mul_(0.9)
        return self.mlp(x)


def test_parameters_written_in_forward_are_refused() -> None:
    model = Net(Written)
    apply_policy(model, "full")
    with pytest.raises(UserError, match=r"Written: its parameter 'up.weight' is modified in forward"):
        numbers(model)
    model = Net(WrittenThroughData)
    apply_policy(model, "full")
    with pytest.raises(VerificationError, match=r"blocks.\d .*parameter 'up.weight'|made by"):
        numbers(model)


@dataclass
class Batch:
    x: torch.Tensor
    calls: int = 0


def in_dataclass(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return block(Batch(x))


def in_namespace(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return block(SimpleNamespace(x=x, calls=0))


class Unpacking(Block):
    """Writes into the object that it is given."""

    def forward(self, batch: Any) -> torch.Tensor:
        batch.calls += 1
        batch.x = batch.x * batch.calls
        return self.mlp(batch.x)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("call", [in_dataclass, in_namespace])
@pytest.mark.filterwarnings("ignore:policy .* no block was given:UserWarning")
def test_arguments_in_dataclasses_and_namespaces(call: Any, policy: str) -> None:
    assert_equal(Net(Unpacking, call), policy)


class Array(Block):
    def __init__(self) -> None:
        super().__init__()
        self.own = np.zeros(2)

    def forward(self, x: torch.Tensor, array: Any = None) -> torch.Tensor:
        array = self.own if array is None else array
        array += 1
        return self.mlp(x * float(array[0]))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("call", [None, lambda block, x: block(x, np.zeros(2))], ids=["attribute", "argument"])
def test_numpy_arrays_that_a_block_writes_and_reads_raise(call: Any, policy: str) -> None:
    model = Net(Array, call)
    apply_policy(model, policy)
    with pytest.raises(VerificationError, match="a numpy array"):
        numbers(model)


class Reading(Block):
    def forward(self, x: torch.Tensor, numbers: Any) -> torch.Tensor:
        return self.mlp(x * sum(numbers))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("made", [lambda: (i for i in (1, 2)), lambda: iter([1, 2])])
def test_iterator_arguments_are_refused(made: Any, policy: str) -> None:
    model = Net(Reading, lambda block, x: block(x, made()))
    apply_policy(model, policy)
    with pytest.raises(UserError, match="which its first run uses up.*give it a list"):
        numbers(model)


class WritingGiven(Block):
    """Writes in place into tensors given by keyword, in a tuple and in a dict, with and without gradient."""

    def forward(self, x: torch.Tensor, pair: Any = (), **named: Any) -> torch.Tensor:
        tensors = [*pair, *named.get("more", {}).values(), *(v for v in named.values() if isinstance(v, torch.Tensor))]
        out = x
        for tensor in tensors:
            out = out + tensor.mul_(2)
        return self.mlp(out)


GIVEN: dict[str, Callable[[torch.Tensor], dict[str, Any]]] = {
    "by name": lambda t: {"own": t},
    "in a tuple": lambda t: {"pair": (t,)},
    "in a dict": lambda t: {"more": {"a": t}},
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("gradient", [True, False])
def test_written_tensor_arguments_in_any_container(given: str, gradient: bool, policy: str) -> None:
    def call(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        tensor = x * 1.5 if gradient else x.detach() + 1
        return block(x, **GIVEN[given](tensor))

    assert_equal(Net(WritingGiven, call), policy)


class OwnCache(Block):
    """A user-defined block whose arguments have the names of a library's cache."""

    def forward(self, x: torch.Tensor, layer_past: torch.Tensor, use_cache: bool) -> torch.Tensor:
        return self.mlp(x + layer_past) * (2 if use_cache else 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_user_arguments_with_cache_names_are_kept(policy: str) -> None:
    assert_equal(Net(OwnCache, lambda block, x: block(x, layer_past=x.detach() * 2, use_cache=True)), policy)


class Outside(Block):
    """Reads an environment variable, which no policy can restore."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x * float(os.environ["FACTOR"]))


@pytest.mark.parametrize("policy", POLICIES)
def test_unrestorable_state_raises_before_a_weight_changes(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net(Outside)
    monkeypatch.setenv("FACTOR", "1")
    apply_policy(model, policy)
    before = [p.detach().clone() for p in model.parameters()]
    loss = model(torch.randn(3, 4)).square().sum()
    monkeypatch.setenv("FACTOR", "2")
    with pytest.raises(VerificationError) as error:  # it leaves backward, so that no optimizer steps
        loss.backward()
    assert error.value.region == "blocks.0"
    assert error.value.differs == "values"
    assert "blocks.0 (Outside), saved tensor" in str(error.value)
    assert all(map(torch.equal, model.parameters(), before))


class CountsInAnArray(Block):
    """Nobody reads its count, so that no gradient shows that the second run counts too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = np.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.mlp(x)


class CountsThroughData(CountsInAnArray):
    """Counts from its third call on, so that the first call does not show it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.calls = torch.zeros(2000), 0  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 2:
            self.seen.data.add_(1)  # type: ignore[attr-defined]
        return self.mlp(x)


@pytest.mark.parametrize("block", [CountsInAnArray, CountsThroughData])
@pytest.mark.parametrize("policy", POLICIES)
def test_state_written_again_by_the_second_run_raises(block: type[Block], policy: str) -> None:
    model = Net(block)
    apply_policy(model, policy, verify="always")
    with pytest.raises(VerificationError, match=f"'seen' of {block.__name__}"):
        numbers(model, 4)


class SavedThenWritten(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x).sigmoid()
        y.mul_(2)
        return self.down(y)


@pytest.mark.parametrize("policy", ["full", "segments:2"])
def test_written_saved_tensor_raises_as_in_plain_autograd(policy: str) -> None:
    plain, model = Net(SavedThenWritten), Net(SavedThenWritten)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        numbers(plain)
    apply_policy(model, policy)
    with pytest.raises(VerificationError, match="it was written in place after it was saved"):
        numbers(model)


class AnotherPath(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        in_backward = torch._C._current_graph_task_id() >= 0
        return x + self.up(x).sum(-1, keepdim=True) if in_backward else self.mlp(x)


def test_second_run_on_another_code_path_raises() -> None:
    model = Net(AnotherPath)
    apply_policy(model, "full")
    with pytest.raises(VerificationError, match="saved other tensors|shape: "):
        numbers(model)


def test_hooks_for_per_sample_gradients_append_once() -> None:
    """Opacus' forward hook appends each layer's input to a list on the layer."""

    def keep(module: nn.Module, args: Any, out: Any) -> None:
        if not hasattr(module, "activations"):
            module.activations = []
        module.activations.append(args[0].detach())

    model = Net(Block)
    for block in model.blocks:
        block.up.register_forward_hook(keep)
    apply_policy(model, "full", verify="always")
    model(torch.randn(3, 4)).sum().backward()
    assert [len(block.up.activations) for block in model.blocks] == [1, 1, 1, 1]


def test_data_written_between_blocks_of_a_segment_raises() -> None:
    """`x.data` counts no version, so the segment takes the output of the block before as unchanged."""

    class Between(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
                x.data.mul_(2)
            return x

    model = Between(Block)
    apply_policy(model, "segments:2")
    with pytest.raises(VerificationError):
        numbers(model)


def test_full_keeps_no_copy_of_frozen_buffers() -> None:
    """A frozen quantised base holds its statistics in buffers, which no block writes."""

    class Frozen(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("statistics", torch.ones(50_000))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mlp(x * self.statistics[0])

    def kept(verify: str) -> int:
        model = Net(Frozen)
        apply_policy(model, "full", verify=verify)
        numbers(model, steps=1)  # learns which buffers are written
        with torch.profiler.profile(profile_memory=True) as profile:
            model(torch.randn(3, 4))
        return sum(event.self_cpu_memory_usage for event in profile.key_averages() if event.key == "aten::clone")

    assert kept("never") <= 0


def with_tangents(model: nn.Module) -> list[torch.Tensor]:
    """Returns the tangent and the gradients of a loss that depends on it."""
    torch.manual_seed(0)
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(model(forward_ad.make_dual(torch.randn(3, 4), torch.randn(3, 4))))
        (out.primal.square().sum() + out.tangent.square().sum()).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [out.primal.detach(), out.tangent.detach(), *grads]


@pytest.mark.parametrize("verify", ["always", "never"])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own decompositions call it
def test_forward_mode_ad_is_equal_or_refused(verify: str) -> None:
    expected = with_tangents(Net(Block))
    for policy in ("full", "save:matmul", "offload"):
        model = Net(Block)
        apply_policy(model, policy, verify=verify)
        for found, value in zip(with_tangents(model), expected, strict=True):
            torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-5)  # 'save' computes tangents by other kernels
    for policy in ("segments:2", "sqrt"):
        model = Net(Block)
        apply_policy(model, policy, verify=verify)
        with pytest.raises((VerificationError, CheckpointError), match="the second run of a checkpoint saved"):
            with_tangents(model)  # a segment is recomputed without tangents


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(128), nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize("policy", ["full", "pointwise", "save:matmul", "segments:2", "offload"])
def test_verified_step_has_the_peak_of_an_unverified_one(policy: str) -> None:
    x = torch.randn(4, 256, 128)  # 7 MiB of activations per block

    def peak(verify: str) -> int:
        model = Net(Wide)
        apply_policy(model, policy, verify=verify)
        optimizer = torch.optim.SGD(model.parameters())
        with Tracker(model, optimizer) as tracker:
            for _ in range(2):
                tracker.start_step()
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return tracker.trace().peak_allocated

    unverified = peak("never")
    assert unverified > 10 << 20
    assert unverified <= peak("always") <= unverified + (64 << 10)
