"""RunArguments: transformers.TrainingArguments with what a run of its own needs, checked when it is made."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, field

from transformers import TrainingArguments
from transformers.integrations import get_available_reporting_integrations
from transformers.training_args import OptimizerNames

from ckpt_ft.errors import UserError

_AT_LEAST_ONE = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")
_NOT_NEGATIVE = ("learning_rate", "weight_decay", "max_grad_norm", "num_train_epochs", "warmup_steps")


@dataclass
class RunArguments(TrainingArguments):
    """TrainingArguments, and whether an earlier run in the output directory is replaced.

    `hub_token` goes to the environment, where huggingface_hub looks for it: a Trainer pickles its arguments into every
    directory that it saves, and uploads them.

    Raises:
        UserError: a number that nothing can be trained with, or a package that is asked for and not installed.
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
        optim = OptimizerNames(self.optim).value
        needed = {
            "--use_liger_kernel": ("liger_kernel", self.use_liger_kernel),
            f"--optim {optim}": ("bitsandbytes", any(part in optim for part in ("bnb", "8bit", "paged"))),
        }
        for flag, (package, wanted) in needed.items():
            if wanted and importlib.util.find_spec(package) is None:
                raise UserError(f"{flag} needs {package}, which is not installed")
        here = get_available_reporting_integrations()
        for name in self.report_to:
            if name not in here:
                raise UserError(f"--report_to {name}: not installed; of trackers there are here: {_or_none(here)}")


def _or_none(names: list[str]) -> str:
    return ", ".join(names) or "none"
