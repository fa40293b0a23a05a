"""Reads the settings of a live Trainer from its TrainingArguments."""

from __future__ import annotations

import dataclasses
from typing import Any

from ckpt_ft.errors import UserError

from .flags import fields_of
from .optimizers import OPTIMIZERS
from .settings import KEYS, KINDS, LEFT_OUT, REFUSED, entry_of
from .training_spec import TrainingSpec

_READ = ("batch_size", "accumulation", "max_grad_norm", "bf16", "fp16", "optimizer", "torch_compile")


def spec_of_arguments(args: Any, mixed_precision: str = "") -> TrainingSpec:
    """Returns the spec of transformers' `TrainingArguments`, mapped by the table of settings.

    A Trainer builds its own optimizer, so an optimizer that is not modelled keeps the default here. The policy is not
    read: the Trainer's `gradient_checkpointing` is another way to checkpoint.

    Args:
        args: `TrainingArguments`, or those of TRL.
        mixed_precision: that of `accelerate launch`, used if the arguments set none.
    """
    given: dict[str, Any] = {"mixed_precision": mixed_precision}
    for name, value in _settings(args).items():
        entry = entry_of(name, ("transformers",))
        if entry is not None and entry.text in _READ and (entry.text != "optimizer" or value in OPTIMIZERS):
            given[entry.text] = value
    if getattr(args, "torch_compile_backend", None) not in (None, "inductor"):
        given["torch_compile"] = False  # `check_live` refuses it; a plan that goes on is of the eager step
    if args.max_grad_norm is None:
        given["max_grad_norm"] = 0.0  # no clipping
    return TrainingSpec.of(**fields_of(given))


def check_live(args: Any) -> None:
    """Raises UserError for a setting of `TrainingArguments` with which a live Trainer's step is not predicted.

    The trace runs the trainer's own model, loss and optimizer, so most settings are in it by themselves.
    """
    sections = KINDS.get(kind_of(type(args).__name__), ("transformers",))
    for name, value in _settings(args).items():
        entry = entry_of(name, sections)
        if entry is None or (entry.kind != KEYS and entry.of(value).kind not in _NOT_LIVE):
            continue
        if entry.kind != KEYS:
            raise UserError(f"{name}: {value}: {entry.of(value).text}")
        content = getattr(value, "__dict__", value)
        for key, inner in content.items() if isinstance(content, dict) else ():
            part = entry_of(key, [entry.text])
            if part is not None and part.of(inner).kind in _NOT_LIVE:
                raise UserError(f"{name}.{key}: {inner}: {part.of(inner).text}")


_NOT_LIVE = (LEFT_OUT, REFUSED)


def kind_of(name: str) -> str:
    """The kind of training whose arguments a class of this name has."""
    return {"SFTConfig": "trl"}.get(name, name.removesuffix("Config").lower())


def _settings(args: Any) -> dict[str, Any]:
    """The fields of a dataclass of settings that are not None, with the values of enums."""
    found = {own.name: getattr(args, own.name, None) for own in dataclasses.fields(args)}
    return {name: getattr(value, "value", value) for name, value in found.items() if value is not None}
