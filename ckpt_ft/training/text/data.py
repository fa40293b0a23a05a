"""Rows for a language model: a Hub id, a local file or directory, or the built-in sample, as `datasets.Dataset`.

Only loading and splitting; `encode.py` makes tokens of the rows. Whatever is wrong with the data is one line that
names the file, the line or the column.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_ft.errors import UserError, one_line
from ckpt_ft.spec.defaults import SEQ_LENGTH
from ckpt_ft.training.flags import NOT_NEGATIVE, SplitArguments, check_numbers, flag

if TYPE_CHECKING:
    from datasets import Dataset

LOADERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}

LONGEST = 16 << 20  # bytes of a row in a file: no text is that long
_DEEP = 500  # brackets in a row: what has more is parsed here, where too deep a nesting is an error and no crash
_BOM = b"\xef\xbb\xbf"


@dataclass
class DataArguments(SplitArguments):
    """Which rows are trained on and how they become sequences; the names are TRL's.

    Raises:
        UserError: a length or a share that no dataset can have.
    """

    dataset_name: str | None = flag(
        None, "Hub id, or a local directory or file (json, jsonl, csv, parquet, txt); without it, the sample."
    )
    dataset_text_field: str = flag("text", "Column of plain text.")
    dataset_num_proc: int | None = flag(None, "Processes that tokenize.")
    max_length: int = flag(SEQ_LENGTH, "Tokens per sequence; what is longer is cut.")
    packing: bool = flag(False, "Several rows per sequence; attention and loss stay within each row.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length < 2:
            raise UserError(
                f"--max_length {self.max_length}: a sequence needs at least 2 tokens to have anything to predict"
            )
        check_numbers(self, {"dataset_num_proc": NOT_NEGATIVE})


def load_rows(args: SplitArguments, *, evaluate: bool, seed: int) -> tuple[Dataset, Dataset | None]:
    """The rows to train on, and those to evaluate on when `evaluate` is set.

    Raises:
        UserError: the dataset or a split cannot be found, read, or is empty.
    """
    if args.dataset_name is None:
        raise UserError("--dataset_name is missing: give a Hub id or a local json, jsonl, csv, parquet or txt file")
    train = _load(args.dataset_name, args.dataset_config, args.dataset_train_split)
    if not evaluate:
        return train, None
    if args.test_split_size is None:
        return train, _load(args.dataset_name, args.dataset_config, args.dataset_test_split)
    return args.hold_out(train, seed)


def _load(name: str, config: str | None, split: str) -> Dataset:
    path = Path(name)
    if path.suffix in LOADERS:
        rows = _load_file(path, split)
    elif path.is_file():
        raise UserError(f"dataset {name}: cannot read '{path.suffix}' files ({', '.join(LOADERS)})")
    else:
        rows = _load_named(name, config, split)
    if len(rows) == 0:
        raise UserError(f"dataset {name}: split '{split}' is empty")
    return rows


def _load_file(path: Path, split: str) -> Dataset:
    from datasets import load_dataset

    if split != "train":
        raise UserError(
            f"dataset {path}: a single file has no split '{split}'; hold rows out with --test_split_size 0.1"
        )
    if not path.is_file():
        raise UserError(f"dataset {path}: no such file")
    if path.stat().st_size == 0:
        raise UserError(f"dataset {path}: the file is empty")
    if path.suffix in (".json", ".jsonl"):
        _check_json(path)
    try:
        return load_dataset(LOADERS[path.suffix], data_files=str(path), split="train")
    except Exception as error:
        if path.suffix == ".jsonl":
            _check_json(path, every=True)  # the reader counts in blocks, a person counts lines
        raise UserError(f"dataset {path}: {_reason(error.__cause__ or error)}") from error


def _load_named(name: str, config: str | None, split: str) -> Dataset:
    """A Hub dataset, or a local directory of data files."""
    from datasets import load_dataset

    try:
        return load_dataset(name, config, split=split)
    except Exception as error:  # as its files are: readers of many formats raise what they like
        where = (
            ""
            if Path(name).is_dir()
            else " (neither a local path nor a dataset of the Hub that can be read from here)"
        )
        raise UserError(f"dataset {name}{where}: {_reason(error.__cause__ or error)}") from error


def _check_json(path: Path, every: bool = False) -> None:
    """Name the first row that the readers below us would not survive: they end in a crash on a first row `null`.

    Cheap: a row is parsed here only where it is nested deeply, or where the file is one array; with `every` all are.

    Raises:
        UserError: a row is no object, not UTF-8, too long or too deep.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(LONGEST + 1), b""), start=1):
            place = f"dataset {path}: line {number}"
            line = line.removeprefix(_BOM).strip() if number == 1 else line.strip()
            if line.startswith(b"[") and number == 1 and path.suffix == ".json":
                return _check_array(path)
            if line.startswith(b"{") and number == 1 and path.suffix == ".json" and not line.endswith(b"}"):
                return None  # one object over several lines
            if len(line) > LONGEST:
                raise UserError(f"{place} is longer than {LONGEST >> 20} MiB; a row is a text, split it")
            if not line:
                continue
            try:
                line.decode("utf-8")
                row = json.loads(line) if every or _nested(line) or not line.startswith(b"{") else {}
            except UnicodeDecodeError as error:
                raise UserError(f"{place} is not UTF-8 ({one_line(error)}); convert the file") from None
            except (ValueError, RecursionError) as error:
                raise UserError(f"{place} is not valid JSON ({one_line(error, 200)})") from None
            if not isinstance(row, dict):
                raise UserError(f"{place} is a JSON {type(row).__name__}, expected an object")
    return None


def _nested(line: bytes) -> bool:
    return line.count(b"[") + line.count(b"{") > _DEEP


def _check_array(path: Path) -> None:
    try:
        rows = json.loads(path.read_bytes().removeprefix(_BOM))
    except (ValueError, RecursionError) as error:
        raise UserError(f"dataset {path} is not valid JSON ({one_line(error, 200)})") from None
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise UserError(f"dataset {path}: row {number} is a JSON {type(row).__name__}, expected an object")


def _reason(error: BaseException) -> str:
    text = one_line(error)
    return "it has no rows" if "corresponds to no data" in text else text
