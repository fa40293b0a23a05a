"""The same bits on every architecture, plain, with LoRA and with dropout.

Three architectures run under every policy: a plain decoder, an encoder-decoder, and a mixture of experts. The others
run under the policies that differ in mechanism; `pytest -m slow` runs all of them under every policy.
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
THOROUGH = ("llama", "t5", "mixtral")
MECHANISMS = {  # by variant: dropout asks for the random state of a re-run block, adapters for what is frozen
    "plain": [
        "full", "every:2", "segments:2", "modules:attention+mlp,save:matmul", "save:attention+matmul",
        "save:conv+router",
    ],
    "lora": ["full", "segments:2", "save:attention+matmul"],
    "dropout": ["full", "save:attention+matmul"],
}  # fmt: skip
WITHOUT = {"mamba": ("attention", "mlp")}  # submodules that an architecture lacks


@functools.cache
def plain(name: str, variant: str) -> dict[str, torch.Tensor]:
    return numbers(make(name, variant))


@pytest.mark.filterwarnings("ignore:policy .* no operator of:UserWarning")  # no convolution in a Llama
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")  # peft, of experts
@pytest.mark.parametrize("variant", MECHANISMS)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_bits(name: str, variant: str) -> None:
    check(name, variant, POLICIES if name in THOROUGH else MECHANISMS[variant])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:policy .* no operator of:UserWarning")
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
@pytest.mark.parametrize("variant", MECHANISMS)
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in THOROUGH])
def test_the_same_bits_under_every_policy(name: str, variant: str) -> None:
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
