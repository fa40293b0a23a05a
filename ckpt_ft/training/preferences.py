"""Preference data for DPO, a prompt with a chosen and a rejected answer, and the arguments of TRL's trainer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpt_ft.errors import UserError
from ckpt_ft.training.flags import AT_LEAST_ONE, NOT_NEGATIVE, SHARE, Range, check_flags, flag
from ckpt_ft.training.run_arguments import RunArguments

try:
    from trl import DPOConfig
except ImportError as error:
    raise UserError("preference training needs trl: pip install 'ckpt_ft[trl]'") from error

if TYPE_CHECKING:
    from datasets import Dataset

_NUMBERS = {
    "beta": NOT_NEGATIVE,
    "label_smoothing": SHARE,
    "max_length": Range(2),
    "ref_model_sync_steps": AT_LEAST_ONE,
}


@dataclass
class DPOArguments(RunArguments, DPOConfig):
    """TRL's `DPOConfig`, which has every flag of TrainingArguments, and the run's own flags.

    Gradient checkpointing is off, unlike in TRL: `--ac_policy` says what is checkpointed. Fields that repeat the
    model's flags are removed.
    """

    gradient_checkpointing: bool | None = flag(None, "The library's own checkpointing; use --ac_policy instead.")
    model_init_kwargs: Any = field(default=None, init=False)
    trust_remote_code: bool = field(default=False, init=False)
    pad_token: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        check_flags(self, _NUMBERS)
        super().__post_init__()


def check_preferences(rows: Dataset, name: str) -> None:
    """Raises UserError if a column is missing or a value is empty; the error names it."""
    missing = [column for column in ("chosen", "rejected") if column not in rows.column_names]
    if missing:
        raise UserError(
            f"dataset {name}: no column '{missing[0]}' among {', '.join(rows.column_names)}; preferences are rows of "
            "'prompt', 'chosen' and 'rejected', texts or conversations"
        )
    for column in ("prompt", "chosen", "rejected"):
        if column in rows.column_names:
            empty = next((at for at, value in enumerate(rows[column], start=1) if not value), None)
            if empty is not None:
                raise UserError(f"dataset {name}: row {empty} has no '{column}'; drop the row, or fill it in")
