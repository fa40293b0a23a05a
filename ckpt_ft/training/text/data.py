"""Rows of text for a language model: from the Hub, a local file or a directory.

`load_rows` loads and splits a dataset, `known_columns` renames the columns of other tools, and `encode.py` turns the
rows into tokens. Bad input raises UserError, one line that names the file, the line or the column.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_ft.errors import UserError, one_line
from ckpt_ft.spec.defaults import SEQ_LENGTH
from ckpt_ft.training.flags import Count, Length, SplitArguments, flag

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

LOADERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
LONGEST = 16 << 20  # bytes of one row in a file; a longer one is not text
ROW_NUMBER = "__row__"  # column with the number that a row had before the dataset was split
_BOM = b"\xef\xbb\xbf"
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclass
class DataArguments(SplitArguments):
    """The dataset to train on, and how its rows become sequences. The names are TRL's."""

    dataset_name: str | None = flag(
        None, "Hub id, or a local directory or file (json, jsonl, csv, parquet, txt); without it, the sample."
    )
    dataset_text_field: str = flag("text", "Column of plain text.")
    dataset_num_proc: Count | None = flag(None, "Number of processes that tokenize.")
    max_length: Length = flag(SEQ_LENGTH, "Tokens per sequence; longer rows are cut.")
    packing: bool = flag(False, "Put several rows into one sequence; attention and loss stay within each row.")


def load_rows(args: SplitArguments, *, evaluate: bool, seed: int) -> tuple[Dataset, Dataset | None]:
    """Returns the training rows, and the evaluation rows if `evaluate` is set.

    Rows that are split with `--test_split_size` have a column `ROW_NUMBER`, which error messages use.
    """
    if args.dataset_name is None:
        raise UserError("--dataset_name is missing: give a Hub id or a local json, jsonl, csv, parquet or txt file")
    train = _load(args.dataset_name, args.dataset_config, args.dataset_train_split)
    if not evaluate:
        return train, None
    if args.test_split_size is None:
        return train, _load(args.dataset_name, args.dataset_config, args.dataset_test_split)
    return args.hold_out(train.add_column(ROW_NUMBER, list(range(1, len(train) + 1))), seed)


def row_number(row: dict[str, Any], index: int) -> int:
    """The number of `row` in its dataset, from 1, where `index` is its position after the split."""
    return int(row.get(ROW_NUMBER) or index + 1)


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
        raise UserError(f"dataset {path}: {_reason(error.__cause__ or error)}") from error


def _load_named(name: str, config: str | None, split: str) -> Dataset:
    """Loads a Hub dataset, or a local directory of data files."""
    from datasets import load_dataset

    try:
        return load_dataset(name, config, split=split)
    except Exception as error:  # the readers of the many formats raise errors of every class
        where = (
            ""
            if Path(name).is_dir()
            else " (neither a local path nor a dataset of the Hub that can be read from here)"
        )
        raise UserError(f"dataset {name}{where}: {_reason(error.__cause__ or error)}") from error


def _check_json(path: Path) -> None:
    """Parses every row: the readers of `datasets` abort on a first row `null` and on deep nesting, and name no line.

    A file .json may be lines, one array, or one object over several lines, which is left to the readers.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(LONGEST + 1), b""), start=1):
            line = (line.removeprefix(_BOM) if number == 1 else line).strip()
            if number == 1 and path.suffix == ".json" and line[:1] in b"[{" and not line.endswith(b"}"):
                content = _parsed(path.read_bytes().removeprefix(_BOM), f"dataset {path}")
                for row, value in enumerate(content if isinstance(content, list) else (), start=1):
                    _check_row(value, f"dataset {path}: row {row}")
                return
            place = f"dataset {path}: line {number}"
            if len(line) > LONGEST:
                raise UserError(f"{place} is longer than {LONGEST >> 20} MiB; a row is a text, split it")
            if line:
                _check_row(_parsed(line, place), place)


def _parsed(text: bytes, place: str) -> Any:
    try:
        return json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{place} is not UTF-8 ({one_line(error)}); convert the file") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not valid JSON ({one_line(error, 200)})") from None


def _check_row(row: Any, place: str) -> None:
    if not isinstance(row, dict):
        raise UserError(f"{place} is a JSON {type(row).__name__}, expected an object")


def _reason(error: BaseException) -> str:
    text = one_line(error)
    return "it has no rows" if "corresponds to no data" in text else text


def known_columns(rows: Dataset, text_field: str) -> Dataset:
    """Converts ShareGPT's and Alpaca's columns, with a warning; other rows are returned as they are.

    ShareGPT's 'conversations' become 'messages'. Alpaca's 'instruction', 'input' and 'output' become 'prompt' and
    'completion', with Alpaca's own prompt text.
    """
    columns = set(rows.column_names)
    if "messages" in columns or {"prompt", "completion"} <= columns or text_field in columns:
        return rows
    if "conversations" in columns:
        logger.warning("the dataset's 'conversations' (ShareGPT) are read as 'messages'")
        return rows.map(_from_sharegpt, with_indices=True, remove_columns=rows.column_names)
    if {"instruction", "output"} <= columns:
        logger.warning("the dataset's 'instruction', 'input' and 'output' (Alpaca) are read as prompt and completion")
        return rows.map(_from_alpaca, remove_columns=rows.column_names)
    return rows


def _from_sharegpt(row: dict[str, Any], index: int) -> dict[str, Any]:
    try:
        return {
            "messages": [{"role": _ROLES[turn["from"]], "content": turn["value"]} for turn in row["conversations"]]
        }
    except (KeyError, TypeError) as error:
        raise UserError(
            f"row {row_number(row, index)}: 'conversations' is a list of turns with 'from' ({', '.join(_ROLES)}) "
            "and 'value'"
        ) from error


def _from_alpaca(row: dict[str, Any]) -> dict[str, str]:
    context = f"### Input:\n{row['input']}\n\n" if row.get("input") else ""
    prompt = f"### Instruction:\n{row['instruction']}\n\n{context}### Response:\n"
    return {"prompt": prompt, "completion": row["output"]}
