"""Malformed files of rows are refused in one line that names the file; valid ones are read."""

from __future__ import annotations

from pathlib import Path

import pytest
from versions import is_older

from ckpt_ft.errors import UserError
from ckpt_ft.training.text import DataArguments, load_rows

ROW = b'{"text": "a"}\n'


def read(path: Path) -> list[str]:
    return list(load_rows(DataArguments(dataset_name=str(path)), evaluate=False, seed=0)[0]["text"])


@pytest.mark.parametrize(
    "content",
    [
        ROW + b"[1]\n",
        ROW + b'{"text": "caf\xe9"}\n',
        ROW + b'{"text": ' + b"[" * 500 + b"\n",
        b"9" * 5000 + b"\n",
    ],
)
def test_malformed_file_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(UserError) as refused:
        read(tmp_path / "a.jsonl")
    assert "a.jsonl: " in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b"\xef\xbb\xbf" + ROW + b"\n" + ROW),
        ("a.json", b'[{"text": "a"},\n {"text": "a"}]'),
        ("a.json", ROW + ROW),
    ],
)
def test_valid_files_are_read(tmp_path: Path, name: str, content: bytes) -> None:
    if content.startswith(b"\xef\xbb\xbf") and is_older("datasets", "5.2"):
        pytest.skip("an older datasets, which takes no byte order mark")
    (tmp_path / name).write_bytes(content)
    assert read(tmp_path / name) == ["a", "a"]
