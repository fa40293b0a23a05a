"""Flag dataclasses for `HfArgumentParser`: fields with a help text and a range, and the flags that recipes share."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Interval

from ckpt_ft.errors import UserError, did_you_mean, one_line
from ckpt_ft.spec.optimizers import OFFLOADING, check_offloading
from ckpt_ft.validation import require_package

if TYPE_CHECKING:
    from datasets import Dataset

Arguments = TypeVar("Arguments")


OFFLOADED = (
    "Keep AdamW's states and a copy of the weights in host memory, where the step is computed (torchao's "
    "CPUOffloadOptimizer): states, or gradients, too."
)
# Types of flags, whose ranges `check_flags` checks.
AtLeastOne = Annotated[int, Ge(1)]
Count = Annotated[int, Ge(0)]
Rank = Annotated[int, Interval(ge=1, le=2**16)]  # no model's layer is wider
Pixels = Annotated[int, Interval(ge=8, le=2**14)]  # side of an image
Length = Annotated[int, Ge(2)]  # tokens of a sequence: the first one is not predicted
Seed = Annotated[int, Interval(ge=0, lt=2**32)]  # as numpy requires
NotNegative = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
Share = Annotated[float, Interval(ge=0, lt=1)]
OVERWRITE = "Delete the checkpoints and the result of an earlier run in output_dir."  # of --overwrite_output_dir


def flag(default: Any, help: str, **more: Any) -> Any:
    """A field of a flag dataclass; `more` goes to argparse, for example `choices`."""
    return field(default=default, metadata={"help": help, **more})


Needs = Mapping[str, tuple[str, ...]]  # by the name of a flag, those that mean nothing without it


def check_flags(args: Any, types: Mapping[str, Any] | None = None) -> None:
    """Checks the numbers of a flag dataclass, and its `_needs` (see `Needs`); None means that a flag was not given.

    types: those of fields that a library declares without a range.

    Raises:
        UserError: a number is out of range, infinite or NaN, or a flag lacks the one that it needs.
    """
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    own: type = type(args)
    for name, kind in {**_ranged(own), **(types or {})}.items():
        value = getattr(args, name)
        try:
            TypeAdapter(kind | None, config=ConfigDict(allow_inf_nan=False)).validate_python(value)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]["msg"].replace("Input should", "it should")
            raise UserError(f"--{name} {value}: {problem}") from error
    defaults = {of.name: of.default for of in fields(args)}
    for needed, names in getattr(args, "_needs", {}).items():
        for name in names:
            if getattr(args, name) != defaults[name] and getattr(args, needed) in (None, False):
                raise UserError(f"--{name} belongs to --{needed}: add --{needed}, or drop --{name}")


@cache
def _ranged(kind: type) -> dict[str, Any]:
    """Returns the types of a dataclass's fields that have a range, also of those that may be None."""
    hints = get_type_hints(kind, include_extras=True).items()
    return {
        name: hint for name, hint in hints if any(get_origin(part) is Annotated for part in (hint, *get_args(hint)))
    }


def changed(args: Arguments, **values: Any) -> Arguments:
    """Returns a copy of `args` with other `values`; `replace` would set up the devices of TrainingArguments again."""
    other = copy.copy(args)
    vars(other).update(values)
    return other


def check_offloaded(what: str | None, other: str, norm: float, fp16: bool, accumulation: int) -> None:
    """Raises UserError if `--offload_optimizer` contradicts other flags (see `check_offloading`) or lacks torchao."""
    if what is None:
        return
    said = f"--offload_optimizer {what}"
    if what not in OFFLOADING:
        raise UserError(f"{said}: choose states, or gradients to offload both")
    require_package("torchao", said)
    check_offloading(what, norm, fp16, accumulation, int(os.environ.get("WORLD_SIZE", 1)) > 1, other)


def check_trackers(names: Iterable[str], here: Sequence[str]) -> None:
    """Raises UserError if `--report_to` names a tracker that is not in `here`."""
    for name in names:
        if name not in here:
            raise UserError(f"--report_to {name}: not installed; installed trackers: {', '.join(here) or 'none'}")


def load_split(name: str, config: str | None, split: str, source: str = "--dataset_name") -> Dataset:
    """Loads a split of a Hub dataset, or of a local directory of data files; `source` comes before its name in errors.

    Raises:
        UserError: it cannot be read, or it is empty.
    """
    from datasets import load_dataset

    try:
        rows = load_dataset(name, config, split=split)
    except Exception as error:  # the readers of the many formats raise errors of every class
        where = " (neither a local path nor a dataset of the Hub that can be read from here)"
        raise UserError(f"{source} {name}{'' if Path(name).is_dir() else where}: {unreadable(error)}") from error
    if len(rows) == 0:
        raise UserError(f"{source} {name}: split '{split}' is empty")
    return rows


def unreadable(error: Exception) -> str:
    """Returns why `datasets` cannot read something, in one line."""
    text = one_line(error.__cause__ or error)
    return "it has no rows" if "corresponds to no data" in text else text


@dataclass
class SplitArguments:
    """The dataset splits for training and evaluation, with TRL's names."""

    _argument_group_name = "data"
    dataset_name: str | None = flag(None, "Hub id or local path.")
    dataset_config: str | None = flag(None, "Configuration of a Hub dataset.")
    dataset_train_split: str = flag("train", "Split to train on.")
    dataset_test_split: str = flag("test", "Split to evaluate on, with --eval_strategy.")
    test_split_size: Annotated[float, Interval(gt=0, lt=1)] | None = flag(
        None, "Evaluate on this share of the training split instead of a split of its own."
    )
    columns: str = flag("", "Columns under other names, as in prompt=question,completion=answer.")

    def __post_init__(self) -> None:
        check_flags(self)

    def renamed(self, rows: Dataset) -> Dataset:
        """`rows` with the columns that `--columns` names under our names; a column that has such a name gives way.

        Raises:
            UserError: malformed, a column named twice, or one that is not there.
        """
        pairs = [[name.strip() for name in pair.split("=")] for pair in self.columns.split(",") if pair.strip()]
        if not all(len(pair) == 2 and all(pair) for pair in pairs):
            raise UserError(f"--columns {self.columns}: write ours=theirs, as in prompt=question,completion=answer")
        names = {theirs: ours for ours, theirs in pairs}
        if len(names) < len(pairs) or len(set(names.values())) < len(pairs):
            raise UserError(f"--columns {self.columns}: a column is named twice")
        for theirs in names:
            if theirs not in rows.column_names:
                suggestion, there = did_you_mean(theirs, rows.column_names), ", ".join(rows.column_names)
                raise UserError(f"--columns {self.columns}: no column '{theirs}'{suggestion}; there are {there}")
        hidden = [ours for ours in names.values() if ours in rows.column_names and ours not in names]
        return rows.remove_columns(hidden).rename_columns({a: b for a, b in names.items() if a != b})

    def hold_out(self, rows: Dataset, seed: int) -> tuple[Dataset, Dataset]:
        """Split `rows` for training and, by `test_split_size`, for evaluation.

        Raises:
            UserError: no row is left for training.
        """
        if math.ceil(len(rows) * (self.test_split_size or 0)) == len(rows):
            raise UserError(
                f"--test_split_size {self.test_split_size}: of the {len(rows)} rows of {self.dataset_name} none is "
                "left to train on; hold out less"
            )
        split = rows.train_test_split(test_size=self.test_split_size, seed=seed)
        return split["train"], split["test"]
