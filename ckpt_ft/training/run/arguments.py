"""RunArguments: transformers.TrainingArguments plus the flags of a recipe, validated when the object is created."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from accelerate.utils import DynamoBackend
from transformers import TrainingArguments
from transformers.integrations import get_available_reporting_integrations
from transformers.training_args import OptimizerNames, ParallelMode

from ckpt_ft.errors import UserError
from ckpt_ft.training.flags import (
    AT_LEAST_ONE,
    NOT_NEGATIVE,
    OVERWRITE,
    POSITIVE,
    SEED,
    SHARE,
    check_flags,
    check_trackers,
    flag,
)
from ckpt_ft.validation import require_package

_EPOCHS = -1  # default of --max_steps: --num_train_epochs decides how long to train
_NUMBERS = {
    "per_device_train_batch_size": AT_LEAST_ONE,
    "per_device_eval_batch_size": AT_LEAST_ONE,
    "gradient_accumulation_steps": AT_LEAST_ONE,
    "eval_accumulation_steps": AT_LEAST_ONE,
    "num_train_epochs": POSITIVE,
    "learning_rate": NOT_NEGATIVE,
    "weight_decay": NOT_NEGATIVE,
    "adam_beta1": SHARE,
    "adam_beta2": SHARE,
    "adam_epsilon": NOT_NEGATIVE,
    "max_grad_norm": NOT_NEGATIVE,
    "warmup_steps": NOT_NEGATIVE,
    "label_smoothing_factor": SHARE,
    "neftune_noise_alpha": NOT_NEGATIVE,
    "logging_steps": POSITIVE,
    "save_steps": POSITIVE,
    "eval_steps": POSITIVE,
    "save_total_limit": AT_LEAST_ONE,
    "dataloader_num_workers": NOT_NEGATIVE,
    "dataloader_prefetch_factor": AT_LEAST_ONE,
    "seed": SEED,
    "data_seed": SEED,
}
# The --optim_args that optimizers of transformers and torch read. Others accept more, or validate theirs.
_OPTIM_ARGS: dict[str, tuple[str, ...]] = {
    "adafactor": (),
    "adamw_torch": (),
    "adamw_torch_fused": (),
    "sgd": ("momentum", "dampening", "weight_decay", "nesterov"),
    "adagrad": ("lr_decay", "weight_decay", "eps"),
    "rmsprop": ("alpha", "eps", "weight_decay", "momentum", "centered"),
}


@dataclass
class RunArguments(TrainingArguments):
    """TrainingArguments with a flag to overwrite an earlier run in the output directory.

    `hub_token` is moved to the environment variable `HF_TOKEN`, which huggingface_hub reads: a Trainer pickles its
    arguments into every directory that it saves, and uploads them.

    Raises:
        UserError: a number is out of range, or a requested package is not installed.
    """

    _argument_group_name = "training (transformers.TrainingArguments)"
    overwrite_output_dir: bool = flag(False, OVERWRITE)

    def __post_init__(self) -> None:
        check_flags(self, _NUMBERS)
        if self.max_steps != _EPOCHS and self.max_steps < 1:
            raise UserError(f"--max_steps {self.max_steps}: give at least 1, or leave it out to train for epochs")
        token: str | None = getattr(self, "hub_token")  # noqa: B009  its type cannot be determined
        if token is not None:
            os.environ["HF_TOKEN"] = token
            self.hub_token: str | None = None
        backends = [backend.value.lower() for backend in DynamoBackend]
        if self.torch_compile_backend is not None and self.torch_compile_backend.lower() not in backends:
            raise UserError(f"--torch_compile_backend {self.torch_compile_backend}: one of {', '.join(backends)}")
        super().__post_init__()
        if self.device.type == "cpu":
            self.dataloader_pin_memory = False  # there is no device to pin for; torch would warn in every epoch
        if self.fsdp and self.parallel_mode is not ParallelMode.DISTRIBUTED:
            raise UserError(
                "--fsdp on one process: it shards a model over several; start them with `accelerate launch "
                "--num_processes N`, or drop it"
            )
        optim = OptimizerNames(self.optim).value
        needed = {
            "--use_liger_kernel": ("liger_kernel", self.use_liger_kernel),
            f"--optim {optim}": ("bitsandbytes", any(part in optim for part in ("bnb", "8bit", "paged"))),
        }
        for asked, (package, wanted) in needed.items():
            if wanted:
                require_package(package, asked)
        check_trackers(self.report_to, get_available_reporting_integrations())
        self._check_optim_args(optim)

    def _check_optim_args(self, optim: str) -> None:
        """Raises UserError if the optimizer does not read an argument: a Trainer ignores it silently."""
        pairs = self.optim_args.replace(" ", "").split(",") if self.optim_args else []
        if not all("=" in pair for pair in pairs):
            raise UserError(f"--optim_args {self.optim_args}: give pairs as in rank=64,scale=0.1")
        known = _OPTIM_ARGS.get(optim)
        foreign = [] if known is None else [name for pair in pairs if (name := pair.partition("=")[0]) not in known]
        if foreign:
            reads = f"of these it reads {', '.join(known)}" if known else "it reads none; its numbers are flags"
            raise UserError(f"--optim_args {self.optim_args}: {optim} knows no {foreign[0]}, {reads}")


def check_best_metric(args: TrainingArguments, metrics: Sequence[str]) -> None:
    """Raises UserError if an evaluation does not return `--metric_for_best_model`; a Trainer only fails after it."""
    name = args.metric_for_best_model
    if name is not None and name.removeprefix("eval_") not in metrics:
        raise UserError(f"--metric_for_best_model {name}: an evaluation gives {', '.join(metrics)}; name one of them")
