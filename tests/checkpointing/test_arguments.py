"""Blocks that write into their arguments: the second run starts from the lists, dicts and tensors of the first."""

from __future__ import annotations

import copy
import gc
from collections import OrderedDict, UserDict, deque, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from vision_models import assert_same

from ckpt_ft import apply_policy
from ckpt_ft.checkpointing import offload
from ckpt_ft.checkpointing.arguments import changeable, rebuild
from ckpt_ft.errors import UserError

SCOPES = ["full", "every:2", "segments:2", "sqrt", "save:matmul"]


class Layer(nn.Module):
    """Base of the blocks, with their parameters."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(width, 8), nn.GELU(), nn.Linear(8, 4))


class Branches(Layer):
    """Replaces the entries of the list that it is given and returns it, as HRNet does."""

    def forward(self, x: list[torch.Tensor]) -> list[torch.Tensor]:
        for i, branch in enumerate(x):
            x[i] = torch.tanh(self.mlp(branch * (i + 1)) + branch)
        return x


class Growing(Layer):
    """Reads a list of all features so far and appends its own, as DenseNet does; returns nothing."""

    def forward(self, _: torch.Tensor, *, features: list[torch.Tensor]) -> torch.Tensor:
        new = self.mlp(torch.stack(features).sum(0).sin())
        features.append(new)
        return new


class Caching(Layer):
    """Stores its last input and counts in nested containers that it is given, as a causal video VAE does."""

    def forward(self, x: torch.Tensor, memory: dict[str, Any]) -> torch.Tensor:
        memory["calls"][0] += 1
        before = memory["frames"].get("last")
        memory["frames"]["last"] = x.clone()
        return torch.tanh(self.mlp(x if before is None else x + before.cos())) * memory["calls"][0]


class Sharing(Layer):
    """Every other block passes a tensor to the next one in an object that is no dict (Gemma 4)."""

    def forward(self, x: torch.Tensor, shared: UserDict[str, torch.Tensor], index: int) -> torch.Tensor:
        if index % 2 == 0:
            shared["k"] = self.mlp(x).exp()
            return x + shared["k"]
        return x + self.mlp(x) * shared["k"].sin()


class Net(nn.Module):
    def __init__(self, block: type[Layer], run: Callable[[nn.ModuleList, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([block() for _ in range(4)])
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self.layers, x)


def branches(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    found = [x, x * 2]
    for layer in layers:
        found = layer(found)
    return torch.cat(found)


def growing(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    features = [x]
    for layer in layers:
        x = layer(x, features=features)
    assert len(features) == 5
    return torch.cat(features)


def caching(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    memory: list[dict[str, Any]] = [{"calls": [0], "frames": {}} for _ in layers]
    chunks = []
    for chunk in x.chunk(2):
        for layer, own in zip(layers, memory, strict=True):
            chunk = layer(chunk, own)
        chunks.append(chunk)
    assert [own["calls"] for own in memory] == [[2]] * 4
    return torch.cat(chunks)


def sharing(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    shared: UserDict[str, torch.Tensor] = UserDict()
    for index, layer in enumerate(layers):
        x = layer(x, shared, index)
    return x


KINDS: dict[str, Callable[[], Net]] = {
    "list": lambda: Net(Branches, branches),
    "growing list": lambda: Net(Growing, growing),
    "nested dicts": lambda: Net(Caching, caching),
    "shared object": lambda: Net(Sharing, sharing),
}


def numbers(model: nn.Module, backwards: int = 1) -> dict[str, torch.Tensor]:
    model.zero_grad()
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    out = model(x)
    for i in range(backwards):
        out.square().sum().backward(retain_graph=i + 1 < backwards)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "grad x": x.grad, **gradients}


@pytest.mark.parametrize("policy", SCOPES)
@pytest.mark.parametrize("kind", KINDS)
def test_second_run_gets_the_containers_of_the_first(kind: str, policy: str) -> None:
    plain, model = KINDS[kind](), KINDS[kind]()
    apply_policy(model, policy)
    assert_same(numbers(model), numbers(plain))


@pytest.mark.parametrize("policy", ["full", "segments:2"])
@pytest.mark.parametrize("kind", KINDS)
def test_second_backward_with_written_containers(kind: str, policy: str) -> None:
    plain, model = KINDS[kind](), KINDS[kind]()
    apply_policy(model, policy)
    assert_same(numbers(model, backwards=2), numbers(plain, backwards=2))


@pytest.mark.parametrize("policy", ["full", "segments:2"])
@pytest.mark.parametrize("kind", KINDS)
def test_backward_does_not_change_the_callers_containers(kind: str, policy: str) -> None:
    """The second run writes into copies."""
    model = KINDS[kind]()
    apply_policy(model, policy)
    given: list[Any] = []
    model.layers[3].register_forward_pre_hook(
        lambda _, args, kwargs: given.extend([*args, *kwargs.values()]), with_kwargs=True
    )
    out = model(torch.randn(4, 4))
    mine = [x for x in given if changeable(x)]
    before = [rebuild(x, lambda leaf: leaf) for x in mine]
    out.square().sum().backward()
    assert [repr(x) for x in mine] == [repr(x) for x in before]


def tensors_alive() -> int:
    return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())


@pytest.mark.parametrize("policy", ["full", "segments:2", "save:matmul", "segments:2,save:matmul"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backward", [True, False])
def test_no_tensor_outlives_a_step(kind: str, policy: str, backward: bool) -> None:
    """Also if the loss is dropped without backward: a frame and its graph do not keep each other alive."""
    model = KINDS[kind]()
    apply_policy(model, policy)
    numbers(model)
    gc.collect()
    gc.disable()
    try:
        before = tensors_alive()
        out = model(torch.randn(4, 4)).square().sum()
        if backward:
            out.backward()
        del out
        assert tensors_alive() == before
    finally:
        gc.enable()


class InPlaceFirst(nn.Module):
    """Writes its own input, as torchvision's VGG does if cut at its ReLUs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(F.relu_(x))


class InPlaceNet(nn.Module):
    def __init__(self, named: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(2, 2, 3, padding=1)
        self.layers = nn.ModuleList([InPlaceFirst() for _ in range(4)])
        self.named = named

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x.view(1, 2, 2, 4).expand(2, 2, 2, 4))
        for layer in self.layers:
            x = layer(x=x) if self.named else layer(x)
        return x


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("policy", ["full", "every:2", "segments:2", "save:conv"])
def test_block_that_starts_with_an_in_place_relu(policy: str, named: bool) -> None:
    plain, model = InPlaceNet(named), InPlaceNet(named)
    apply_policy(model, policy)
    for _ in range(2):  # the policy learns of the write in the first step and knows it in the second
        assert_same(numbers(model, backwards=2), numbers(plain, backwards=2))


@pytest.mark.parametrize("policy", ["full", "modules:mlp"])
def test_router_that_writes_noise_into_its_input(policy: str) -> None:
    """DBRX multiplies the hidden states by random numbers in place."""
    from transformers import DbrxConfig, DbrxForCausalLM

    config = DbrxConfig(d_model=16, n_heads=2, n_layers=2, max_seq_len=16, vocab_size=31)
    config.attn_config.kv_n_heads, config.attn_config.clip_qkv = 1, 8
    config.attn_config.rope_theta = 1e4
    for key, value in {"hidden_size": 16, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2}.items():
        setattr(config.ffn_config, key, value)
    config.ffn_config.moe_jitter_eps = 0.1
    torch.manual_seed(0)
    model = DbrxForCausalLM(config).train()
    ids = torch.tensor([[4, 5, 6, 7]])
    found = []
    for applied in ("none", policy):
        apply_policy(model, applied)
        model.zero_grad()
        torch.manual_seed(1)
        model(input_ids=ids, labels=ids).loss.backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert_same(found[1], found[0])


class WritesLater(Layer):
    writes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x.mul_(2) if self.writes else x * 2)


@pytest.mark.parametrize("policy", ["full", "segments:2", "segments:1"])
def test_input_written_in_place_only_in_a_later_call(policy: str) -> None:
    """This raises, except for an output of the previous block of a segment, which the second run computes again."""

    def run(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        for layer in layers:
            x = layer(x)
        return x

    model = Net(WritesLater, run)
    apply_policy(model, policy)
    numbers(model)
    plain = copy.deepcopy(model)
    apply_policy(plain, "none")
    made_inside = policy == "segments:1"
    for one in (model, plain):
        one.layers[1].writes = True
        one.layers[0].writes = not made_inside
    if made_inside:
        assert_same(numbers(model), numbers(plain))
        return
    with pytest.raises(UserError, match="WritesLater modified its argument 0 in place and did not in its first call"):
        numbers(model)


def test_argument_written_after_the_block_is_an_error() -> None:
    """For positional arguments autograd raises; for keyword arguments the second run would read the written value."""

    class Named(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mlp(x * 1.5)

    def run(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            kept = x * 1
            x = layer(x=kept)
            kept += 1
        return x

    model = Net(Named, run)
    numbers(model)
    apply_policy(model, "full")
    with pytest.raises(RuntimeError, match="argument 'x' of a checkpointed block was changed in place"):
        numbers(model)


def test_output_written_before_the_next_block_is_kept() -> None:
    """A segment's second run would not repeat this write, so each block keeps its input."""

    def run(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer(x)
            x += 1
        return x

    plain, model = Net(WritesLater, run), Net(WritesLater, run)
    apply_policy(model, "segments:2")
    with pytest.warns(UserWarning, match="no block was given the output of the one before it"):
        found = numbers(model)
    assert_same(found, numbers(plain))


Point = namedtuple("Point", "x y")


def test_rebuild_keeps_types_order_and_identity() -> None:
    from transformers.modeling_outputs import BaseModelOutput

    inner = [1, 2]
    x = torch.zeros(2)
    output = BaseModelOutput(last_hidden_state=x, hidden_states=(x, x))
    value = {
        "a": inner,
        "b": (inner, 3),
        "c": deque([inner], maxlen=4),
        "d": Point(inner, x),
        "e": OrderedDict(z=1),
        "f": output,
    }
    new = rebuild(value, lambda leaf: leaf)
    assert new is not value
    assert list(new) == list(value)
    assert new["a"] == inner
    assert new["a"] is not inner
    assert new["a"] is new["b"][0] is new["c"][0] is new["d"].x
    assert type(new["d"]) is Point
    assert new["c"].maxlen == 4
    assert type(new["e"]) is OrderedDict
    assert type(new["f"]) is BaseModelOutput
    assert new["f"].last_hidden_state is x
    shape = (x.shape, (1, 2))
    assert rebuild(shape, lambda leaf: leaf) is shape
    assert not changeable(shape)


class HooksItsInputs(nn.Module):
    """Scales gradients by hooks on its inputs, and runs other code if both inputs are the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(
        self, x: torch.Tensor, y: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor], *, named: torch.Tensor
    ) -> torch.Tensor:
        for given in (x, pair[1], named):
            if given.requires_grad:
                given.register_hook(lambda grad: grad * 0.5)
        z = self.linear(x) if x is y and pair[0] is x else self.linear(x) + self.linear(y)
        return z.tanh() + pair[1] + named


@pytest.mark.parametrize("policy", ["full", "save:matmul", "segments:2", "full,offload"])
def test_hooks_on_inputs_act_once(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(offload.install.__kwdefaults__, "min_bytes", 1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.blocks = nn.ModuleList(HooksItsInputs() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = block(x, x, (x, x * 2), named=x.sin())
            return x

    def train(policy: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Model()
        apply_policy(model, policy, verify="always")
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
        return [p.grad for p in model.parameters()]  # type: ignore[misc]

    assert all(map(torch.equal, train(policy), train("none")))
