"""Changes of a model between forward and backward are undone for the second run, or an error names them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import gradients
from torch import nn
from torch.func import functional_call
from vision_models import assert_same

from ckpt_ft import apply_policy
from ckpt_ft.checkpointing.module_contents import modules_in
from ckpt_ft.errors import UserError

POLICIES = ["full", "segments:2", "save:matmul", "sqrt"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(self.up(self.norm(x)).tanh()))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def loss_of(model: nn.Module, call: Callable[..., torch.Tensor] | None = None) -> torch.Tensor:
    torch.manual_seed(1)
    return (call or model)(torch.ones(2, 4).cumsum(-1)).square().sum()


@pytest.mark.parametrize("policy", POLICIES)
def test_parameters_of_a_functional_call_are_used_in_the_second_run(policy: str) -> None:
    """The parameters of the call are no longer in the model when backward runs."""
    plain, model = Net(), Net()
    apply_policy(model, policy)
    found = []
    for net in (plain, model):
        own = copy.deepcopy(dict(net.named_parameters()))
        others = {name: (p.detach() + 0.5).requires_grad_() for name, p in net.named_parameters()}
        loss_of(net, lambda x, net=net, others=others: functional_call(net, others, (x,))).backward()
        found.append({name: p.grad for name, p in others.items()})
        assert not gradients(net)
        assert all(torch.equal(p, own[name]) and isinstance(p, nn.Parameter) for name, p in net.named_parameters())
    assert_same(found[1], found[0])


@pytest.mark.parametrize("policy", POLICIES)
def test_second_run_is_in_train_mode_after_eval(policy: str) -> None:
    """A second run in eval mode would have no dropout."""
    plain, model = Net(), Net()
    apply_policy(model, policy)
    for net in (plain, model):
        loss = loss_of(net)
        net.eval()
        loss.backward()
        assert not any(module.training for module in net.modules())
    assert_same(gradients(model), gradients(plain))


@pytest.mark.parametrize("policy", POLICIES)
def test_several_forward_passes_before_one_backward(policy: str) -> None:
    """DPO does this: chosen, rejected, and in between a reference without adapters in eval mode."""
    plain, model = Net(), Net()
    apply_policy(model, policy)
    for net in (plain, model):
        chosen = loss_of(net)
        net.eval()
        with torch.no_grad():
            reference = loss_of(net)
        net.train()
        (chosen + reference - loss_of(net)).backward()
    assert_same(gradients(model), gradients(plain))


def step(net: Net) -> None:
    with torch.no_grad():
        net.blocks[1].up.weight.mul_(2)


def swap(net: Net) -> None:
    net.blocks[1].up.weight.data = net.blocks[1].up.weight.data * 2


def freeze(net: Net) -> None:
    net.blocks[1].up.weight.requires_grad_(False)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (step, "written in place"),
        (swap, r"given other data \(p.data = ...\)"),
        (freeze, "switched to another requires_grad"),
    ],
)
def test_change_that_cannot_be_undone_is_an_error(change: Callable[[Net], None], what: str, policy: str) -> None:
    model = Net()
    apply_policy(model, policy)
    loss = loss_of(model)
    change(model)
    with pytest.raises(UserError, match=f"Block: its parameter 'up.weight' was {what}.* between forward and backward"):
        loss.backward()


@pytest.mark.parametrize("policy", POLICIES)
def test_change_after_backward_is_no_error(policy: str) -> None:
    """One optimizer steps in backward, as soon as a gradient is ready, and one after backward."""
    found = []
    for net in (Net(), Net()):
        if found:
            apply_policy(net, policy)
        for p in net.parameters():
            optimizer = torch.optim.SGD([p], lr=0.1)
            p.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
        for _ in range(2):
            loss_of(net).backward()
            net.zero_grad()
            freeze(net)
            swap(net)
        found.append(dict(net.named_parameters()))
    assert_same(found[1], found[0])


def test_switched_adapter_is_an_error_and_disabled_adapters_work() -> None:
    from peft import LoraConfig, get_peft_model

    def make() -> Any:
        model = get_peft_model(Net(), LoraConfig(target_modules=["up", "down"], r=2, init_lora_weights=False))
        model.add_adapter("other", LoraConfig(target_modules=["up", "down"], r=2, init_lora_weights=False))
        apply_policy(model, "full")
        return model

    model = make()
    loss = loss_of(model)
    model.set_adapter("other")
    with pytest.raises(UserError, match=r"lora_[AB].default.weight' was switched to another requires_grad"):
        loss.backward()
    model = make()
    loss = loss_of(model)
    with model.disable_adapter(), torch.no_grad():  # a reference model; adapters are enabled again when backward runs
        loss_of(model)
    loss.backward()
    assert model.base_model.model.blocks[0].up.lora_B["default"].weight.grad.abs().sum() > 0


def test_modules_in_equals_modules_despite_cycles() -> None:
    model = Net()
    model.shared = model.blocks[0]
    model.blocks[0].__dict__["_modules"]["parent"] = model  # a cycle
    model.register_module("nothing", None)
    assert set(modules_in(model)) == set(model.modules())
