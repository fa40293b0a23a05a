"""Preference data: a prompt with an answer that was chosen over another; and a run's flags beside TRL's own."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_ft.errors import UserError
from ckpt_ft.training.flags import AT_LEAST_ONE, NOT_NEGATIVE, SHARE, Range, check_numbers, flag
from ckpt_ft.training.run.arguments import RunArguments
from ckpt_ft.training.run.manifest import make_whole

from .answers import SHOWN
from .sample import docstring_pairs, make_sample

try:
    from trl import DPOConfig
except ImportError as error:
    raise UserError("preference training needs trl: pip install 'ckpt_ft[trl]'") from error

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

_NUMBERS = {
    "beta": NOT_NEGATIVE,
    "label_smoothing": SHARE,
    "max_length": Range(2),
    "ref_model_sync_steps": AT_LEAST_ONE,
}
_PAIRS = 2_000  # of the built-in sample


@dataclass
class DPOArguments(RunArguments, DPOConfig):
    """TRL's `DPOConfig`, every flag of TrainingArguments among its own, with what a run needs.

    TRL turns gradient checkpointing on by default; here `--ac_policy` says what is checkpointed. What the model's own
    flags say is left to them.
    """

    gradient_checkpointing: bool | None = flag(None, "The library's own checkpointing; use --ac_policy instead.")
    model_init_kwargs: Any = field(default=None, init=False)
    trust_remote_code: bool = field(default=False, init=False)
    pad_token: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        check_numbers(self, _NUMBERS)
        super().__post_init__()


def preference_prompts(rows: Dataset, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of the first rows' prompts, as the model is given them; of rows that have one apart."""
    if "prompt" not in rows.column_names:
        return []
    prompts = rows.select(range(min(SHOWN, len(rows))))["prompt"]
    texts = [
        prompt
        if isinstance(prompt, str)
        else tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        for prompt in prompts
    ]
    return [tokenizer(text, add_special_tokens=isinstance(prompts[0], str)).input_ids for text in texts]


def check_preferences(rows: Dataset, name: str) -> None:
    """Raises UserError where `rows` are no preferences: one line that names what is missing."""
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


def make_preferences() -> tuple[str, str]:
    """The built-in model's directory, and a jsonl file of preferences: an answer over its own words in disorder."""
    model, corpus = make_sample()
    sample = Path(corpus).parent
    made = make_whole(sample.with_name(f"{sample.name}-preferences"), _write)
    return model, str(made / "preferences.jsonl")


def _write(directory: Path) -> None:
    draw = random.Random(0)
    pairs = docstring_pairs()
    rows: list[dict[str, str]] = []
    draw.shuffle(pairs)
    while len(rows) < _PAIRS:
        pair = pairs.pop()
        words = pair["completion"].split()
        disorder = " ".join(draw.sample(words, len(words)))
        if disorder != " ".join(words):
            rows.append({"prompt": pair["prompt"], "chosen": pair["completion"], "rejected": disorder})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (directory / "preferences.jsonl").write_text(text, encoding="utf-8")
