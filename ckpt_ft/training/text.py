"""Text for a language model: loads rows, turns them into token sequences, and batches them.

The loss is computed on the whole of a `text`, on the `completion` after a `prompt`, and on the assistant's turns of
`messages`. A row is a list of segments `(text, trained)` that are tokenized one by one. A prompt is therefore
tokenized exactly as it is at inference, and no token is half prompt and half answer. A conversation whose template
marks the assistant's text with `{% generation %}` is tokenized in one piece, and the markers say what is trained.
Bad input raises UserError, one line that names the file, the row, the column or the flag.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from accelerate import ParallelismConfig
from datasets import Dataset, load_dataset
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from ckpt_ft.errors import UserError
from ckpt_ft.spec.defaults import SEQ_LENGTH
from ckpt_ft.training.flags import Count, Length, SplitArguments, flag, load_split, unreadable
from ckpt_ft.training.models import ModelArguments, load_tokenizer
from ckpt_ft.validation import library_reads
from ckpt_ft.workloads.adapters import without_adapters
from ckpt_ft.workloads.sample_sizes import Lengths, row_lengths
from ckpt_ft.workloads.transformers_models import in_one_sequence

logger = logging.getLogger(__name__)

IGNORED = -100  # the label of a token without loss
Segments = list[tuple[str, bool]]
Renderer: TypeAlias = "PreTrainedTokenizerBase | ProcessorMixin"
LOADERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
ROW_NUMBER = "__row__"  # column with the number that a row had before the dataset was split
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_ENCODING_VERSION = 3  # part of the cache key of `datasets`: raise it when rows are encoded differently
# Types of models whose packed rows do not see one another. transformers' attention, given neither a mask nor a KV
# cache, starts a new row where the positions restart (masking_utils.py, find_packed_sequence_indices); flash attention
# does so only in a batch of one sequence (modeling_flash_attention_utils.py, _is_packed_sequence).
PACKABLE = {
    "cohere2", "gemma", "gpt2", "granite", "llama", "mistral", "mixtral", "olmo2", "phi", "phi3", "qwen2", "qwen3",
    "qwen3_moe", "smollm3",
}  # fmt: skip
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


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
    """Returns the training rows of a Hub dataset, a file or a directory, and with `evaluate` the evaluation rows.

    Rows that are split with `--test_split_size` have a column `ROW_NUMBER`, which error messages use.
    """
    if args.dataset_name is None:
        raise UserError("--dataset_name is missing: give a Hub id or a local json, jsonl, csv, parquet or txt file")
    train = _load(args.dataset_name, args.dataset_train_split, args)
    if not evaluate:
        return train, None
    if args.test_split_size is None:
        return train, _load(args.dataset_name, args.dataset_test_split, args)
    return args.hold_out(train.add_column(ROW_NUMBER, list(range(1, len(train) + 1))), seed)


def row_number(row: dict[str, Any], index: int) -> int:
    """The number of `row` in its dataset, from 1, where `index` is its position after the split."""
    return int(row.get(ROW_NUMBER) or index + 1)


def _load(name: str, split: str, args: SplitArguments) -> Dataset:
    path = Path(name)
    if path.suffix in LOADERS:
        rows = _load_file(path, split)
    elif path.is_file():
        raise UserError(f"dataset {name}: cannot read '{path.suffix}' files ({', '.join(LOADERS)})")
    else:
        rows = load_split(name, args.dataset_config, split, "dataset")
    if len(rows) == 0:
        raise UserError(f"dataset {name}: split '{split}' is empty")
    return args.renamed(rows)


def _load_file(path: Path, split: str) -> Dataset:
    if split != "train":
        raise UserError(
            f"dataset {path}: a single file has no split '{split}'; hold rows out with --test_split_size 0.1"
        )
    if not path.is_file():
        raise UserError(f"dataset {path}: no such file")
    if path.stat().st_size == 0:
        raise UserError(f"dataset {path}: the file is empty")
    try:
        rows = load_dataset(LOADERS[path.suffix], data_files=str(path), split="train")
        rows.data.validate(full=True)  # texts that are not UTF-8, which are decoded only when they are read
        return rows
    except Exception as error:
        raise UserError(f"dataset {path}: {unreadable(error)}") from error


def check_columns(rows: Dataset, name: str, needed: Sequence[str], filled: Sequence[str], what: str) -> None:
    """Raises UserError if a `needed` column is missing, or a `filled` one has an empty value; says `what` rows are."""
    missing = [column for column in needed if column not in rows.column_names]
    if missing:
        raise UserError(f"dataset {name}: no column '{missing[0]}' among {', '.join(rows.column_names)}; {what}")
    for column in filled:
        if column in rows.column_names:
            check_filled(rows, f"dataset {name}", column)


def check_filled(rows: Dataset, source: str, column: str, called: str = "") -> None:
    """Raises UserError if a value of `column` is empty; the message begins with `source`.

    called: the user's name of the column, if it was renamed.
    """
    for number, value in enumerate(rows[column], start=1):
        if value in (None, "", []) or (isinstance(value, str) and not value.strip()):
            raise UserError(f"{source}: row {number} has no '{called or column}'; drop the row, or fill it in")


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


def encode_rows(rows: Dataset, tokenizer: PreTrainedTokenizerBase, args: DataArguments) -> Dataset:
    """Returns `rows` as `input_ids` and `labels` of at most `max_length` tokens; packed rows also have `position_ids`.

    Rows without a trained token are left out. A warning says how many rows are cut or left out.
    """
    rows = known_columns(rows, args.dataset_text_field)
    layout = row_layout(rows.column_names, args.dataset_text_field)
    encoded = rows.map(
        _Encoder(tokenizer, layout, args.dataset_text_field, args.max_length),
        with_indices=True, batched=True, remove_columns=rows.column_names, num_proc=args.dataset_num_proc,
        desc="Tokenizing",
    )  # fmt: skip
    if len(encoded) == 0:
        raise UserError(
            f"none of the {len(rows)} rows has a token to learn within --max_length {args.max_length}; raise it"
        )
    warn_of_cut_rows(sum(encoded["cut"]), len(rows) - len(encoded), len(rows), args.max_length)
    encoded = encoded.remove_columns("cut")
    if args.packing:
        encoded = encoded.map(
            pack, batched=True, batch_size=10_000, fn_kwargs={"max_length": args.max_length}, desc="Packing",
            remove_columns=encoded.column_names,
        )  # fmt: skip
    return encoded


def warn_of_cut_rows(cut: int, left_out: int, rows: int, max_length: int) -> None:
    """Warns, on the main process, of rows that do not fit into `max_length` tokens."""
    if (cut or left_out) and not (torch.distributed.is_initialized() and torch.distributed.get_rank()):
        logger.warning(
            "--max_length %d: of %d rows, %d are cut and %d are left out because they have no token to learn",
            max_length, rows, cut, left_out,
        )  # fmt: skip


def row_layout(columns: Sequence[str], text_field: str) -> str:
    """Returns the layout of rows with these columns: "messages", "completion" (with a prompt) or "text"."""
    if "messages" in columns:
        return "messages"
    if "prompt" in columns and "completion" in columns:
        return "completion"
    if text_field in columns:
        return "text"
    known = ", ".join(column for column in columns if column != ROW_NUMBER)
    raise UserError(
        f"the dataset has the columns {known}; expected 'messages', 'prompt' and 'completion', or '{text_field}' "
        "(--dataset_text_field); ShareGPT's 'conversations' and Alpaca's 'instruction' and 'output' do as well"
    )


def dataset_lengths(dataset: str, model: str, max_length: int) -> Lengths:
    """Returns the tokens of each row of a dataset, at most `max_length`, as recipes/llm.py encodes them for `model`.

    A dataset with a column `input_ids` needs no tokenizer.
    """
    args = DataArguments(dataset_name=dataset, max_length=max_length)
    rows, _ = load_rows(args, evaluate=False, seed=0)
    if {"images", "image"} & set(rows.column_names):
        raise UserError(
            f"--dataset {dataset}: its rows have images, and only text has lengths; `ckpt-ft dry-run --rows all` of "
            "the script that trains on them, such as recipes/vlm.py, looks at the largest ones"
        )
    if "input_ids" not in rows.column_names:
        source = str(Path(model).parent) if Path(model).is_file() else model  # a config file lies beside its tokenizer
        try:
            rows = encode_rows(rows, load_tokenizer(ModelArguments(model_name_or_path=source)), args)
        except UserError as error:
            raise UserError(f"--dataset {dataset}: its rows have no length: {error}; or give 'input_ids'") from error
    lengths = [min(length, max_length) for length in row_lengths(rows) if length]
    if not lengths:
        raise UserError(f"--dataset {dataset}: its 'input_ids' are empty; expected a list of tokens in each row")
    return Lengths.of(lengths)


@dataclass
class _Encoder:
    """Encodes batches of rows. Picklable, so that `datasets` can run it in other processes and cache its results."""

    tokenizer: PreTrainedTokenizerBase
    layout: str
    text_field: str
    max_length: int
    version: int = _ENCODING_VERSION

    def __call__(self, batch: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        encoded: dict[str, list[Any]] = {"input_ids": [], "labels": [], "cut": []}
        for position, index in enumerate(indices):
            row = {column: values[position] for column, values in batch.items()}
            ids, labels = self._encode(row, f"row {row_number(row, index)}")
            labels[:1] = [IGNORED] * len(labels[:1])  # no token predicts the first one
            if any(label != IGNORED for label in labels[: self.max_length]):
                encoded["input_ids"].append(ids[: self.max_length])
                encoded["labels"].append(labels[: self.max_length])
                encoded["cut"].append(int(len(ids) > self.max_length))
        return encoded

    def _encode(self, row: dict[str, Any], place: str) -> tuple[list[int], list[int]]:
        if self.layout == "messages":
            return self._encode_chat(row["messages"], 0, place)
        if self.layout == "completion" and isinstance(row["prompt"], list):
            if not isinstance(row["completion"], list):
                kind = type(row["completion"]).__name__
                raise UserError(f"{place}: 'completion' is {kind} after a 'prompt' of messages, expected a list")
            return self._encode_chat(row["prompt"] + row["completion"], len(row["prompt"]), place)
        columns = ("prompt", "completion") if self.layout == "completion" else (self.text_field,)
        for column in columns:
            if not isinstance(row[column], str):
                raise UserError(f"{place}: '{column}' is {type(row[column]).__name__}, expected a string")
        segments = [(row[column], column != "prompt") for column in columns]
        bos = self.tokenizer.bos_token_id
        begin = [bos] if bos is not None and bos in self.tokenizer("").input_ids else []
        return self._tokens([*segments, (self.tokenizer.eos_token or "", True)], begin)

    def _encode_chat(self, messages: Any, first: int, place: str) -> tuple[list[int], list[int]]:
        """Token ids and labels of a conversation whose assistant turns are trained from message `first` on."""
        if not _GENERATION.search(self.tokenizer.chat_template or ""):
            return self._tokens(chat_segments(messages, first, self.tokenizer, place), [])
        _check_messages(messages, place)
        with library_reads(f"{place}: the chat template refuses these messages"):
            made = self.tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        ids, trained = made["input_ids"], made["assistant_masks"]
        prompt = self.tokenizer(_render(self.tokenizer, messages[:first], place), add_special_tokens=False).input_ids
        trained = [0] * len(prompt) + trained[len(prompt) :]
        labels = [token if mask else IGNORED for token, mask in zip(ids, trained, strict=True)]
        return ids, labels

    def _tokens(self, segments: Segments, begin: list[int]) -> tuple[list[int], list[int]]:
        ids, labels = list(begin), [IGNORED] * len(begin)
        for text, trained in segments:
            tokens = self.tokenizer(text, add_special_tokens=False).input_ids
            ids += tokens
            labels += tokens if trained else [IGNORED] * len(tokens)
        return ids, labels


def chat_segments(messages: Any, first: int, renderer: Renderer, place: str) -> Segments:
    """Renders a conversation and cuts it where each assistant turn, from message `first` on, begins and ends.

    The borders are found by rendering the conversation up to each turn. A template must therefore render the beginning
    of a conversation as the beginning of the whole. A template that rewrites earlier turns (some drop their reasoning)
    is refused.

    Args:
        renderer: a tokenizer or a processor, whose chat template is used.
        place: the row's name in errors.
    """
    if renderer.chat_template is None:
        raise UserError(
            "'messages' need a chat template, and this tokenizer has none; use an instruction-tuned model's"
        )
    _check_messages(messages, place)
    whole = _render(renderer, messages, place)
    for message in messages:
        parts = message.get("content")
        if parts and isinstance(parts, (list, dict)) and str(parts) in whole:  # Llama 3's template trims what it gets
            raise UserError(
                f"{place}: the chat template knows no parts of a message and writes their brackets into the "
                f"text ({parts!s:.40} ...); give 'content' as a text"
            )
    segments: Segments = []
    at = 0
    for turn, message in enumerate(messages):
        if message["role"] != "assistant" or turn < first:
            continue
        before = _render(renderer, messages[:turn], place, add_generation_prompt=True)
        after = _render(renderer, messages[: turn + 1], place)
        if not (whole.startswith(before) and whole.startswith(after)):
            raise UserError(
                f"{place}: the chat template renders turn {turn + 1} differently once later turns follow, so "
                "its tokens cannot be told apart; give one assistant turn per row, the last"
            )
        segments += [(whole[at : len(before)], False), (whole[len(before) : len(after)], True)]
        at = len(after)
    return [*segments, (whole[at:], False)]


def _check_messages(messages: Any, place: str) -> None:
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise UserError(f"{place}: expected a list of messages with 'role' and 'content'")


def _render(renderer: Renderer, messages: list[Any], place: str, **kwargs: bool) -> str:
    if not messages:
        return ""
    with library_reads(f"{place}: the chat template refuses these messages"):
        return renderer.apply_chat_template(messages, tokenize=False, **kwargs)


def pack(batch: dict[str, list[Any]], max_length: int) -> dict[str, list[Any]]:
    """Joins rows into sequences of at most `max_length` tokens: longest row first, into the fullest sequence it fits.

    Columns of lists are joined and columns of numbers are summed. `position_ids` restart at 0 with every row. Without
    an attention mask and a KV cache, transformers' attention (eager, SDPA and flash) takes row borders from them.
    """
    packs: list[list[int]] = []
    rooms: list[tuple[int, int, int]] = []  # sorted: free tokens, which of equals is the newest, the sequence
    lengths = [len(ids) for ids in batch["input_ids"]]
    for age, row in enumerate(sorted(range(len(lengths)), key=lambda row: -lengths[row])):
        slot = bisect_left(rooms, (lengths[row],))
        if slot == len(rooms):
            packs.append([])
            rooms.append((max_length, -age, len(packs) - 1))
        room, _, target = rooms.pop(slot)
        packs[target].append(row)
        insort(rooms, (room - lengths[row], -age, target))
    joined: dict[str, list[Any]] = {
        key: [sum((values[row] for row in rows), [] if isinstance(values[0], list) else 0) for rows in packs]
        for key, values in batch.items()
    }
    return {**joined, "position_ids": [[t for row in rows for t in range(lengths[row])] for rows in packs]}


@dataclass
class PadCollator:
    """Pads rows on the right to tensors `(batch, longest)`, with an `attention_mask` or, if packed, `position_ids`.

    transformers' collators do not fit packed rows: `DataCollatorForSeq2Seq` pads no `position_ids`, and
    `DataCollatorWithFlattening` numbers the tokens of a packed sequence as those of one row.

    Attributes:
        in_one: join packed rows into one sequence without padding, as flash attention needs them.
        multiple: the length is a multiple of this, as ranks that share sequences need it.
        numbered: give `position_ids` instead of an `attention_mask`, as Ulysses needs it; padding follows each row, so
            causal attention does not see it.
    """

    pad_token_id: int
    in_one: bool = False
    multiple: int = 1
    numbered: bool = False

    def __call__(self, rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        packed = "position_ids" in rows[0]
        if self.in_one and packed:
            names = ("input_ids", "labels", "position_ids")
            joined: dict[str, list[int]] = {name: [] for name in names}
            for row in rows:
                for name, values in joined.items():
                    values += row[name]
            rows = [joined]
        longest = max(len(row["input_ids"]) for row in rows)
        longest += -longest % self.multiple
        batch = {
            "input_ids": _padded([row["input_ids"] for row in rows], longest, self.pad_token_id),
            "labels": _padded([row["labels"] for row in rows], longest, IGNORED),
        }
        if packed:  # padding counts up from 0 as one more row, which attends to itself alone
            positions = [[*row["position_ids"], *range(longest - len(row["position_ids"]))] for row in rows]
            return {**batch, "position_ids": torch.tensor(positions)}
        if self.numbered:
            return {**batch, "position_ids": torch.arange(longest).repeat(len(rows), 1)}
        return {**batch, "attention_mask": _padded([[1] * len(row["input_ids"]) for row in rows], longest, 0)}


def _padded(rows: list[list[int]], length: int, value: int) -> torch.Tensor:
    return torch.tensor([row + [value] * (length - len(row)) for row in rows])


def collator_of(
    model: Any, tokenizer: PreTrainedTokenizerBase, packing: bool, sharing: ParallelismConfig, max_length: int
) -> PadCollator:
    """Returns the collator of encoded rows for `model`, after checking that it keeps packed rows apart.

    sharing: how ranks share sequences: a ring takes pieces from both ends of them, and Ulysses gathers the batches of
        all ranks, so each is padded to `max_length`.
    """
    if packing:
        check_rows_apart(model)
    if packing and sharing.sp_size > 1 and not in_one_sequence(model):
        raise UserError(
            "--packing under Ulysses, which drops masks: rows would see one another; add --packing false, or "
            "--attn_implementation flash_attention_2"
        )
    ranks, numbered = sharing.cp_size * sharing.sp_size, sharing.sp_size > 1
    multiple = 2 * ranks if ranks > 1 else 1
    multiple = -(-max_length // multiple) * multiple if numbered else multiple
    return PadCollator(tokenizer.pad_token_id, in_one_sequence(model), multiple, numbered)


def check_rows_apart(model: Any) -> None:
    """Raises UserError unless a test has shown that packed rows of this type of model do not see one another."""
    kind = without_adapters(model).config.model_type
    if kind not in PACKABLE:
        raise UserError(
            f"--packing: it is not known whether packed rows of a {kind} see one another; leave --packing out "
            f"({', '.join(sorted(PACKABLE))} keep them apart)"
        )
