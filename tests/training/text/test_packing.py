"""Packed rows do not attend to each other, or packing is refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from language_models import make

from ckpt_ft.errors import UserError
from ckpt_ft.training.text import check_rows_apart


@pytest.mark.parametrize("kind", ["llama", "gpt2", "phi", "mixtral", "qwen3_moe"])
def test_packing_is_allowed_if_rows_do_not_attend_to_each_other(kind: str) -> None:
    model = make(kind, "dropout")
    check_rows_apart(model)
    assert model.training


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["opt", "mamba", "jamba"])
@pytest.mark.parametrize("variant", ["plain", "lora"])
def test_packing_is_refused_if_rows_attend_to_each_other(kind: str, variant: str) -> None:
    with pytest.raises(UserError, match=f"--packing: in a {kind} packed rows see one another"):
        check_rows_apart(make(kind, variant))


def test_packing_is_refused_if_unsupported(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = make("gpt2", "plain")

    def broken(*args: Any, position_ids: Any = None, **kwargs: Any) -> None:
        raise RuntimeError("CUDA error: invalid argument")

    monkeypatch.setattr(model, "forward", broken)
    with pytest.raises(UserError, match="--packing: a gpt2 cannot be run to see .*: RuntimeError: CUDA error"):
        check_rows_apart(model)
    next(model.parameters()).ds_id = 0  # ZeRO-3 marks partitioned parameters this way
    with caplog.at_level(logging.WARNING, "ckpt_ft"):
        check_rows_apart(model)
    assert caplog.messages == ["--packing: whether packed rows of a gpt2 see one another cannot be tried here"]
