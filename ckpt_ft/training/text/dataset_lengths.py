"""A dataset as the planner sees it: how long its rows are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckpt_ft.errors import UserError
from ckpt_ft.training.models import ModelArguments, load_tokenizer
from ckpt_ft.workloads.lengths import Lengths

from .columns import known_columns
from .data import DataArguments, load_rows
from .encode import encode_rows, row_layout


def dataset_lengths(dataset: str, model: str, max_length: int) -> Lengths:
    """Tokens of each row of a dataset, at most `max_length`, as recipes/llm.py makes them with `model`'s tokenizer.

    A column `input_ids` needs no tokenizer.

    Raises:
        UserError: the dataset or the tokenizer cannot be read, or the rows have no length.
    """
    args = DataArguments(dataset_name=dataset, max_length=max_length)
    rows, _ = load_rows(args, evaluate=False, seed=0)
    if "input_ids" not in rows.column_names:
        source = str(Path(model).parent) if Path(model).is_file() else model  # a config: the tokenizer lies beside it
        try:
            rows = known_columns(rows, args.dataset_text_field)
            row_layout(rows.column_names, args.dataset_text_field)
            rows = encode_rows(rows, load_tokenizer(ModelArguments(model_name_or_path=source)), args)
        except UserError as error:
            raise UserError(f"--dataset {dataset}: its rows have no length: {error}; or give 'input_ids'") from error
    lengths = [min(length, max_length) for length in row_lengths(rows) if length]
    if not lengths:
        raise UserError(f"--dataset {dataset}: its 'input_ids' are empty; expected a list of tokens in each row")
    return Lengths.of(lengths)


PREFERENCES = ("prompt_ids", "chosen_ids", "rejected_ids")  # of TRL's DPOTrainer


def have_lengths(rows: Any) -> bool:
    """Whether `row_lengths` can say how long they are."""
    columns = getattr(rows, "column_names", None) or ()
    return "input_ids" in columns or all(name in columns for name in PREFERENCES)


def row_lengths(rows: Any) -> list[int]:
    """The tokens of each row of a `datasets.Dataset`, from its `input_ids` or as a pair of preferences: those of the
    prompt and the longer answer.

    Raises:
        UserError: they are no lists.
    """
    if "input_ids" in rows.column_names:
        return _list_lengths(rows, "input_ids")
    prompts, chosen, rejected = (_list_lengths(rows, name) for name in PREFERENCES)
    return [prompt + max(pair) for prompt, *pair in zip(prompts, chosen, rejected, strict=True)]


def _list_lengths(rows: Any, column: str) -> list[int]:
    """Without reading the tokens."""
    import pyarrow as pa
    import pyarrow.compute as pc

    tables = rows.select_columns(column).with_format("arrow").iter(batch_size=10_000)
    try:
        found = [length for table in tables for length in pc.list_value_length(table[column]).to_pylist()]
    except pa.ArrowNotImplementedError as error:
        kind = rows.features[column]
        raise UserError(f"the dataset's '{column}' are {kind}; expected a list of tokens in each row") from error
    if None in found:
        raise UserError(f"row {found.index(None) + 1}: '{column}' is null; expected a list of tokens")
    return found
