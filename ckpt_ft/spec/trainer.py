"""Checks the settings of a live Trainer by its TrainingArguments."""

from __future__ import annotations

import dataclasses
from typing import Any

from ckpt_ft.errors import UserError

from .settings import KEYS, KINDS, LEFT_OUT, REFUSED, Entry, entry_of


def check_live(args: Any) -> None:
    """Raises UserError for a setting of `TrainingArguments` with which a live Trainer's step is not predicted.

    The trace runs the trainer's own model, loss and optimizer, so most settings are in it by themselves.
    """
    sections = KINDS.get(kind_of(type(args).__name__), ("transformers",))
    for name, value in _settings(args).items():
        entry = entry_of(name, sections)
        parts: dict[str, tuple[Entry | None, Any]] = {name: (entry, value)}
        if entry is not None and entry.kind == KEYS:
            keys = getattr(value, "__dict__", value)
            inner = keys if isinstance(keys, dict) else {}
            parts = {f"{name}.{key}": (entry_of(key, [entry.text]), given) for key, given in inner.items()}
        for path, (own, given) in parts.items():
            if own is not None and own.of(given).kind in (LEFT_OUT, REFUSED):
                raise UserError(f"{path}: {given}: {own.of(given).text}")


def kind_of(name: str) -> str:
    """The kind of training whose arguments a class of this name has."""
    return {"SFTConfig": "trl"}.get(name, name.removesuffix("Config").lower())


def _settings(args: Any) -> dict[str, Any]:
    """The fields of a dataclass of settings that are not None, with the values of enums."""
    found = {own.name: getattr(args, own.name, None) for own in dataclasses.fields(args)}
    return {name: getattr(value, "value", value) for name, value in found.items() if value is not None}
