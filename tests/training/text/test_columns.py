"""ShareGPT and Alpaca rows are converted, and other rows are unchanged."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("datasets")
from datasets import Dataset

from ckpt_ft.errors import UserError
from ckpt_ft.training.text import DataArguments, known_columns, load_rows


def converted(row: dict[str, Any]) -> dict[str, Any]:
    return dict(known_columns(Dataset.from_list([row]), "text")[0])


def test_sharegpt_rows_are_converted() -> None:
    turns = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    roles = [("system", "s"), ("user", "q"), ("assistant", "a")]
    assert converted({"conversations": turns, "id": 1}) == {
        "messages": [{"role": role, "content": content} for role, content in roles]
    }


def test_alpaca_rows_are_converted() -> None:
    row = {"instruction": "Add.", "input": "1 2", "output": "3"}
    assert converted(row) == {
        "prompt": "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n", "completion": "3"
    }  # fmt: skip
    assert "Input" not in converted({**row, "input": ""})["prompt"]


def test_known_columns_stay() -> None:
    for row in ({"text": "a", "output": "b", "instruction": "c"}, {"prompt": "a", "completion": "b"}):
        assert converted(row) == row


def test_invalid_conversation_is_named_by_its_row() -> None:
    rows = Dataset.from_list([{"conversations": [{"from": "robot", "value": "x"}]}])
    with pytest.raises(UserError, match="row 1: 'conversations' is a list of turns with 'from'"):
        known_columns(rows, "text")


def test_columns_are_mapped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"question": "2+2?", "answer": "4", "prompt": "hidden"}))
    args = DataArguments(dataset_name=str(tmp_path / "a.jsonl"), columns="prompt=question, completion=answer")
    assert load_rows(args, evaluate=False, seed=0)[0][0] == {"prompt": "2+2?", "completion": "4"}


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ("prompt=quesion", "--columns prompt=quesion: no column 'quesion'; did you mean 'question'?"),
        ("prompt", "write ours=theirs, as in prompt=question,completion=answer"),
        ("prompt=question,prompt=answer", "a column is named twice"),
    ],
)
def test_invalid_mapping_is_one_line(columns: str, said: str) -> None:
    rows = Dataset.from_list([{"question": "a", "answer": "b"}])
    with pytest.raises(UserError, match=re.escape(said)):
        DataArguments(columns=columns).renamed(rows)
