"""Packing is allowed for models whose packed rows do not see one another, and refused for others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from language_models import make

from ckpt_ft.errors import UserError
from ckpt_ft.training.text import check_rows_apart


@pytest.mark.parametrize("kind", ["llama", "gpt2", "phi", "mixtral", "qwen3_moe"])
@torch.no_grad()
def test_packed_row_does_not_see_the_row_before_it(kind: str) -> None:
    model: Any = make(kind, "plain").eval()
    check_rows_apart(model)
    tokens = torch.arange(8)
    one, other = (
        model(
            input_ids=torch.cat([tokens + first, tokens + 16])[None], position_ids=tokens.repeat(2)[None],
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
