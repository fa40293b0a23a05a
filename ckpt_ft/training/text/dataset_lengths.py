"""A dataset as the planner sees it: how long its rows are."""

from __future__ import annotations

from pathlib import Path

from ckpt_ft.errors import UserError
from ckpt_ft.training.models import ModelArguments, load_tokenizer
from ckpt_ft.workloads.lengths import Lengths, row_lengths

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
