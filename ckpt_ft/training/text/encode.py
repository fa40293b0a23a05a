"""Rows to token sequences: which tokens carry loss, what is cut, how rows share a sequence.

A row is a list of segments, `(text, trained)`, tokenized one by one: a prompt is then tokenized as it will be when the
model is used, and whether a token carries loss is never a question. Loss is on the whole of a `text`, on the
`completion` after a `prompt`, on the assistant's turns of `messages`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ckpt_ft.errors import UserError
from ckpt_ft.reading import library_reads

from .columns import known_columns
from .data import DataArguments
from .packing import pack

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

IGNORED = -100
_LAYOUT = 2  # raise it when rows are encoded to something else: datasets keeps what they were encoded to
Segments = list[tuple[str, bool]]
Renderer: TypeAlias = "PreTrainedTokenizerBase | ProcessorMixin"


def encode_rows(rows: Dataset, tokenizer: PreTrainedTokenizerBase, args: DataArguments) -> Dataset:
    """`rows` as `input_ids` and `labels` of at most `max_length` tokens, packed with `position_ids` when asked.

    Rows in which no token carries loss, because they are empty or their prompt fills `max_length`, are left out.

    Raises:
        UserError: no known column, a value that is no text or conversation (with its row), or nothing left to train
        on.
    """
    rows = known_columns(rows, args.dataset_text_field)
    layout = row_layout(rows.column_names, args.dataset_text_field)
    encoder = _Encoder(tokenizer, layout, args.dataset_text_field, args.max_length)
    encoded = rows.map(
        encoder,
        with_indices=True,
        batched=True,
        remove_columns=rows.column_names,
        num_proc=args.dataset_num_proc,
        desc="Tokenizing",
    )
    if len(encoded) == 0:
        raise UserError(
            f"none of the {len(rows)} rows has a token to learn within --max_length {args.max_length}; raise it"
        )
    if args.packing:
        encoded = encoded.map(
            pack, batched=True, batch_size=10_000, fn_kwargs={"max_length": args.max_length}, desc="Packing",
            remove_columns=encoded.column_names,
        )  # fmt: skip
    return encoded


def row_layout(columns: Sequence[str], text_field: str) -> str:
    """What rows with these columns are: "messages", "completion" (after a prompt) or "text".

    Raises:
        UserError: none of them.
    """
    if "messages" in columns:
        return "messages"
    if "prompt" in columns and "completion" in columns:
        return "completion"
    if text_field in columns:
        return "text"
    wanted = (
        f"'messages', 'prompt' and 'completion', or '{text_field}' (--dataset_text_field); ShareGPT's 'conversations' "
        "and Alpaca's 'instruction' and 'output' do as well"
    )
    raise UserError(f"the dataset has the columns {', '.join(columns)}; expected {wanted}")


@dataclass
class _Encoder:
    """Picklable, so that `datasets` can run it in other processes and recognise it in its cache."""

    tokenizer: PreTrainedTokenizerBase
    layout: str
    text_field: str
    max_length: int
    made: int = _LAYOUT

    def __call__(self, batch: dict[str, list[Any]], indices: list[int]) -> dict[str, list[list[int]]]:
        encoded: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
        for position, index in enumerate(indices):
            row = {column: values[position] for column, values in batch.items()}
            ids, labels = self._tokens(self._segments(row, index), begin=not self._is_chat(row))
            if any(label != IGNORED for label in labels):
                encoded["input_ids"].append(ids)
                encoded["labels"].append(labels)
        return encoded

    def _is_chat(self, row: dict[str, Any]) -> bool:
        return self.layout == "messages" or isinstance(row.get("prompt"), list)

    def _segments(self, row: dict[str, Any], index: int) -> Segments:
        if self.layout == "messages":
            return chat_segments(row["messages"], 0, self.tokenizer, index)
        if self.layout == "completion" and isinstance(row["prompt"], list):
            if not isinstance(row["completion"], list):
                kind = type(row["completion"]).__name__
                raise UserError(
                    f"row {index + 1}: 'completion' is {kind} after a 'prompt' of messages, expected a list"
                )
            return chat_segments(row["prompt"] + row["completion"], len(row["prompt"]), self.tokenizer, index)
        columns = ("prompt", "completion") if self.layout == "completion" else (self.text_field,)
        for column in columns:
            if not isinstance(row[column], str):
                raise UserError(f"row {index + 1}: '{column}' is {type(row[column]).__name__}, expected a string")
        end = self.tokenizer.eos_token or ""
        return [(row[column], column != "prompt") for column in columns] + [(end, True)]

    def _tokens(self, segments: Segments, begin: bool) -> tuple[list[int], list[int]]:
        """`input_ids` and `labels` of a row, cut; the first token is predicted from nothing, so it carries no loss."""
        bos = self.tokenizer.bos_token_id
        ids = [bos] if begin and bos is not None and bos in self.tokenizer("").input_ids else []
        labels = [IGNORED] * len(ids)
        for text, trained in segments:
            tokens = self.tokenizer(text, add_special_tokens=False).input_ids
            ids += tokens
            labels += tokens if trained else [IGNORED] * len(tokens)
        labels[:1] = [IGNORED] * len(labels[:1])
        return ids[: self.max_length], labels[: self.max_length]


def chat_segments(messages: Any, first: int, tokenizer: Renderer, index: int) -> Segments:
    """The rendered conversation, cut where each assistant turn from message `first` on begins and ends.

    tokenizer: or a processor, whose chat template is used as well. index: of the row, for errors.

    The cuts come from rendering the conversation up to there, so a template must render a beginning of a conversation
    as the beginning of the whole; one that rewrites earlier turns (some drop their reasoning) is refused rather than
    guessed.
    """
    if tokenizer.chat_template is None:
        raise UserError(
            "'messages' need a chat template, and this tokenizer has none; use an instruction-tuned model's"
        )
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise UserError(f"row {index + 1}: expected a list of messages with 'role' and 'content'")
    whole = _render(tokenizer, messages, index)
    _check_parts(messages, whole, index)
    segments: Segments = []
    at = 0
    for turn, message in enumerate(messages):
        if message["role"] != "assistant" or turn < first:
            continue
        before = _render(tokenizer, messages[:turn], index, add_generation_prompt=True)
        after = _render(tokenizer, messages[: turn + 1], index)
        if not (whole.startswith(before) and whole.startswith(after)):
            raise UserError(
                f"row {index + 1}: the chat template renders turn {turn + 1} differently once later turns follow, so "
                "its tokens cannot be told apart; give one assistant turn per row, the last"
            )
        segments += [(whole[at : len(before)], False), (whole[len(before) : len(after)], True)]
        at = len(after)
    return [*segments, (whole[at:], False)]


def _check_parts(messages: list[dict[str, Any]], whole: str, index: int) -> None:
    """Raises UserError where the template wrote a message's parts as Python does: Llama 3's trims what it is given."""
    for message in messages:
        parts = message.get("content")
        if parts and isinstance(parts, (list, dict)) and str(parts) in whole:
            raise UserError(
                f"row {index + 1}: the chat template knows no parts of a message and writes their brackets into the "
                f"text ({parts!s:.40} ...); give 'content' as a text"
            )


def _render(tokenizer: Renderer, messages: list[Any], index: int, **kwargs: bool) -> str:
    if not messages:
        return ""
    with library_reads(f"row {index + 1}: the chat template refuses these messages"):
        return tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)


@dataclass
class PadCollator:
    """Rows to tensors `(batch, longest)`: with `attention_mask`, or for packed rows with `position_ids` and none.

    in_one: packed rows to one sequence of them all, as flash attention wants them; nothing is padded.
    """

    pad_token_id: int
    in_one: bool = False

    def __call__(self, rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        if self.in_one and "position_ids" in rows[0]:
            rows = [one_after_another(rows, ("input_ids", "labels", "position_ids"))]
        longest = max(len(row["input_ids"]) for row in rows)
        batch = {
            "input_ids": _padded([row["input_ids"] for row in rows], longest, self.pad_token_id),
            "labels": _padded([row["labels"] for row in rows], longest, IGNORED),
        }
        if "position_ids" in rows[0]:  # padding counts up from 0 like one more row: it is attended to by itself alone
            tails = [[*row["position_ids"], *range(longest - len(row["position_ids"]))] for row in rows]
            return {**batch, "position_ids": torch.tensor(tails)}
        return {**batch, "attention_mask": _padded([[1] * len(row["input_ids"]) for row in rows], longest, 0)}


def one_after_another(rows: list[dict[str, Any]], names: Iterable[str]) -> dict[str, Any]:
    """The columns `names` of all rows as one row."""
    return {name: [value for row in rows for value in row[name]] for name in names}


def _padded(rows: list[list[int]], length: int, value: int) -> torch.Tensor:
    return torch.tensor([row + [value] * (length - len(row)) for row in rows])
