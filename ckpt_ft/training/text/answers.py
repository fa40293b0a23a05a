"""A few answers of the model that was trained, to read beside its losses: greedy, to prompts of its data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from ckpt_ft.training.reporting import never_fatal
from ckpt_ft.training.run.card import Answer

from .encode import IGNORED

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase, Trainer

SHOWN = 3
_BEGINNING = 16  # tokens of a plain text that are given
_LONGEST = 512  # tokens of a prompt
_NEW = 32  # tokens


def prompts_of(rows: Dataset) -> list[list[int]]:
    """Token ids of the first rows' prompts: of what carries no loss; of a plain text its beginning."""
    found = []
    for row in rows.select(range(min(SHOWN, len(rows)))):
        borders = [at for at, place in enumerate(row.get("position_ids") or []) if at and place == 0]
        labels = row["labels"][: borders[0] if borders else None]
        given = next((at for at, label in enumerate(labels) if label != IGNORED), 0)
        found.append(row["input_ids"][: given if given > 1 else min(_BEGINNING, max(len(labels) // 2, 1))])
    return found


def answers(trainer: Trainer, tokenizer: PreTrainedTokenizerBase, prompts: Iterable[Sequence[int]]) -> list[Answer]:
    """What the model says to `prompts`, on the main process; none where it is shared out over several."""
    if not trainer.is_world_process_zero() or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return []
    model = trainer.accelerator.unwrap_model(trainer.model).eval()
    found: list[Answer] = []
    with never_fatal("a sample of answers"), torch.no_grad():
        for prompt in prompts:
            ids = torch.tensor([prompt[-_LONGEST:]], device=model.device)
            made = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=_NEW, do_sample=False, use_cache=True,
                pad_token_id=tokenizer.pad_token_id,
            )[0, ids.shape[1] :]  # fmt: skip
            found.append(Answer(tokenizer.decode(prompt), tokenizer.decode(made, skip_special_tokens=True)))
    return found
