"""RunArguments: transformers.TrainingArguments with what a run of its own needs, checked when it is made."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from transformers import TrainingArguments

from ckpt_ft.errors import UserError

_AT_LEAST_ONE = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")
_NOT_NEGATIVE = ("learning_rate", "weight_decay", "max_grad_norm", "num_train_epochs", "warmup_steps")


@dataclass
class RunArguments(TrainingArguments):
    """TrainingArguments, and whether an earlier run in the output directory is replaced.

    `hub_token` goes to the environment, where huggingface_hub looks for it: a Trainer pickles its arguments into every
    directory that it saves, and uploads them.

    Raises:
        UserError: a number that nothing can be trained with.
    """

    overwrite_output_dir: bool = field(
        default=False, metadata={"help": "Throw the checkpoints and the result of an earlier run in output_dir away."}
    )

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise UserError(f"--{name} {getattr(self, name)}: give at least 1")
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            if value is not None and not 0 <= float(value) < float("inf"):
                raise UserError(f"--{name} {value}: give a number from 0 on")
        token: str | None = getattr(self, "hub_token")  # noqa: B009  its type cannot be determined
        if token is not None:
            os.environ["HF_TOKEN"] = token
            self.hub_token: str | None = None
        super().__post_init__()
