"""KV caches in training: off if nothing reads them, and correct if the model itself reads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from language_models import batch, differing, make
from torch import nn
from transformers import DynamicCache, PI0Config, PI0ForConditionalGeneration
from versions import is_older

from ckpt_ft import apply_policy

CACHE = "past_key_values" if is_older("transformers", "5.24") else "cache"  # the argument of a layer
GEMMA = {
    "model_type": "gemma", "hidden_size": 16, "num_hidden_layers": 4, "intermediate_size": 32,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip
SIGLIP = {
    "model_type": "siglip_vision_model", "intermediate_size": 16, "hidden_size": 16, "patch_size": 8, "image_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 2, "vision_use_head": False,
}  # fmt: skip


def pi0() -> nn.Module:
    """Returns a model whose second part, which denoises actions, attends to the keys and values of its first."""
    torch.manual_seed(0)
    vlm = {
        "model_type": "paligemma",
        "text_config": {**GEMMA, "vocab_size": 61},
        "vision_config": SIGLIP,
        "projection_dim": 16,
        "image_token_id": 60,
    }
    config = PI0Config(vlm_config=vlm, dit_config=GEMMA, chunk_size=4, max_state_dim=4, max_action_dim=4)
    return PI0ForConditionalGeneration(config).train()


def numbers(model: nn.Module) -> dict[str, torch.Tensor]:
    def r(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))

    model.zero_grad()
    ids = torch.tensor([[60] * 4 + [7, 8, 9], [60] * 4 + [5, 4, 3]])
    loss = model(
        state=r(2, 4),
        noise=r(2, 4, 4),
        timestep=torch.tensor([0.3, 0.6]),
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        pixel_values=r(2, 1, 3, 16, 16),
        pixel_attention_mask=torch.ones(2, 1, dtype=torch.bool),
        actions=r(2, 4, 4) + 1,
    ).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_cache_filled_by_one_part_of_a_model_and_read_by_another() -> None:
    plain = pi0()
    expected = numbers(plain)
    assert expected["model.vlm.language_model.layers.0.self_attn.k_proj.weight"].abs().sum() > 0
    for policy in ("full", "every:2", "segments:2", "save:attention+matmul", "modules:attention"):
        model = pi0()
        apply_policy(model, policy)
        for _ in range(2):
            assert not differing(numbers(model), expected), policy


def tied_llama() -> Any:
    """Returns a model with one decoder layer at two positions; with a KV cache, the second attends to the first."""
    model: Any = make("llama")
    model.model.layers[2] = model.model.layers[1]
    return model


def step(model: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = model(**batch(), **kwargs).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


def test_empty_place_in_a_list_of_layers_is_passed_over() -> None:
    plain, model = make("llama"), make("llama")
    model.spare = nn.ModuleList([nn.Linear(2, 2), None])
    apply_policy(model, "full")
    expected = step(plain)
    assert not differing({name: value for name, value in step(model).items() if name in expected}, expected)


@pytest.mark.parametrize("tied", ["before", "after"])
@pytest.mark.parametrize("policy", ["full", "save:matmul", "save:attention", "segments:2", "modules:attention"])
@pytest.mark.filterwarnings("ignore:policy .* no (block|operator):UserWarning")
def test_tied_blocks_are_equal_with_and_without_a_cache(policy: str, tied: str) -> None:
    plain, model = tied_llama(), tied_llama() if tied == "before" else make("llama")
    assert differing(step(plain), step(plain, use_cache=False))  # the cache changes the result of this model
    apply_policy(model, policy, verify="always")
    if tied == "after":
        step(model)
        model.model.layers[2] = model.model.layers[1]
    for asked in ({}, {"use_cache": True}, {"use_cache": False}):
        expected = step(plain, **asked)
        for _ in range(2):
            assert not differing(step(model, **asked), expected)


def test_layers_with_two_names_are_not_refused() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm: Any = make("llama")
            self.decoder = self.lm.model

        def forward(self, **batch: Any) -> Any:
            return self.lm(**batch)

    plain, model = Wrapper(), Wrapper()
    apply_policy(model, "full", verify="always")
    assert not differing(step(model), step(plain))


@pytest.mark.parametrize("policy", ["full", "pointwise", "offload", "save:attention"])
@pytest.mark.filterwarnings("ignore:policy .* no (block|operator):UserWarning")
def test_tied_blocks_in_eval_mode_keep_their_cache(policy: str) -> None:
    plain, model = tied_llama().eval(), tied_llama().eval()
    apply_policy(model, policy, verify="always")
    assert not differing(step(model), step(plain))


class TwoPasses(nn.Module):
    """Runs its blocks twice with one cache, so that the second pass attends to the keys of the first."""

    def __init__(self) -> None:
        super().__init__()
        model: Any = make("llama")
        self.rotary, self.layers = model.model.rotary_emb, model.model.layers

    def forward(self, x: torch.Tensor, cached: bool) -> torch.Tensor:
        cache = DynamicCache() if cached else None
        positions = self.rotary(x, torch.arange(x.shape[1])[None])
        for _ in range(2):
            for layer in self.layers:
                x = layer(x, position_embeddings=positions, use_cache=cached, **{CACHE: cache})
        return x


@pytest.mark.parametrize("policy", ["full", "save:matmul", "segments:2"])
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.filterwarnings("ignore:policy .* no block was given:UserWarning")
def test_two_passes_over_one_cache_are_equal(policy: str, cached: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16)
    plain, model = TwoPasses().train(), TwoPasses().train()
    with torch.no_grad():
        assert not torch.equal(plain(x, True), plain(x, False))
    apply_policy(model, policy, verify="always")
    for one in (plain, model):
        one(x, cached).square().sum().backward()
    assert all(map(torch.equal, (p.grad for p in model.parameters()), (p.grad for p in plain.parameters())))
