"""A KV cache in training: switched off where nobody reads it, kept right where the model itself does."""

from __future__ import annotations

import torch
from language_models import differing
from torch import nn
from transformers import PI0Config, PI0ForConditionalGeneration

from ckpt_ft import apply_policy

GEMMA = {
    "model_type": "gemma",
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
SIGLIP = {
    "model_type": "siglip_vision_model",
    "intermediate_size": 16,
    "hidden_size": 16,
    "patch_size": 8,
    "image_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vision_use_head": False,
}


def pi0() -> nn.Module:
    """A vision-language model whose keys and values a second model, which denoises actions, attends to."""
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


def test_a_cache_that_one_part_of_a_model_fills_and_another_reads() -> None:
    plain = pi0()
    expected = numbers(plain)
    assert expected["model.vlm.language_model.layers.0.self_attn.k_proj.weight"].abs().sum() > 0
    for policy in ("full", "every:2", "segments:2", "save:attention+matmul", "modules:attention"):
        model = pi0()
        apply_policy(model, policy)
        for _ in range(2):
            assert not differing(numbers(model), expected), policy
