"""A policy can be removed, replaced and suspended in any order; overlapping policies are refused."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from language_models import batch, differing, make, numbers
from torch import nn

from ckpt_ft import apply_policy
from ckpt_ft.checkpointing.applied_policy import suspended
from ckpt_ft.checkpointing.apply import applied_policy, remove_policy
from ckpt_ft.checkpointing.head import NoLogits
from ckpt_ft.checkpointing.parity import check_parity
from ckpt_ft.errors import UserError

POLICIES = ["full", "segments:2", "save:attention+matmul", "modules:mlp,pointwise", "full,head", "pointwise,offload"]


def state(model: nn.Module) -> dict[str, Any]:
    """Returns the attributes of every module, including replaced forwards and hooks."""
    return {name: dict(vars(module)) for name, module in model.named_modules()}


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("first", POLICIES)
def test_remove_of_a_replaced_policy_does_nothing(first: str) -> None:
    model = make("llama")
    before, hooked, plain = state(model), hooks(model), numbers(model)
    model.zero_grad()
    a = apply_policy(model, first)
    b = apply_policy(model, "every:2")
    a.remove()
    assert applied_policy(model) is b
    assert b.is_active
    assert b.covered == ["model.layers.0", "model.layers.2"]
    assert "forward" in vars(model.model.layers[0])
    assert differing(numbers(model), plain) == []
    b.remove()
    model.zero_grad()
    assert state(model) == before
    assert hooks(model) == hooked


@pytest.mark.parametrize("policy", POLICIES)
def test_policy_can_be_removed_after_a_parity_check(policy: str) -> None:
    model = make("llama")
    before, hooked = state(model), hooks(model)
    applied = apply_policy(model, policy)
    state_before = state(model)
    assert check_parity(model, batch(), "full").ok
    assert applied_policy(model) is applied
    assert state(model) == state_before  # the same replaced forwards
    assert hooks(model) > hooked or policy == "pointwise,offload"
    applied.remove()
    assert state(model) == before
    assert hooks(model) == hooked


@pytest.mark.parametrize("policy", POLICIES)
def test_suspended_policy_is_inactive_and_then_active_again(policy: str) -> None:
    model = make("llama")
    plain = numbers(model)
    applied = apply_policy(model, policy)
    with_policy = numbers(model)
    with suspended(model):
        assert applied_policy(model) is None
        assert not any("forward" in vars(module) for module in model.modules())
        assert differing(numbers(model), plain) == []
        assert model(**batch(), use_cache=True).past_key_values is not None
        apply_policy(model, "every:2")  # is removed when the context ends
    assert applied_policy(model) is applied
    assert differing(numbers(model), with_policy) == []
    with suspended(model):
        applied.remove()
    assert applied_policy(model) is None
    assert not any("forward" in vars(module) for module in model.modules())


def test_policies_of_several_submodules_are_suspended_and_restored() -> None:
    model = nn.ModuleDict({"a": _stack(), "b": _stack()})
    handles = [apply_policy(model[name], "full") for name in model]  # submodules without overlap
    with suspended(model):
        apply_policy(model["a"], "every:2")
    assert [applied_policy(model[name]) for name in model] == handles
    remove_policy(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_gradient_checkpointing_of_the_library_is_on_while_suspended() -> None:
    model = make("llama")
    _switch_on(model)
    apply_policy(model, "full")
    layer = model.model.layers[0]
    with suspended(model):
        assert layer.gradient_checkpointing
    assert not layer.gradient_checkpointing


def test_refused_policy_leaves_the_previous_one() -> None:
    model = make("llama")
    applied = apply_policy(model, "full")
    state_before = state(model)
    for wrong in ("stages", "save:aten.nothing"):
        with pytest.raises(UserError):
            apply_policy(model, wrong)
    assert applied_policy(model) is applied
    assert state(model) == state_before


@pytest.mark.parametrize("policy", ["pointwise", "pointwise,offload", "full,head"])
def test_later_wrapper_of_another_library_stays_after_remove(policy: str) -> None:
    model = make("llama")
    plain = numbers(model)
    applied = apply_policy(model, policy)
    inner, calls = model.forward, 0

    @functools.wraps(inner)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return inner(*args, **kwargs)

    model.forward = wrapper
    with_policy = numbers(model)
    with suspended(model):
        assert differing(numbers(model), plain) == []
        assert isinstance(model(**batch()).logits, torch.Tensor)
    numbers_with_policy = numbers(model)
    assert differing(numbers_with_policy, with_policy) == []
    assert isinstance(model(**batch()).logits, NoLogits) == ("head" in policy)
    applied.remove()
    assert model.forward is wrapper
    assert calls == 5
    assert differing(numbers(model), plain) == []
    model.forward = inner  # after the wrapper is removed, the replaced forward passes calls on
    apply_policy(model, policy).remove()
    assert differing(numbers(model), plain) == []


@pytest.mark.parametrize("policy", ["full", "pointwise", "save:attention", "modules:mlp"])
@pytest.mark.parametrize("inner", ["full", "pointwise"])
def test_policy_on_a_submodule_of_a_model_with_a_policy_is_refused(policy: str, inner: str) -> None:
    model = make("llama")
    before = state(model)
    applied = apply_policy(model, policy)
    for part in (model.model, model.model.layers, model.model.layers[0].mlp):
        with pytest.raises(
            UserError, match=f"{type(part).__name__} is part of a LlamaForCausalLM that has the policy '{policy}'"
        ):
            apply_policy(part, inner)
    twin = copy.deepcopy(model)
    with pytest.raises(UserError, match="is part of a LlamaForCausalLM"):
        apply_policy(twin.model, inner)
    applied.remove()
    assert state(model) == before
    apply_policy(model.model, inner).remove()
    assert state(model) == before


@pytest.mark.parametrize("policy", ["full", "pointwise", "none"])
def test_policy_on_a_model_whose_submodule_has_a_policy_is_refused(policy: str) -> None:
    model = make("llama")
    before = state(model)
    applied = apply_policy(model.model, policy)
    with pytest.raises(UserError, match=r"a part of LlamaForCausalLM has a policy already \(model, LlamaModel\)"):
        apply_policy(model, "pointwise")
    assert applied_policy(model) is applied
    applied.remove()
    assert state(model) == before


def test_policies_on_two_models_that_share_blocks_are_refused() -> None:
    first = _stack()
    second = nn.Sequential(*first, nn.Linear(8, 8))
    apply_policy(first, "every:2")
    with pytest.raises(UserError, match=r"a part of Sequential has a policy already \(0, Linear\)"):
        apply_policy(second, "full")


def _stack() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


def _switch_on(model: Any) -> None:
    switch = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    switch({"use_reentrant": False})


SPELLINGS = ["gradient_checkpointing_enable", "activation_checkpointing_enable"]


@pytest.mark.parametrize("policy", ["full", "pointwise", "save:matmul", "every:2"])
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing:FutureWarning")
def test_gradient_checkpointing_enabled_after_the_policy_is_refused(policy: str, spelling: str) -> None:
    model = make("llama")
    if not hasattr(model, spelling):
        pytest.skip("transformers 5.23 brought the new name")
    plain = numbers(model)
    applied = apply_policy(model, policy)
    getattr(model, spelling)()
    with pytest.raises(
        UserError, match=f"policy '{policy}' is applied to LlamaForCausalLM, and its library's own"
    ) as error:
        model(**batch())
    assert "\n" not in str(error.value)
    with torch.no_grad():
        model(**batch())  # generation and validation still work
    applied.remove()
    assert differing(numbers(model), plain) == []


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing:FutureWarning")
def test_gradient_checkpointing_enabled_through_peft_is_refused() -> None:
    from peft import LoraConfig, get_peft_model

    model = make("llama")
    apply_policy(model, "full")
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    wrapped(**batch()).loss.backward()
    _switch_on(wrapped)
    with pytest.raises(UserError, match="switched on afterwards"):
        wrapped(**batch())  # PEFT calls the model's forward without its hooks


def test_gradient_checkpointing_of_diffusers_enabled_after_the_policy_is_refused() -> None:
    from diffusers import UNet2DModel

    unet = UNet2DModel(
        sample_size=8, layers_per_block=2, block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    )  # fmt: skip
    apply_policy(unet, "full")
    sample = torch.randn(1, 3, 8, 8)
    unet(sample, 1).sample.sum().backward()
    unet.enable_gradient_checkpointing()
    with pytest.raises(UserError, match="is applied to UNet2DModel, and its library's own gradient checkpointing"):
        unet(sample, 1)
    unet.disable_gradient_checkpointing()
    unet(sample, 1)
