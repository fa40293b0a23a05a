"""Tasks of text encoders: classes of texts, classes of words, embeddings of pairs, and the relevance of a passage.

Rows come from the same places as a language model's, under one name for each column; `--columns` renames others.
Pairs are learned with sentence-transformers' in-batch loss: each text is told apart from those of the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import transformers
from datasets import Dataset
from transformers import (
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
)

from ckpt_ft.errors import UserError
from ckpt_ft.spec.defaults import SEQ_LENGTH
from ckpt_ft.training.flags import Count, Length, SplitArguments, flag
from ckpt_ft.training.labels import accuracy, check_classes, class_names, labelled, most_likely_class, settings_of
from ckpt_ft.training.models import ModelArguments, load_pretrained, with_adapters
from ckpt_ft.training.text import IGNORED, check_columns, load_rows
from ckpt_ft.validation import library_reads
from ckpt_ft.workloads.adapters import head_settings
from ckpt_ft.workloads.model_config import read_config
from ckpt_ft.workloads.transformers_models import POSITIVES, POSITIVES_MASK, class_and_task, in_batch_loss

_VERSION = 1  # part of the cache key of `datasets`: raise it when rows are encoded differently
# Columns of the rows of each task, and the auto class of its model.
TASKS = {
    "text-classification": (("text", "label"), "AutoModelForSequenceClassification"),
    "token-classification": (("tokens", "label"), "AutoModelForTokenClassification"),
    "embedding": (("anchor", "positive"), "AutoModel"),
    "reranker": (("query", "passage", "label"), "AutoModelForSequenceClassification"),
}


@dataclass
class TextTaskArguments(SplitArguments):
    """What to train on, and how its rows become sequences."""

    task: str | None = flag(
        None, "What to train; by default what the checkpoint's architecture says.", choices=[*TASKS]
    )
    dataset_name: str | None = flag(
        None,
        "Hub id, or a local directory or file (json, jsonl, csv, parquet), of 'text' (and 'text_pair') and 'label'; "
        "'tokens' and 'label', one for each word; 'anchor' and 'positive'; or 'query', 'passage' and 'label', 0 to 1.",
    )
    dataset_num_proc: Count | None = flag(None, "Number of processes that tokenize.")
    max_length: Length = flag(SEQ_LENGTH, "Tokens per sequence; longer texts are cut.")


def task_of(model_args: ModelArguments, args: TextTaskArguments) -> str:
    """Returns the task of the flags, or else that of the checkpoint's architecture.

    Raises:
        UserError: the architecture is trained on something else, such as masked words.
    """
    if args.task is not None or model_args.model_name_or_path is None:
        return args.task or "text-classification"
    name = model_args.model_name_or_path
    _, task = class_and_task(name, read_config(name))
    if task.name not in TASKS:
        raise UserError(
            f"model {name} is trained on {task.name}, by its architectures; give --task {' or '.join(TASKS)}"
        )
    return task.name


def load_labelled_texts(
    args: TextTaskArguments, task: str, *, evaluate: bool, seed: int
) -> tuple[Dataset, Dataset | None, list[str]]:
    """Returns the training rows, the evaluation rows, and the names of the classes; labels are positions among them.

    Raises:
        UserError: a column is missing or a value empty, or there are not two classes.
    """
    source, columns = f"dataset {args.dataset_name}", TASKS[task][0]
    train, test = load_rows(args, evaluate=evaluate, seed=seed)
    splits = [train] if test is None else [train, test]
    rows_are = f"{task} has rows of {', '.join(map(repr, columns))}; --columns {columns[0]}=NAME names another"
    for rows in splits:
        check_columns(rows, str(args.dataset_name), columns, columns, rows_are)
    names: list[str] = []
    if task.endswith("classification"):
        names = class_names(train, source)
        splits = [labelled(rows, names, source) for rows in splits]
        labels = splits[0]["label"]
        check_classes(chain.from_iterable(labels) if task == "token-classification" else labels, names, source)
    for rows in splits if task == "token-classification" else ():
        for row, (words, label) in enumerate(zip(rows["tokens"], rows["label"], strict=True), start=1):
            if len(words) != len(label):
                raise UserError(f"{source}: row {row} has {len(words)} tokens and {len(label)} labels")
    return splits[0], splits[1] if len(splits) > 1 else None, names


def encode_texts(rows: Dataset, tokenizer: PreTrainedTokenizerBase, task: str, args: TextTaskArguments) -> Dataset:
    """Returns `rows` as `input_ids` and the tokenizer's other inputs, `labels`, or `positives` of pairs."""
    return rows.map(
        _encode, batched=True, remove_columns=rows.column_names, num_proc=args.dataset_num_proc, desc="Tokenizing",
        fn_kwargs={"tokenizer": tokenizer, "task": task, "max_length": args.max_length, "version": _VERSION},
    )  # fmt: skip


def _encode(
    batch: dict[str, list[Any]], tokenizer: PreTrainedTokenizerBase, task: str, max_length: int, version: int
) -> dict[str, list[Any]]:
    columns = [name for name in TASKS[task][0] if name not in ("label", "positive")]
    columns += ["text_pair"] if task == "text-classification" and "text_pair" in batch else []
    cut: dict[str, Any] = {"truncation": True, "max_length": max_length}
    with library_reads("a text cannot be tokenized"):
        made = tokenizer(*(batch[name] for name in columns), is_split_into_words=task == "token-classification", **cut)
        encoded: dict[str, list[Any]] = dict(made)
        if task == "embedding":
            return {**encoded, POSITIVES: tokenizer(batch["positive"], **cut).input_ids}
        if task == "reranker":
            return {**encoded, "labels": [[float(label)] for label in batch["label"]]}
        if task == "text-classification":
            return {**encoded, "labels": batch["label"]}
        return {
            **encoded,
            "labels": [_on_first_pieces(made.word_ids(row), labels) for row, labels in enumerate(batch["label"])],
        }


def _on_first_pieces(words: Sequence[int | None], labels: Sequence[int]) -> list[int]:
    """Returns the label of each word at its first piece; the other pieces have no loss."""
    return [
        IGNORED if word is None or word == before else labels[word]
        for before, word in zip([None, *words], words, strict=False)
    ]


def load_text_model(
    args: ModelArguments, task: str, names: list[str], tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    """Returns the model with the task's head; a pretrained head of another size is replaced, which is logged.

    With adapters the backbone is frozen, and the head is trained and saved whole.
    """
    head: dict[str, Any] = {**settings_of(names), "problem_type": "single_label_classification"} if names else {}
    if task == "reranker":  # one score with a binary cross entropy, as in sentence-transformers' CrossEncoder
        head = {"num_labels": 1, "problem_type": "multi_label_classification"}
    auto = getattr(transformers, TASKS[task][1])
    model: Any = load_pretrained(args, auto, ignore_mismatched_sizes=True, **head)
    text = model.config.get_text_config()
    if getattr(text, "pad_token_id", None) is None:
        text.pad_token_id = tokenizer.pad_token_id  # a decoder looks for the last token before the padding
    return with_adapters(model, args, **head_settings(model, task)) if args.adapts else model


class PairTrainer(Trainer):
    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss = in_batch_loss(model, inputs)
        return (loss, {}) if return_outputs else loss


def pad_pairs(rows: Sequence[dict[str, list[int]]], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Batches pairs to `input_ids` and `positives` (rows, longest), each with its mask."""
    texts = [row["input_ids"] for row in rows] + [row[POSITIVES] for row in rows]
    both = tokenizer.pad({"input_ids": texts}, return_tensors="pt")
    (ids, positives), (mask, other) = both["input_ids"].split(len(rows)), both["attention_mask"].split(len(rows))
    return {"input_ids": ids, "attention_mask": mask, POSITIVES: positives, POSITIVES_MASK: other}


def collator_of(task: str, tokenizer: Any) -> Callable[..., Any]:
    if task == "embedding":
        return partial(pad_pairs, tokenizer=tokenizer)
    kind = DataCollatorForTokenClassification if task == "token-classification" else DataCollatorWithPadding
    return kind(tokenizer)


def metrics_of(task: str) -> dict[str, Any]:
    """Returns the Trainer's arguments that measure accuracy; none for embeddings, whose evaluation has a loss."""
    if task == "embedding":
        return {}
    if task == "reranker":
        return {"preprocess_logits_for_metrics": lambda logits, labels: logits > 0, "compute_metrics": _agreement}
    return {"preprocess_logits_for_metrics": most_likely_class, "compute_metrics": accuracy}


def _agreement(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions == (prediction.label_ids > 0.5)).mean())}
