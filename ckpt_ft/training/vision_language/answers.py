"""Held-out questions, answered by the model itself: how many of them word for word as the rows do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState

from ckpt_ft.errors import UserError
from ckpt_ft.training.text.encode import IGNORED

from .encode import PixelCollator

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def check_answers(count: int, evaluates: bool) -> None:
    """Raises UserError where there would be no held-out questions, or processes that hold a part of the model each."""
    if count and not evaluates:
        raise UserError(f"--answered {count}: no rows are held out; add --eval_strategy and --test_split_size, say")
    if count and PartialState().num_processes > 1:
        raise UserError(f"--answered {count} is of one process; leave it out, and ask the saved model")


@dataclass
class Questions:
    """The last answers of encoded rows, with what is before them: tokens and pixels."""

    rows: Dataset
    tokenizer: PreTrainedTokenizerBase
    collate: PixelCollator

    def right(self, model: PreTrainedModel) -> int:
        """How many of them `model` answers as its rows do, choosing the likeliest token each time."""
        training = model.training
        model.eval()
        try:
            return sum(self._answer(model, row) for row in self.rows)
        finally:
            model.train(training)

    @torch.no_grad()
    def _answer(self, model: PreTrainedModel, row: dict[str, Any]) -> bool:
        labels = row["labels"]
        ends = max(at for at, label in enumerate(labels) if label != IGNORED) + 1
        begins = ends - next(n for n, label in enumerate([*labels[:ends][::-1], IGNORED]) if label == IGNORED)
        asked = {name: value[:begins] if isinstance(value, list) else value for name, value in row.items()}
        batch = {name: value.to(model.device) for name, value in self.collate([asked]).items() if name != "labels"}
        made: Any = model.generate(
            **batch,
            max_new_tokens=ends - begins,
            do_sample=False,
            use_cache=True,
            pad_token_id=self.collate.pad_token_id,
        )
        return self._text(made[0, begins:].tolist()) == self._text(labels[begins:ends])

    def _text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True)).strip()
