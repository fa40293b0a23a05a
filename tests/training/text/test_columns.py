"""ShareGPT's and Alpaca's rows become known ones, and nothing else is touched."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("datasets")
from datasets import Dataset

from ckpt_ft.errors import UserError
from ckpt_ft.training.text import known_columns


def converted(row: dict[str, Any]) -> dict[str, Any]:
    return dict(known_columns(Dataset.from_list([row]), "text")[0])


def test_sharegpt() -> None:
    turns = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    roles = [("system", "s"), ("user", "q"), ("assistant", "a")]
    assert converted({"conversations": turns, "id": 1}) == {
        "messages": [{"role": role, "content": content} for role, content in roles]
    }


def test_alpaca() -> None:
    row = {"instruction": "Add.", "input": "1 2", "output": "3"}
    assert converted(row) == {
        "prompt": "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n", "completion": "3"
    }  # fmt: skip
    assert "Input" not in converted({**row, "input": ""})["prompt"]


def test_known_columns_stay() -> None:
    for row in ({"text": "a", "output": "b", "instruction": "c"}, {"prompt": "a", "completion": "b"}):
        assert converted(row) == row


def test_a_conversation_that_is_none_is_named_by_its_row() -> None:
    rows = Dataset.from_list([{"conversations": [{"from": "robot", "value": "x"}]}])
    with pytest.raises(UserError, match="row 1: 'conversations' is a list of turns with 'from'"):
        known_columns(rows, "text")
