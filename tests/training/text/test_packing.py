"""Packed rows stay apart, or packing is refused."""

from __future__ import annotations

import pytest
from language_models import make

from ckpt_ft.errors import UserError
from ckpt_ft.training.text.packing import check_rows_apart


@pytest.mark.parametrize("kind", ["llama", "gpt2", "phi", "mixtral", "qwen3_moe"])
def test_rows_that_stay_apart_are_packed(kind: str) -> None:
    model = make(kind, "dropout")
    check_rows_apart(model)
    assert model.training


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["opt", "mamba", "jamba"])
@pytest.mark.parametrize("variant", ["plain", "lora"])
def test_rows_that_would_see_one_another_are_not(kind: str, variant: str) -> None:
    with pytest.raises(UserError, match=f"--packing: in a {kind} packed rows see one another"):
        check_rows_apart(make(kind, variant))
