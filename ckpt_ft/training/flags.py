"""Dataclasses of flags, as `HfArgumentParser` reads them: a field with its help, and what recipes have in common."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from ckpt_ft.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

Arguments = TypeVar("Arguments")


def flag(default: Any, help: str, **more: Any) -> Any:
    """A field of such a dataclass; `more` is argparse's, such as `choices`."""
    return field(default=default, metadata={"help": help, **more})


def changed(args: Arguments, **values: Any) -> Arguments:
    """`args` with other `values`; they stay as they are. Not `dataclasses.replace`: TrainingArguments set up devices
    when they are made."""
    other = copy.copy(args)
    vars(other).update(values)
    return other


@dataclass
class SplitArguments:
    """Which rows of a dataset are trained on, and which are kept to evaluate on; the names are TRL's.

    Raises:
        UserError: a share that cannot be held out.
    """

    dataset_name: str | None = flag(None, "Hub id or local path.")
    dataset_config: str | None = flag(None, "Configuration of a Hub dataset.")
    dataset_train_split: str = flag("train", "Split to train on.")
    dataset_test_split: str = flag("test", "Split to evaluate on, with --eval_strategy.")
    test_split_size: float | None = flag(
        None, "Evaluate on this share of the training split instead of a split of its own."
    )

    def __post_init__(self) -> None:
        if self.test_split_size is not None and not 0 < self.test_split_size < 1:
            raise UserError(f"--test_split_size {self.test_split_size}: give the share to hold out, between 0 and 1")

    def hold_out(self, rows: Dataset, seed: int) -> tuple[Dataset, Dataset]:
        """`rows` to train on, and `test_split_size` of them to evaluate on.

        Raises:
            UserError: there is one row.
        """
        if len(rows) < 2:
            raise UserError(
                f"--test_split_size {self.test_split_size}: {self.dataset_name} has one row, nothing can be held out"
            )
        split = rows.train_test_split(test_size=self.test_split_size, seed=seed)
        return split["train"], split["test"]
