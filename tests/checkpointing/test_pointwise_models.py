"""`pointwise` on architectures keeps the bits of gradients, buffers and random state, and saves fewer bytes."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from types import MethodType
from typing import Any

import pytest
import torch
from tiny_models import DIFFUSION, LANGUAGE, VISION, build, gradients, loss_of
from torch import nn
from transformers import modeling_utils
from transformers.integrations import hub_kernels

from ckpt_ft import apply_policy
from ckpt_ft.checkpointing.pointwise import install as pointwise

# Saved bytes with `pointwise` over those without, in fp32, as measured by this file.
KEPT = {"llama": 0.57, "gpt2": 0.67, "bert": 0.76, "phi3": 0.62, "resnet": 0.66, "vit": 0.77, "unet": 0.55, "t5": 0.61}


# One layer is used several times: autocast sums the gradients of its half-precision weight in half precision, the
# policy adds each to the fp32 gradient.
SHARED = ("albert", "deberta", "dit")


@contextlib.contextmanager
def autocast(dtype: torch.dtype | None) -> Iterator[None]:
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        yield


def step(model: nn.Module, inputs: dict[str, Any], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Returns what one forward and backward leave behind."""
    torch.manual_seed(3)
    with autocast(dtype):
        loss = loss_of(model(**inputs))
    loss.backward()
    buffers = {f"buffer {name}": b.clone() for name, b in model.named_buffers()}
    return {"loss": loss.detach(), "random state": torch.get_rng_state(), **gradients(model), **buffers}


def kept_bytes(model: nn.Module, inputs: dict[str, Any]) -> int:
    """Returns the bytes of storages, except parameters and buffers, that reach the enclosing saved-tensor hooks."""
    own = {t.untyped_storage()._cdata for t in [*model.parameters(), *model.buffers()]}
    found: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            found[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(**inputs)
    del output
    return sum(storage.nbytes() for storage in found.values())


@pytest.mark.parametrize("name", [*LANGUAGE, *VISION, *DIFFUSION])
def test_pointwise_keeps_the_numbers(name: str) -> None:
    model, inputs = build(name)
    treated = copy.deepcopy(model)
    installed = pointwise.install(treated, {"": treated})
    copied = copy.deepcopy(treated)
    for dtype in (None, torch.bfloat16):
        plain, ours, copys = (step(m, inputs, dtype) for m in (model, treated, copied))
        assert plain.keys() == ours.keys() == copys.keys()
        assert [key for key in plain if not ours[key].equal(copys[key])] == []
        if dtype is not None and name in SHARED:
            for key, value in plain.items():
                torch.testing.assert_close(ours[key], value, rtol=5e-2, atol=2e-3)
        else:
            assert [key for key in plain if not plain[key].equal(ours[key])] == []
        for m in (model, treated, copied):
            m.zero_grad()
    assert treated.state_dict().keys() == model.state_dict().keys()
    installed.remove()
    assert not any("forward" in module.__dict__ for module in treated.modules())


@pytest.mark.parametrize("name", KEPT)
def test_pointwise_saves_fewer_bytes(name: str) -> None:
    model, inputs = build(name)
    plain = kept_bytes(model, inputs)
    pointwise.install(model, {"": model})
    assert kept_bytes(model, inputs) <= KEPT[name] * plain


@pytest.mark.parametrize(("use_dora", "kept"), [(False, 0.5), (True, 0.73)])
def test_pointwise_with_adapters(use_dora: bool, kept: float) -> None:
    """LoRA and DoRA with dropout on a frozen model: only adapters have gradients, and they are bit-equal."""
    from peft import LoraConfig, get_peft_model

    model, inputs = build("llama")
    config = LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear", use_dora=use_dora)
    model = get_peft_model(model, config)
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    treated = copy.deepcopy(model)
    before = kept_bytes(treated, inputs)
    pointwise.install(treated, {"": treated})
    after = kept_bytes(treated, inputs)
    plain, ours = step(model, inputs, None), step(treated, inputs, None)
    assert plain.keys() == ours.keys()
    assert [key for key in plain if not plain[key].equal(ours[key])] == []
    assert after < kept * before


def test_kernels_of_the_hub_that_an_evaluation_sets_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """`eval` and `train` give marked layers, norms and activations, other forwards each time (kernels, kernelize)."""

    def kernelize(model: Any, mode: object = None) -> None:
        for layer in model.modules():
            if pointwise.is_norm(layer) or pointwise.is_activation(layer):
                switched.append(layer)
                layer.forward = MethodType(type(layer).forward, layer)
        model._use_kernels = True

    switched: list[nn.Module] = []
    monkeypatch.setattr(modeling_utils, "is_kernels_available", lambda: True)
    monkeypatch.setattr(hub_kernels, "register_kernel_mapping_transformers", lambda: None)
    monkeypatch.setattr(modeling_utils, "kernelize", kernelize)
    model, inputs = build("llama")
    model.use_kernels = True
    plain = kept_bytes(model, inputs)
    applied = apply_policy(model, "pointwise")
    less = kept_bytes(model, inputs)
    assert less <= KEPT["llama"] * plain
    count = len(switched)
    copied = copy.deepcopy(model)
    for one in (model, copied):
        one.eval()
        one.train()
        assert kept_bytes(one, inputs) == less
    assert len(switched) == 5 * count
    applied.remove()
    assert kept_bytes(model, inputs) == plain
    model.eval()
    assert len(switched) == 6 * count
    assert "set_use_kernels" not in vars(model)
