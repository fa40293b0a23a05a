"""Packed rows stay apart, or packing is refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from language_models import make

from ckpt_ft.errors import UserError
from ckpt_ft.training.text import check_rows_apart


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


def test_a_model_that_cannot_be_asked_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = make("gpt2", "plain")

    def broken(*args: Any, position_ids: Any = None, **kwargs: Any) -> None:
        raise RuntimeError("CUDA error: invalid argument")

    monkeypatch.setattr(model, "forward", broken)
    with pytest.raises(UserError, match="--packing: a gpt2 cannot be run to see .*: RuntimeError: CUDA error"):
        check_rows_apart(model)
    next(model.parameters()).ds_id = 0  # as ZeRO-3 marks what it has partitioned
    with caplog.at_level(logging.WARNING, "ckpt_ft"):
        check_rows_apart(model)
    assert caplog.messages == ["--packing: whether packed rows of a gpt2 see one another cannot be tried here"]
