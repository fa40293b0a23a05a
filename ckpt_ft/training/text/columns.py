"""Rows as people have them, as rows that are known: ShareGPT's conversations, Alpaca's instructions."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ckpt_ft.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def known_columns(rows: Dataset, text_field: str) -> Dataset:
    """`rows`, or what they are in known columns, which is logged.

    'conversations' are 'messages'; 'instruction' and 'output' are 'prompt' and 'completion' in Alpaca's own words.

    Raises:
        UserError: a conversation is none (with its row).
    """
    columns = set(rows.column_names)
    if "messages" in columns or {"prompt", "completion"} <= columns or text_field in columns:
        return rows
    if "conversations" in columns:
        logger.warning("the dataset's 'conversations' (ShareGPT) are read as 'messages'")
        return rows.map(_messages, with_indices=True, remove_columns=rows.column_names)
    if {"instruction", "output"} <= columns:
        logger.warning("the dataset's 'instruction', 'input' and 'output' (Alpaca) are read as prompt and completion")
        return rows.map(_prompt, remove_columns=rows.column_names)
    return rows


def _messages(row: dict[str, Any], index: int) -> dict[str, Any]:
    turns = row["conversations"]
    try:
        found = [{"role": _ROLES[turn["from"]], "content": turn["value"]} for turn in turns]
    except (KeyError, TypeError) as error:
        raise UserError(
            f"row {index + 1}: 'conversations' is a list of turns with 'from' ({', '.join(_ROLES)}) and 'value'"
        ) from error
    return {"messages": found}


def _prompt(row: dict[str, Any]) -> dict[str, str]:
    given = f"### Input:\n{row['input']}\n\n" if row.get("input") else ""
    return {
        "prompt": f"### Instruction:\n{row['instruction']}\n\n{given}### Response:\n",
        "completion": row["output"],
    }
