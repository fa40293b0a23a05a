"""Malformed files of rows are refused in one line that names the place."""

from __future__ import annotations

from pathlib import Path

import pytest
from versions import is_older

from ckpt_ft.errors import UserError
from ckpt_ft.training import text
from ckpt_ft.training.text import DataArguments, load_rows

ROW = b'{"text": "a"}\n'


def read(path: Path) -> list[str]:
    return list(load_rows(DataArguments(dataset_name=str(path)), evaluate=False, seed=0)[0]["text"])


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", b"null\n" + ROW, "line 1 is a JSON NoneType, expected an object"),
        ("a.jsonl", ROW + b"[1]\n", "line 2 is a JSON list, expected an object"),
        ("a.jsonl", ROW + b'{"text": "caf\xe9"}\n', "line 2 is not UTF-8"),
        ("a.jsonl", ROW + b'{"text": ' + b"[" * 100_000 + b"\n", "line 2 is not valid JSON"),
        ("a.jsonl", b"9" * 5000 + b"\n", "line 1 is not valid JSON"),
        ("a.jsonl", ROW + b'{"text": "' + b"a" * 3000 + b'"}\n', "line 2 is longer than"),
        (
            "a.jsonl",
            b'{"n": 1, "text": null}\n{"n": 0.5, "text": "a"}\n{"text": 1}\n',
            "line 3: 'text' is int, and str in",
        ),
        ("a.json", b"[null, {}]", "row 1 is a JSON NoneType"),
        ("a.json", b"[" * 100_000, "is not valid JSON"),
        ("a.json", b"null", "line 1 is a JSON NoneType"),
    ],
)
def test_malformed_file_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, says: str
) -> None:
    monkeypatch.setattr(text, "LONGEST", 2000 if b"a" * 3000 in content else text.LONGEST)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as refused:
        read(tmp_path / name)
    assert says in str(refused.value)
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


def test_invalid_lines_are_skipped_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_bytes(ROW + b"[1]\n\n{oops\n" + ROW + b'{"text": {}}')
    args = DataArguments(dataset_name=str(tmp_path / "a.jsonl"), skip_bad_rows=True, test_split_size=0.5)
    rows, held_out = load_rows(args, evaluate=True, seed=0)
    assert held_out is not None
    assert sorted([*rows[text.ROW_NUMBER], *held_out[text.ROW_NUMBER]]) == [1, 5]
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(" is ")[0].rpartition("a.jsonl: ")[2] for line in said] == [
        "line 2",
        "line 4",
        "line 6: 'text'",
    ]
