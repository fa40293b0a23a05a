"""Policies keep the bits on every architecture, plain, with LoRA and with dropout.

A plain decoder runs under every policy. The others run under policies of different mechanisms; `pytest -m slow` runs
all of them under every policy.
"""

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
THOROUGH = ("llama",)
MECHANISMS = {  # per variant: dropout needs the random state of a re-run block, adapters have a frozen base
    "plain": [
        "full", "every:2", "segments:2", "modules:attention+mlp,save:matmul", "save:attention+matmul",
        "save:conv+router",
    ],
    "lora": ["full", "segments:2", "save:attention+matmul"],
    "dropout": ["full", "save:attention+matmul"],
}  # fmt: skip
WITHOUT = {"mamba": ("attention", "mlp")}  # submodules that an architecture does not have


@functools.cache
def plain(name: str, variant: str) -> dict[str, torch.Tensor]:
    return numbers(make(name, variant))


@pytest.mark.filterwarnings("ignore:policy .* no operator of:UserWarning")  # a Llama has no convolution
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")  # peft, about experts
@pytest.mark.parametrize("variant", MECHANISMS)
@pytest.mark.parametrize("name", CONFIGS)
def test_policy_keeps_the_bits(name: str, variant: str) -> None:
    check(name, variant, POLICIES if name in THOROUGH else MECHANISMS[variant])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:policy .* no operator of:UserWarning")
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
@pytest.mark.parametrize("variant", MECHANISMS)
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in THOROUGH])
def test_every_policy_keeps_the_bits(name: str, variant: str) -> None:
    check(name, variant, POLICIES)


def check(name: str, variant: str, policies: list[str]) -> None:
    model = make(name, variant)
    keys, before = list(model.state_dict()), plain(name, variant)
    for policy in policies:
        if any(member in policy for member in WITHOUT.get(name, ()) if policy.startswith("modules")):
            continue
        applied = apply_policy(model, policy)
        assert differing(numbers(model), before) == [], policy
        assert list(model.state_dict()) == keys
        applied.remove()
        assert not any("forward" in module.__dict__ or module._forward_hooks for module in model.modules()), policy
