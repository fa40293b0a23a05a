"""A dataset as the planner sees it: how long its rows are, and a Trainer's step on a batch of them."""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import send_to_device
from torch import nn

from ckpt_ft.errors import UserError
from ckpt_ft.training.models import ModelArguments, load_tokenizer
from ckpt_ft.workloads.lengths import Lengths, PaddedRows, Step

from .data import DataArguments, load_rows
from .encode import encode_rows, row_layout

if TYPE_CHECKING:
    from transformers import TrainingArguments

Collate = Callable[[list[Any]], dict[str, Any]]


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
            row_layout(rows.column_names, args.dataset_text_field)
            rows = encode_rows(rows, load_tokenizer(ModelArguments(model_name_or_path=source)), args)
        except UserError as error:
            raise UserError(f"--dataset {dataset}: its rows have no length: {error}; or give 'input_ids'") from error
    lengths = [min(length, max_length) for length in row_lengths(rows) if length]
    if not lengths:
        raise UserError(f"--dataset {dataset}: its 'input_ids' are empty; expected a list of tokens in each row")
    return Lengths.of(lengths)


def row_lengths(rows: Any) -> list[int]:
    """The lengths of `input_ids` in a `datasets.Dataset`, without reading the tokens.

    Raises:
        UserError: they are no lists.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    tables = rows.select_columns("input_ids").with_format("arrow").iter(batch_size=10_000)
    try:
        found = [length for table in tables for length in pc.list_value_length(table["input_ids"]).to_pylist()]
    except pa.ArrowNotImplementedError as error:
        kind = rows.features["input_ids"]
        raise UserError(f"the dataset's 'input_ids' are {kind}; expected a list of tokens in each row") from error
    if None in found:
        raise UserError(f"row {found.index(None) + 1}: 'input_ids' is null; expected a list of tokens")
    return found


def trainer_step(args: TrainingArguments, collate: Collate) -> Callable[[list[Any]], Step]:
    """Rows -> the Trainer's optimizer step on a batch of them."""
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    # A second micro-batch meets the gradients of the first; a third is like the second.
    passes = min(2, args.gradient_accumulation_steps)

    def step_on(rows: list[Any]) -> Step:
        batch = send_to_device(collate(rows), args.device)

        def step(model: nn.Module, optimizer: Any) -> None:
            for _ in range(passes):
                autocast = torch.autocast(args.device.type, dtype) if dtype else contextlib.nullcontext()
                with autocast:
                    loss = model(**batch).loss
                loss.backward()
            if args.max_grad_norm:
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            optimizer.step()
            model.zero_grad()

        return step

    return step_on


def padded_rows(args: TrainingArguments, rows: Any, collate: Collate) -> PaddedRows | None:
    """The training data by length, None where its rows are all alike (images).

    rows: a map-style dataset of dicts; those of a `datasets.Dataset` with "input_ids" have lengths.
    """
    if "input_ids" not in (getattr(rows, "column_names", None) or ()):
        return None
    lengths = row_lengths(rows)
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    step_on = trainer_step(args, collate)

    def step(size: int, length: int) -> Step:
        first = min(bisect_left(order, length, key=lengths.__getitem__), len(order) - 1)
        shorter = rows[order[first // 2]]  # as in most batches, the others are padded
        return step_on([rows[order[first]], *[shorter] * (size - 1)])

    by_length = getattr(args, "train_sampling_strategy", "") == "group_by_length"
    return PaddedRows(Lengths.of(lengths, by_length), step)
