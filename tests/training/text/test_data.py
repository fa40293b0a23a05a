"""Rows from files: formats, splits, and one line that names an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckpt_ft.errors import UserError
from ckpt_ft.training.samples.language import make_reference, paragraphs
from ckpt_ft.training.text import DataArguments, load_rows


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def load(name: str, evaluate: bool = False, **kwargs: object):  # type: ignore[no-untyped-def]
    return load_rows(DataArguments(dataset_name=name, **kwargs), evaluate=evaluate, seed=0)  # type: ignore[arg-type]


def test_every_local_format_gives_the_same_rows(tmp_path: Path) -> None:
    import pandas

    rows = [{"text": "one"}, {"text": "two"}]
    names = [
        write(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows)),
        write(tmp_path / "a.json", json.dumps(rows)),
        write(tmp_path / "a.csv", "text\none\ntwo\n"),
        write(tmp_path / "a.txt", "one\ntwo\n"),
    ]
    pandas.DataFrame(rows).to_parquet(tmp_path / "a.parquet")
    for name in [*names, str(tmp_path / "a.parquet")]:
        assert load(name)[0].to_list() == rows


def test_held_out_rows_are_not_trained_on(tmp_path: Path) -> None:
    name = write(tmp_path / "a.txt", "".join(f"{i}\n" for i in range(50)))
    train, test = load(name, evaluate=True, test_split_size=0.2)
    assert len(test) == 10
    assert sorted(int(row["text"]) for row in [*train, *test]) == list(range(50))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text": "b"\n{"text": "c"}\n', "a.jsonl: "),
        ("b.jsonl", '{"text": "a"}\n\n{"text": "b"}\n[1]\n', "b.jsonl: "),
        ("c.jsonl", "", "the file is empty"),
        ("d.csv", "text\n", "it has no rows"),
        ("e.json", "[1", "e.json"),
        ("f.parquet", "no parquet", "f.parquet"),
        ("g.xlsx", "x", "cannot read '.xlsx' files (.json, .jsonl, .csv, .parquet, .txt)"),
    ],
)
def test_damaged_file_is_one_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load(write(tmp_path / name, text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_dataset_or_split_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone.jsonl: no such file"):
        load(str(tmp_path / "gone.jsonl"))
    with pytest.raises(UserError, match=r"dataset no/such \(neither a local path nor"):
        load("no/such")
    with pytest.raises(UserError, match="has no split 'test'; hold rows out with --test_split_size 0.1"):
        load(write(tmp_path / "a.txt", "one\n"), evaluate=True)
    with pytest.raises(UserError, match="--dataset_name is missing"):
        load_rows(DataArguments(), evaluate=False, seed=0)


def test_invalid_lengths_and_shares_are_refused() -> None:
    with pytest.raises(UserError, match="--max_length 0: it should be greater than or equal to 2"):
        DataArguments(max_length=0)
    with pytest.raises(UserError, match="--test_split_size 1.5"):
        DataArguments(test_split_size=1.5)
    with pytest.raises(UserError, match="--dataset_num_proc -1: it should be greater than or equal to 0"):
        DataArguments(dataset_num_proc=-1)


def test_split_that_leaves_no_training_row_is_refused(tmp_path: Path) -> None:
    name = write(tmp_path / "a.txt", "one\ntwo\nthree\n")
    assert [len(rows) for rows in load(name, evaluate=True, test_split_size=0.6)] == [1, 2]
    with pytest.raises(UserError, match="--test_split_size 0.7: of the 3 rows of .* none is left to train on"):
        load(name, evaluate=True, test_split_size=0.7)


def test_sample_is_made_once_and_is_deterministic(sample: tuple[Path, Path]) -> None:
    model, corpus = sample
    before = corpus.stat().st_mtime_ns
    assert make_reference() == (str(model), str(corpus))
    assert corpus.stat().st_mtime_ns == before
    rows = [json.loads(line) for line in corpus.read_text().splitlines()]
    assert [row["completion"] for row in rows] == [text for _, text in paragraphs()]
    assert len(rows) > 1000
    assert all("`" in row["prompt"] for row in rows)
