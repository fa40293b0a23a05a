"""Other libraries use forwards that a policy has replaced: pickle, torch.export, accelerate's unwrapping."""

from __future__ import annotations

import copy
import inspect
import pickle
from types import MethodType

import pytest
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

from ckpt_ft.checkpointing.apply import apply_policy

POLICIES = ("every:2,pointwise", "segments:2", "save:matmul", "pointwise,offload", "head", "full,head,offload")
IDS = torch.arange(16).reshape(2, 8)


def _llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, vocab_size=32,
            use_cache=False,
        )
    )  # fmt: skip


def _loss(model: torch.nn.Module) -> float:
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return float(loss.detach())


@pytest.mark.parametrize("policy", POLICIES)
def test_pickled_model_trains_as_the_original_with_its_own_weights(policy: str) -> None:
    model = _llama()
    apply_policy(model, policy)
    loss = _loss(model)
    other = pickle.loads(pickle.dumps(model))
    assert _loss(other) == loss
    with torch.no_grad():
        other.get_output_embeddings().weight.zero_()
    assert _loss(other) == pytest.approx(torch.tensor(32.0).log().item())
    assert _loss(model) == loss


@pytest.mark.filterwarnings("ignore:policy 'pointwise' does nothing under torch.compile")
# the same warning comes without a policy
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
@pytest.mark.parametrize(
    ("policy", "strict"),
    [*((policy, False) for policy in (*POLICIES, "full", "offload")), ("every:2,pointwise", True)],
)
def test_exported_model_computes_the_same(policy: str, strict: bool) -> None:
    model = _llama().eval()
    with torch.no_grad():
        plain = model(input_ids=IDS).logits
        apply_policy(model, policy)
        exported = torch.export.export(model, (), {"input_ids": IDS}, strict=strict)
        assert torch.equal(exported.module()(input_ids=IDS).logits, plain)


@pytest.mark.parametrize("policy", POLICIES)
def test_accelerate_unwraps_a_model_with_a_policy(policy: str) -> None:
    model = _llama()
    plain, signature = _loss(model), inspect.signature(model.forward)
    applied = apply_policy(model, policy)
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    prepared = accelerator.prepare_model(model)
    assert inspect.signature(prepared.forward) == signature
    assert abs(_loss(prepared) - plain) < 1e-2
    unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert inspect.signature(unwrapped.forward) == signature
    assert _loss(unwrapped) == pytest.approx(plain, rel=1e-6)
    other = copy.deepcopy(unwrapped)
    with torch.no_grad():
        other.get_output_embeddings().weight.zero_()
    assert _loss(other) == pytest.approx(torch.tensor(32.0).log().item())
    assert _loss(unwrapped) == pytest.approx(plain, rel=1e-6)
    applied.remove()
    assert "forward" not in vars(unwrapped)
    assert _loss(unwrapped) == plain


def test_accelerate_unwraps_a_model_whose_policy_was_removed_meanwhile() -> None:
    model = _llama()
    applied = apply_policy(model, "full")
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    prepared = accelerator.prepare_model(model)
    applied.remove()
    assert abs(_loss(prepared) - _loss(_llama())) < 1e-2
    unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert isinstance(unwrapped.forward, MethodType)
    assert _loss(unwrapped) == _loss(_llama())
