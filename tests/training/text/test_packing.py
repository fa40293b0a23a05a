"""Packing is allowed for models whose packed rows do not see one another, and refused for others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from language_models import make
from transformers import AutoConfig, AutoModelForCausalLM

from ckpt_ft.errors import UserError
from ckpt_ft.training.text import PACKABLE, check_rows_apart

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "intermediate_size": 32, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize("kind", sorted(PACKABLE))
@torch.no_grad()
def test_packed_row_does_not_see_the_row_before_it(kind: str) -> None:
    sizes = SIZES | (EXPERTS if kind in ("mixtral", "qwen3_moe") else {})
    if kind == "phi":
        sizes = {**sizes, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).eval()
    check_rows_apart(model)
    tokens = torch.arange(3, 11)
    one, other = (
        model(
            input_ids=torch.cat([tokens + first, tokens + 16])[None], position_ids=torch.arange(8).repeat(2)[None],
            use_cache=False,
        ).logits[:, 8:]
        for first in (0, 8)
    )  # fmt: skip
    assert (one - other).abs().max() <= 1e-4 * one.abs().max()  # experts see the batch's other rows


@pytest.mark.parametrize("kind", ["opt", "mamba", "jamba"])
@pytest.mark.parametrize("variant", ["plain", "lora"])
def test_packing_is_refused_where_rows_may_see_one_another(kind: str, variant: str) -> None:
    with pytest.raises(UserError, match=f"--packing: it is not known whether packed rows of a {kind} see one another"):
        check_rows_apart(make(kind, variant))
