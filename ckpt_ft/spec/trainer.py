"""Reads the settings of a live Trainer from its TrainingArguments."""

from __future__ import annotations

from typing import Any

from .ecosystem import TABLE, Modelled, value_of
from .flags import fields_of
from .training_spec import TrainingSpec


def spec_of_arguments(args: Any, mixed_precision: str = "") -> TrainingSpec:
    """Returns the spec of transformers' `TrainingArguments`, mapped by `ecosystem.TABLE`.

    A Trainer builds its own optimizer, so an optimizer that is not modelled keeps the default here. The policy is not
    read: the Trainer's `gradient_checkpointing` is another way to checkpoint.

    Args:
        args: `TrainingArguments`, or those of TRL.
        mixed_precision: that of `accelerate launch`, used if the arguments set none.
    """
    given: dict[str, Any] = {"mixed_precision": mixed_precision}
    for name, entry in TABLE["transformers"].items():
        value = getattr(args, name, None)
        value = getattr(value, "value", value)  # an enum's value
        value = 0.0 if name == "max_grad_norm" and value is None else value  # no clipping
        if isinstance(entry, Modelled) and str(value) not in entry.values:
            continue
        if value is None or not isinstance(entry, (str, Modelled)):
            continue
        flag, read = value_of(entry, value)
        if flag != "policy":
            given[flag] = read
    return TrainingSpec.of(**fields_of(given))
