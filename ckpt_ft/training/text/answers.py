"""Greedy answers of the trained model: samples for the model card, and held-out questions about images."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState

from ckpt_ft.errors import UserError
from ckpt_ft.training.run.card import Answer
from ckpt_ft.training.session import never_fatal

from .encode import IGNORED

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

SHOWN = 3  # prompts in a model card
_TEXT_PROMPT = 16  # tokens of a plain text that serve as its prompt
_MAX_PROMPT = 512
_MAX_NEW_TOKENS = 32


def prompts_of(rows: Dataset) -> list[list[int]]:
    """Returns the token ids before the first trained token of the first rows; for plain text, its beginning."""
    found = []
    for row in rows.select(range(min(SHOWN, len(rows)))):
        borders = [at for at, position in enumerate(row.get("position_ids") or []) if at and position == 0]
        labels = row["labels"][: borders[0] if borders else None]
        prompt = next((at for at, label in enumerate(labels) if label != IGNORED), 0)
        found.append(row["input_ids"][: prompt if prompt > 1 else min(_TEXT_PROMPT, max(len(labels) // 2, 1))])
    return found


def answers(trainer: Trainer, tokenizer: PreTrainedTokenizerBase, prompts: Iterable[Sequence[int]]) -> list[Answer]:
    """Returns the model's answers to `prompts`, on the main process; none if the model is sharded."""
    if not trainer.is_world_process_zero() or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return []
    model = trainer.accelerator.unwrap_model(trainer.model).eval()
    found: list[Answer] = []
    with never_fatal("a sample of answers"), torch.no_grad():
        for prompt in prompts:
            ids = torch.tensor([prompt[-_MAX_PROMPT:]], device=model.device)
            generated = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=_MAX_NEW_TOKENS, do_sample=False,
                use_cache=True, pad_token_id=tokenizer.pad_token_id,
            )[0, ids.shape[1] :]  # fmt: skip
            found.append(Answer(tokenizer.decode(prompt), tokenizer.decode(generated, skip_special_tokens=True)))
    return found


def check_answers(count: int, evaluates: bool) -> None:
    """Raises UserError if `--answered` has no held-out rows, or several processes."""
    if count and not evaluates:
        raise UserError(f"--answered {count}: no rows are held out; add --eval_strategy and --test_split_size, say")
    if count and PartialState().num_processes > 1:
        raise UserError(f"--answered {count} is of one process; leave it out, and ask the saved model")


@dataclass
class Questions:
    """The last answer of each encoded row, to be generated from the tokens and images before it."""

    rows: Dataset
    tokenizer: PreTrainedTokenizerBase
    collate: Callable[[list[Any]], dict[str, Any]]

    def right(self, model: PreTrainedModel) -> int:
        """Returns how many answers `model` generates word for word, greedily."""
        training = model.training
        model.eval()
        try:
            return sum(self._answer(model, row) for row in self.rows)
        finally:
            model.train(training)

    @torch.no_grad()
    def _answer(self, model: PreTrainedModel, row: dict[str, Any]) -> bool:
        labels = row["labels"]
        end = max(at for at, label in enumerate(labels) if label != IGNORED) + 1
        begin = end - next(n for n, label in enumerate([*labels[:end][::-1], IGNORED]) if label == IGNORED)
        prompt = {name: value[:begin] if isinstance(value, list) else value for name, value in row.items()}
        batch = {name: value.to(model.device) for name, value in self.collate([prompt]).items() if name != "labels"}
        generated: Any = model.generate(
            **batch, max_new_tokens=end - begin, do_sample=False, use_cache=True,
            pad_token_id=self.tokenizer.pad_token_id,
        )  # fmt: skip
        return self._text(generated[0, begin:].tolist()) == self._text(labels[begin:end])

    def _text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True)).strip()
