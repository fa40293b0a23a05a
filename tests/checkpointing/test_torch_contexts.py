"""A policy inside other PyTorch contexts: another checkpoint, debug mode, inference mode, disabled hooks."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint, set_checkpoint_debug_enabled, set_checkpoint_early_stop

from ckpt_ft import apply_policy
from ckpt_ft.checkpointing import offload
from ckpt_ft.errors import UserError

POLICIES = ["full", "every:2", "segments:2", "save:matmul", "modules:mlp", "pointwise", "first:2,pointwise"]
Numbers = dict[str, torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(8), nn.Dropout(0.2)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.register_buffer("offset", None, persistent=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if self.offset is None:
            self.offset = torch.linspace(0, 1, 8)
        x = x + self.dropout(self.mlp(self.norm(x))) + self.offset
        return x if mask is None else x + mask


class InPlace(Block):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x.relu_(), mask)


class Named(Block):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x=x)


class NamedInPlace(InPlace, Named):
    pass


class Net(nn.Module):
    def __init__(self, block: type[Block] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([block() for _ in range(4)])
        self.head = nn.Linear(8, 8)
        self.mask: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) if self.mask is None else block(x, self.mask)
        return self.head(x)


def inputs() -> torch.Tensor:
    return torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()


def numbers(model: nn.Module, call: Callable[[nn.Module, torch.Tensor], torch.Tensor] = nn.Module.__call__) -> Numbers:
    torch.manual_seed(1)
    x = inputs()
    out = call(model, x * 1)
    out.square().mean().backward()
    found = {"out": out.detach(), "grad x": x.grad, "random": torch.get_rng_state().float()}
    found |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found


def assert_numbers_equal(found: Numbers, plain: Numbers, policy: str) -> None:
    """Bitwise, or up to rounding under `pointwise`."""
    bound = 1e-6 if "pointwise" in policy else 0
    assert found.keys() == plain.keys()
    for name, value in plain.items():
        torch.testing.assert_close(found[name], value, rtol=bound, atol=bound, msg=name)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("block", [Block, InPlace, Named, NamedInPlace])
def test_policy_inside_another_checkpoint(policy: str, block: type[Block]) -> None:
    """In the first step, in which a block's writes become known, and in later ones."""
    plain, model = Net(block), Net(block)
    apply_policy(model, policy)
    for _ in range(2):
        around = numbers(model, lambda net, x: checkpoint(lambda x: net(x * 1), x, use_reentrant=False))
        assert_numbers_equal(around, numbers(plain), policy)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("policy", [*POLICIES, "full,offload"])
def test_torch_jit_traces_the_model_without_the_policy(policy: str) -> None:
    """A second run in backward would need Python, which a TorchScript graph cannot call."""
    plain, model = Net().eval(), Net().eval()
    apply_policy(model, policy)
    traced: nn.Module = torch.jit.trace(model, inputs().detach(), check_trace=False)
    assert_numbers_equal(numbers(traced), numbers(plain), policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_checkpoint_debug_mode_and_no_early_stop(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's error messages recommend debug mode, which adds contexts around both runs."""
    monkeypatch.setattr(logging.getLogger("LoggingTensor"), "propagate", False)  # pytest cannot format its records
    plain, model = Net(), Net()
    apply_policy(model, policy)
    with set_checkpoint_debug_enabled(True), set_checkpoint_early_stop(False):
        assert_numbers_equal(numbers(model), numbers(plain), policy)


@pytest.mark.parametrize("policy", [*POLICIES, "full,offload"])
def test_disabled_saved_tensor_hooks_are_one_line(policy: str) -> None:
    model = Net()
    apply_policy(model, policy)
    parameters, x = {name: p.detach() for name, p in model.named_parameters()}, inputs().detach()
    with pytest.raises(UserError, match=r"saved-tensor hooks, and they are off here \(torch.func.*hooks\); remove"):
        grad(lambda given: functional_call(model, given, (x,)).sum())(parameters)
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("not in here"),
        pytest.raises(UserError, match=r"they are off here \(not in here\); remove the policy"),
    ):
        model(inputs())
    with torch.autograd.graph.disable_saved_tensors_hooks("not in here"), torch.no_grad():
        model(inputs())


@pytest.mark.parametrize("policy", POLICIES)
def test_tensors_created_in_inference_mode(policy: str) -> None:
    """A buffer filled in validation, and a mask: autograd adds them, but neither saves them nor counts writes."""
    plain, model = Net(), Net()
    apply_policy(model, policy)
    for net in (plain, model):
        with torch.inference_mode():
            net(inputs())
            net.mask = torch.linspace(-1, 1, 8)
        assert net.mask.is_inference()
        assert net.blocks[0].offset.is_inference()
    for _ in range(2):
        assert_numbers_equal(numbers(model), numbers(plain), policy)


# no block saves anything that could form a segment
@pytest.mark.filterwarnings("ignore:.*no block was given the output")
@pytest.mark.parametrize("policy", POLICIES)
def test_frozen_parameters_created_in_inference_mode(policy: str) -> None:
    found = []
    for name in ("none", policy):
        with torch.inference_mode():
            net = Net()
        net.blocks.requires_grad_(False)
        net.head = nn.utils.skip_init(nn.Linear, 8, 8)
        nn.init.eye_(net.head.weight)
        nn.init.zeros_(net.head.bias)
        apply_policy(net, name)
        torch.manual_seed(1)
        net(inputs().detach()).square().mean().backward()
        found.append(net.head.weight.grad)
    assert torch.equal(found[1], found[0])


@pytest.mark.filterwarnings("ignore:.*no block was given the output")
@pytest.mark.parametrize("policy", POLICIES)
def test_jagged_tensors_keep_the_numbers(policy: str) -> None:
    plain, model = Net(), Net()
    apply_policy(model, policy)

    def call(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        rows = torch.nested.nested_tensor_from_jagged(x.reshape(15, 8), torch.tensor([0, 4, 9, 15]))
        return net(rows).values()

    assert_numbers_equal(numbers(model, call), numbers(plain, call), policy)


class Descends(Block):
    """A block whose forward computes a gradient, as a force field computes that of an energy."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.mlp(y).sum(), y)
        return super().forward(x, mask) - force


@pytest.mark.parametrize("policy", ["full", "segments:2", "save:matmul"])
def test_backward_inside_a_blocks_forward_is_refused(policy: str) -> None:
    model = Net(Descends)
    apply_policy(model, policy)
    with pytest.raises(UserError, match="Descends: its forward runs a backward of its own"):
        model(torch.ones(2, 8))


def test_backward_inside_a_blocks_forward_works_under_offload() -> None:
    gradients = []
    for policy in ("none", "offload"):
        torch.manual_seed(0)
        model = Net(Descends)
        apply_policy(model, policy)
        model(torch.ones(2, 8)).sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(a.equal(b) for a, b in zip(*gradients, strict=True))


class DrawsFromItsGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor, given: torch.Generator) -> torch.Tensor:
        drawn = torch.rand(x.shape, generator=self.generator) + torch.rand(x.shape, generator=given)
        return (self.linear(x) * drawn).tanh()


@pytest.mark.parametrize("policy", ["full", "save:matmul", "segments:2"])
def test_generator_of_a_block_is_restored_after_the_second_run(policy: str) -> None:
    """As an attribute and as an argument, also in steps that are not verified."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(DrawsFromItsGenerator() for _ in range(3))

        def forward(self, x: torch.Tensor, given: torch.Generator) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x, given)
            return x

    def steps(model: nn.Module) -> list[torch.Tensor]:
        given, x = torch.Generator().manual_seed(4), torch.ones(2, 8)
        for _ in range(2):
            model(x, given).sum().backward()
        return [given.get_state(), *(p.grad for p in model.parameters())]  # type: ignore[list-item]

    torch.manual_seed(0)
    plain = Model()
    treated = copy.deepcopy(plain)
    for ours, theirs in zip(treated.layers, plain.layers, strict=True):
        ours.generator = torch.Generator()
        ours.generator.set_state(theirs.generator.get_state())
    apply_policy(treated, policy, verify="never")
    assert all(map(torch.equal, steps(treated), steps(plain)))


@pytest.mark.parametrize("policy", [*POLICIES, "full,offload", "offload"])
def test_vmap_is_refused_in_one_line(policy: str) -> None:
    model = Net().eval()
    apply_policy(model, policy)
    with pytest.raises(UserError, match="on Net does not work inside of torch.vmap"):
        torch.vmap(model)(torch.stack([inputs(), inputs()]))
    torch.no_grad()(torch.vmap(model))(torch.stack([inputs(), inputs()]))


class Neighbours(Block):
    """Neighbours in a graph, as a sparse matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", (torch.eye(5) + torch.ones(5, 5).tril(-3)).to_sparse())

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(torch.stack([torch.sparse.mm(self.edges, row) for row in x]), mask)


@pytest.mark.parametrize("policy", [*POLICIES, "full,offload", "offload"])
def test_sparse_buffers_keep_the_numbers(policy: str) -> None:
    plain, model = Net(Neighbours), Net(Neighbours)
    apply_policy(model, policy)
    for _ in range(2):
        assert_numbers_equal(numbers(model), numbers(plain), policy)


class NeighboursGiven(Block):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        assert mask is not None
        return super().forward(torch.stack([mask @ row for row in x]))


class Opaque(Block):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x.to_mkldnn().relu().to_dense(), mask)


@pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant)")
@pytest.mark.parametrize("policy", [*POLICIES, "full,offload", "offload"])
@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "_mkldnn"])
def test_sparse_and_opaque_tensors_keep_the_numbers(layout: str, policy: str) -> None:
    nets = [Net(Opaque if layout == "_mkldnn" else NeighboursGiven) for _ in range(2)]
    if layout != "_mkldnn":
        for net in nets:
            net.mask = torch.ones(5, 5).tril(-3).to_sparse(layout=getattr(torch, layout))
    apply_policy(nets[0], policy, verify="always")
    for _ in range(2):
        assert_numbers_equal(numbers(nets[0]), numbers(nets[1]), policy)


class Nested(Block):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        rows = self.mlp(torch.nested.as_nested_tensor([x[0], x[1, :2]]))
        return super().forward(x + rows.to_padded_tensor(0.0).sum(0), mask)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("verify", ["always", "never"])
def test_strided_nested_tensors_raise(verify: str) -> None:
    plain = numbers(Net(Nested))
    for policy in ("full", "save:matmul", "segments:2", "modules:mlp", "pointwise"):
        model = Net(Nested)
        apply_policy(model, policy, verify=verify)
        with pytest.raises(RuntimeError, match="NestedTensorImpl"):
            numbers(model)
    model = Net(Nested)
    apply_policy(model, "offload", verify=verify)
    assert_numbers_equal(numbers(model), plain, "offload")


class Inference(Block):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        with torch.inference_mode():
            scale = self.mlp(x[0]).mean()
        return super().forward(x * float(scale), mask)


@pytest.mark.parametrize("policy", [*POLICIES, "full,offload", "save:matmul,offload", "offload"])
def test_inference_mode_inside_a_block(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(offload.install.__kwdefaults__, "min_bytes", 1)
    plain, model = Net(Inference), Net(Inference)
    apply_policy(model, policy)
    for _ in range(3):
        assert_numbers_equal(numbers(model), numbers(plain), policy)


class FallsBack(Block):
    """Has a fast path and a slow one for errors."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        try:
            y = self.mlp(self.norm(x)).exp().tanh()
        except Exception:
            y = self.mlp(self.norm(x)).tanh().exp().sin()
        return x + y


@pytest.mark.parametrize("verify", ["always", "never"])
@pytest.mark.parametrize("policy", [*POLICIES, "offload"])
def test_caught_exceptions_keep_the_numbers(policy: str, verify: str) -> None:
    plain, model = Net(FallsBack), Net(FallsBack)
    apply_policy(model, policy, verify=verify)
    for _ in range(2):
        assert_numbers_equal(numbers(model), numbers(plain), policy)


@pytest.mark.parametrize("policy", ["full", "save:matmul", "segments:2"])
def test_caught_exceptions_leave_no_cycles(policy: str) -> None:
    model = Net(FallsBack)
    apply_policy(model, policy, verify="never")

    def tensors() -> int:
        return sum(isinstance(value, torch.Tensor) for value in gc.get_objects())

    for _ in range(3):
        numbers(model)
    gc.collect()
    gc.disable()
    try:
        before = tensors()
        numbers(model)
        assert tensors() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("policy", [*POLICIES, "full,offload", "offload"])
def test_global_module_hook_during_forward(policy: str) -> None:
    def hooked(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with register_module_forward_hook(lambda module, _, out: out * 1.5 if type(module) is nn.GELU else None):
            return model(x)  # type: ignore[no-any-return]

    plain, model = Net(), Net()
    apply_policy(model, policy)
    for _ in range(4):  # also in steps that are not verified
        assert_numbers_equal(numbers(model, hooked), numbers(plain, hooked), policy)


class ListWithAttribute(list[int]):
    calls = 0


class CountsInObjects(Block):
    """Counts in an attribute of a list, in weak dictionaries, and by the order of a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.list, self.weak, self.order = (
            ListWithAttribute([1]),
            weakref.WeakKeyDictionary[Any, int](),
            {1: 1.0, 2: 0.5},
        )

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        self.list.calls += 1
        self.weak[self] = self.weak.get(self, 0) + 1
        first = next(iter(self.order))
        self.order[first] = self.order.pop(first)
        factor = (self.list.calls + self.weak[self]) * self.order[first]
        return super().forward(x * factor, mask)


@pytest.mark.parametrize("policy", ["full", "segments:2", "save:matmul", "offload"])
def test_hidden_state_of_a_block_in_unverified_steps(policy: str) -> None:
    def drawn_in_between(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(x)
        torch.rand(3)
        return out

    plain, model = Net(CountsInObjects), Net(CountsInObjects)
    apply_policy(model, policy, verify="never")
    expected = [copy.deepcopy(numbers(plain, drawn_in_between)) for _ in range(3)]
    for step in expected:
        assert_numbers_equal(numbers(model, drawn_in_between), step, policy)


@pytest.mark.parametrize("policy", ["full", "segments:2", "save:matmul"])
def test_cached_parametrizations_that_are_cleared_before_backward(policy: str) -> None:
    def cached(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached():
            out: torch.Tensor = model(model(x))  # the second call uses the cached weights of the first
        return out

    plain, model = Net(), Net()
    for net in (plain, model):
        for block in net.blocks:
            parametrizations.weight_norm(block.mlp[0])
    apply_policy(model, policy, verify="never")
    for _ in range(3):
        assert_numbers_equal(numbers(model, cached), numbers(plain, cached), policy)


class Scripted(Block):
    def __init__(self) -> None:
        super().__init__()
        self.scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
        for _ in range(3):  # TorchScript profiles its first runs, which save other tensors
            self.scripted(inputs()).sum().backward()

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(self.scripted(x), mask)


class Batched(Block):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(torch.func.vmap(lambda row: row * row.sum())(x), mask)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is:DeprecationWarning")
@pytest.mark.parametrize("policy", ["full", "pointwise", "offload"])
@pytest.mark.parametrize("block", [Scripted, Batched])
def test_torchscript_and_vmap_inside_a_block(block: type[Block], policy: str) -> None:
    plain, model = Net(block), Net(block)
    apply_policy(model, policy, verify="always")
    for _ in range(2):
        assert_numbers_equal(numbers(model), numbers(plain), policy)
