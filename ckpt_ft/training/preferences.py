"""Preference data for DPO, a prompt with a chosen and a rejected answer, and the arguments of TRL's trainer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpt_ft.errors import UserError
from ckpt_ft.training.flags import AtLeastOne, Length, NotNegative, Share, check_flags, flag
from ckpt_ft.training.run_arguments import RunArguments
from ckpt_ft.training.text import check_columns

try:
    from trl import DPOConfig, GRPOConfig
except ImportError as error:
    raise UserError("DPO and GRPO need trl: pip install 'ckpt_ft[trl]'") from error

if TYPE_CHECKING:
    from datasets import Dataset

_NUMBERS = {"beta": NotNegative, "label_smoothing": Share, "max_length": Length, "ref_model_sync_steps": AtLeastOne}


@dataclass
class _TRLArguments(RunArguments):
    """The run's own flags, for a configuration of TRL, which has every flag of TrainingArguments.

    Where TRL's defaults differ from those of TrainingArguments, TRL's hold, but gradient checkpointing is off:
    `--ac_policy` says what is checkpointed. Fields that repeat the model's flags are removed.
    """

    learning_rate: float = flag(1e-6, "The initial learning rate.")
    logging_steps: float = flag(10, "Log every X updates steps.")
    gradient_checkpointing: bool | None = flag(None, "The library's own checkpointing; use --ac_policy instead.")
    model_init_kwargs: Any = field(default=None, init=False)
    trust_remote_code: bool = field(default=False, init=False)


@dataclass
class DPOArguments(_TRLArguments, DPOConfig):
    pad_token: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        check_flags(self, _NUMBERS)
        super().__post_init__()


@dataclass
class GRPOArguments(_TRLArguments, GRPOConfig):
    remove_unused_columns: bool = field(default=False, init=False)  # rewards read the other columns

    def __post_init__(self) -> None:
        check_flags(self, {"beta": NotNegative, "max_completion_length": AtLeastOne, "num_generations": Length})
        super().__post_init__()


def right_number(completions: Sequence[Any], answer: Sequence[Any], **kwargs: Any) -> list[float]:
    """A reward of TRL's: 1 for a completion whose last number is that of its row's 'answer', 0 for the others."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [float(_last_number(text) == _last_number(str(right))) for text, right in zip(texts, answer, strict=True)]


def _last_number(text: str) -> float | None:
    found = re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))
    return float(found[-1]) if found else None


def check_problems(rows: Dataset, name: str) -> None:
    """Raises UserError if a row has no prompt, or no number as its answer."""
    check_columns(rows, name, ("prompt", "answer"), ("prompt", "answer"), "problems are rows of 'prompt' and 'answer'")
    wordy = next((at for at, value in enumerate(rows["answer"], start=1) if _last_number(str(value)) is None), None)
    if wordy is not None:
        raise UserError(
            f"dataset {name}: row {wordy}: the answer '{str(rows['answer'][wordy - 1])[:40]}' has no number"
        )


def check_preferences(rows: Dataset, name: str) -> None:
    """Raises UserError if a column is missing or a value is empty; the error names it."""
    what = "'prompt', 'chosen' and 'rejected', texts or conversations"
    check_columns(
        rows, name, ("chosen", "rejected"), ("prompt", "chosen", "rejected"), f"preferences are rows of {what}"
    )
