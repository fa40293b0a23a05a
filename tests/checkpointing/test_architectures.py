"""The same bits on every architecture, under every policy, plain, with LoRA and with dropout."""

from __future__ import annotations

import functools

import pytest
import torch
from language_models import CONFIGS, differing, make, numbers

from ckpt_ft import apply_policy

POLICIES = [
    "none", "full", "every:2", "first:1", "segments:2", "sqrt",
    "modules:attention", "modules:mlp", "modules:attention+mlp,save:matmul",
    "save:attention", "save:matmul", "save:attention+matmul", "save:matmul/2", "save:conv+router", "save:aten.mm",
    "every:2,save:attention+matmul", "segments:2,save:attention",
]  # fmt: skip
WITHOUT = {"mamba": ("attention", "mlp")}  # submodules that an architecture lacks


@functools.cache
def plain(name: str, variant: str) -> dict[str, torch.Tensor]:
    return numbers(make(name, variant))


@pytest.mark.filterwarnings("ignore:policy .* no operator of:UserWarning")  # no convolution in a Llama
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")  # peft, of experts
@pytest.mark.parametrize("variant", ["plain", "lora", "dropout"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_bits(name: str, variant: str) -> None:
    model = make(name, variant)
    keys, before = list(model.state_dict()), plain(name, variant)
    for policy in POLICIES:
        if any(member in policy for member in WITHOUT.get(name, ()) if policy.startswith("modules")):
            continue
        applied = apply_policy(model, policy)
        assert differing(numbers(model), before) == [], policy
        assert list(model.state_dict()) == keys
        applied.remove()
        assert not any("forward" in module.__dict__ or module._forward_hooks for module in model.modules()), policy
