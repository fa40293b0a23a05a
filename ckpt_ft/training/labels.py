"""Labels of rows: the names of their classes, their positions among these, and how many predictions are right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
from datasets import Dataset, List, Value
from transformers import EvalPrediction

from ckpt_ft.errors import UserError
from ckpt_ft.training.text import IGNORED


def class_names(rows: Dataset, source: str) -> list[str]:
    """Returns the classes in label order: the dataset's own names, or the sorted values of its label column.

    A row has one label, or a list with a label for each of its words.
    """
    if (own := _own_names(rows)) is not None:
        return own
    labels = [label if isinstance(label, list) else [label] for label in rows["label"]]
    values = set(chain.from_iterable(labels))
    if None in values:
        missing = next(at for at, label in enumerate(labels, start=1) if None in label)
        raise UserError(f"{source}: row {missing} has no label")
    if not all(isinstance(value, (int, str)) for value in values):
        raise UserError(f"{source}: labels are whole numbers or names, not {type(next(iter(values))).__name__}")
    return [str(value) for value in sorted(values)]


def _own_names(rows: Dataset) -> list[str] | None:
    feature = rows.features["label"]
    return getattr(getattr(feature, "feature", feature), "names", None)


def labelled(rows: Dataset, names: list[str], source: str) -> Dataset:
    own = _own_names(rows)
    place = {name: index for index, name in enumerate(names)}

    def position(row: int, value: Any) -> int:
        name = own[value] if own and value is not None and 0 <= value < len(own) else None if own else str(value)
        if name not in place:
            given = f"label {value}" if name is None or name == str(value) else f"class '{name}'"
            raise UserError(
                f"{source}: row {row} has {given}, but there are {len(names)} classes to train on ({_few(names)})"
            )
        return place[name]

    labels: list[Any] = [
        [position(row, value) for value in label] if isinstance(label, list) else position(row, label)
        for row, label in enumerate(rows["label"], start=1)
    ]
    kind = List(Value("int64")) if isinstance(labels[0], list) else Value("int64")
    return rows.remove_columns("label").add_column("label", labels, feature=kind)


def check_classes(labels: Iterable[int], names: list[str], source: str) -> None:
    """Requires two classes, and prints those without a row: the model never learns their outputs."""
    counts = Counter(labels)
    if len(counts) < 2:
        only = names[next(iter(counts))]
        raise UserError(f"{source}: every training row is of class '{only}'; a classifier needs at least 2 classes")
    missing = [name for index, name in enumerate(names) if index not in counts]
    if missing:
        print(f"{source}: {len(missing)} of {len(names)} classes have no training row: {_few(missing)}", flush=True)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def settings_of(names: Sequence[str]) -> dict[str, Any]:
    """Returns the arguments of `from_pretrained` for a head with an output for each class."""
    return {
        "num_labels": len(names),
        "id2label": dict(enumerate(names)),
        "label2id": {n: i for i, n in enumerate(names)},
    }


def most_likely_class(logits: Any, labels: Any) -> Any:
    """Trainer's `preprocess_logits_for_metrics`: keeps one class instead of all scores."""
    return logits.argmax(dim=-1)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Trainer's `compute_metrics`: the share of right labels, over all of them and averaged over the classes."""
    chosen, labels = np.asarray(prediction.predictions), np.asarray(prediction.label_ids)
    chosen, labels = chosen[labels != IGNORED], labels[labels != IGNORED]
    right = chosen == labels
    each = [float(right[labels == label].mean()) for label in np.unique(labels)]
    return {"accuracy": float(right.mean()), "balanced_accuracy": float(np.mean(each))}
