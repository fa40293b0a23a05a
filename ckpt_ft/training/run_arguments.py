"""The flags of a run: `RunArguments`, and `parse_args`, which reads flags and YAML into dataclasses.

`parse_args` is `HfArgumentParser` with `--config file.yaml` and one-line errors. Entries of the YAML file are inserted
before the user's own flags, so both pass through the same types and checks, and the command line wins because it comes
later.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NoReturn

from accelerate.utils import DynamoBackend
from transformers import HfArgumentParser, TrainingArguments
from transformers.integrations import get_available_reporting_integrations
from transformers.training_args import OptimizerNames, ParallelMode

from ckpt_ft.errors import UserError, did_you_mean, one_line
from ckpt_ft.spec.settings import known_as
from ckpt_ft.spec.training_file import read_yaml
from ckpt_ft.training.flags import (
    OFFLOADED,
    OVERWRITE,
    AtLeastOne,
    Count,
    NotNegative,
    Positive,
    Seed,
    Share,
    check_flags,
    check_offloaded,
    check_trackers,
    flag,
)
from ckpt_ft.validation import require_package

_EPOCHS = -1  # default of --max_steps: --num_train_epochs decides how long to train
_NUMBERS = {
    "per_device_train_batch_size": AtLeastOne,
    "per_device_eval_batch_size": AtLeastOne,
    "gradient_accumulation_steps": AtLeastOne,
    "eval_accumulation_steps": AtLeastOne,
    "num_train_epochs": Positive,
    "learning_rate": NotNegative,
    "weight_decay": NotNegative,
    "adam_beta1": Share,
    "adam_beta2": Share,
    "adam_epsilon": NotNegative,
    "max_grad_norm": NotNegative,
    "warmup_steps": NotNegative,
    "label_smoothing_factor": Share,
    "neftune_noise_alpha": NotNegative,
    "logging_steps": Positive,
    "save_steps": Positive,
    "eval_steps": Positive,
    "save_total_limit": AtLeastOne,
    "dataloader_num_workers": Count,
    "dataloader_prefetch_factor": AtLeastOne,
    "seed": Seed,
    "data_seed": Seed,
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
    offload_optimizer: str | None = flag(None, OFFLOADED)
    swaps: ClassVar[bool] = False  # whether the policy keeps weights in host memory; set by `trainer.start`

    @property
    def place_model_on_device(self) -> bool | None:
        """False under a policy with `swap`: its weights stay behind when `ACCallback.attach` moves the others."""
        return False if self.swaps else super().place_model_on_device

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
        for option, (package, wanted) in needed.items():
            if wanted:
                require_package(package, option)
        check_trackers(self.report_to, get_available_reporting_integrations())
        other = "" if optim in ("adamw_torch", "adamw_torch_fused") else f"--optim {optim}"
        step = self.max_grad_norm, self.fp16, self.gradient_accumulation_steps
        check_offloaded(self.offload_optimizer, other, *step)


# Flags of TrainingArguments and TRL's DPOConfig that `--help` shows.
COMMON = (
    "output_dir", "overwrite_output_dir", "resume_from_checkpoint", "per_device_train_batch_size",
    "gradient_accumulation_steps", "learning_rate", "num_train_epochs", "max_steps", "lr_scheduler_type",
    "warmup_steps", "optim", "offload_optimizer", "bf16", "fp16", "max_grad_norm", "torch_compile", "logging_steps",
    "save_steps", "eval_strategy", "report_to", "seed", "max_length", "beta", "loss_type", "precompute_ref_log_probs",
)  # fmt: skip


class _AsWritten(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Prints examples unchanged, and the default after each flag that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        shown = action.default not in (None, False, argparse.SUPPRESS)
        return super()._get_help_string(action) if shown else action.help


class _Help(argparse.Action):
    """Prints our own flags, and of the hundred of TrainingArguments the `COMMON` ones."""

    def __call__(self, parser: Parser, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        kinds = [kind for kind in parser.dataclass_types if issubclass(kind, TrainingArguments)]
        foreign = {field.name for kind in kinds for field in fields(kind)}
        for action in parser.flags.values():
            if action.dest in foreign and action.dest not in COMMON:
                action.help = argparse.SUPPRESS
        parser.print_help()
        parser.exit()


class Parser(HfArgumentParser):
    """`HfArgumentParser` that raises `UserError` (one line, exit 2) and accepts no abbreviated flags."""

    def __init__(self, dataclass_types: Sequence[type], **kwargs: Any) -> None:
        self.flags: dict[str, argparse.Action] = {}  # by their names, with underscores
        self.add_argument: Any = self._noting(super().add_argument)
        super().__init__(
            dataclass_types, allow_abbrev=False, add_help=False, formatter_class=_AsWritten, usage="%(prog)s [flags]",
            **kwargs,
        )  # fmt: skip
        self.add_argument("--config", metavar="FILE.yaml", help="YAML file of flags; those on the command line win")
        self.add_argument("-h", "--help", action=_Help, nargs=0, help="Show the flags that most runs need.")
        self.add_argument("--help-all", action="help", help="Show every flag.")

    def add_argument_group(self, *args: Any, **kwargs: Any) -> Any:
        group = super().add_argument_group(*args, **kwargs)
        group.add_argument = self._noting(group.add_argument)
        return group

    def _noting(self, add: Callable[..., argparse.Action]) -> Callable[..., argparse.Action]:
        """`add_argument` of the parser or of a group, whose flags this parser then knows."""

        def noted(*args: Any, **kwargs: Any) -> argparse.Action:
            action = add(*args, **kwargs)
            names = [name.removeprefix("--") for name in action.option_strings]
            self.flags.update({name: action for name in names if "-" not in name})
            return action

        return noted

    def known(self, name: str) -> str:
        """Returns this parser's name for the flag `name`."""
        return known_as(name, self.flags)

    def error(self, message: str) -> NoReturn:
        raise UserError(one_line(message, 500))


def parse_args(
    dataclass_types: Sequence[type],
    argv: Sequence[str] | None = None,
    *,
    builtin: Mapping[str, Any] | None = None,
    unless: str = "",
    description: str | None = None,
) -> tuple[Any, ...]:
    """One instance per dataclass; the command line beats `--config`, which beats `builtin`, which beats the defaults.

    Args:
        argv: the flags; None takes the process's own.
        builtin: a script's own defaults, used if the flag `unless` is not given.
        unless: the name of the flag that switches `builtin` off; "" applies `builtin` always.
        description: what `--help` shows above the flags.

    Raises:
        UserError: an unknown flag or YAML key (suggests the likely one), a value of the wrong type, or a value that a
            dataclass rejects.
    """
    parser = Parser(dataclass_types, description=description)
    argv = list(sys.argv[1:] if argv is None else argv)
    path = parser.parse_known_args(argv)[0].config
    tokens = _tokens(read_yaml(path), parser, path) if path else []
    for token in argv:
        name, equals, value = token.removeprefix("--").partition("=")
        tokens.append(f"--{parser.known(name)}{equals}{value}" if token.startswith("--") else token)
    if builtin and not any(_flag(token) == unless for token in tokens):
        tokens = _tokens(builtin, parser, "the built-in defaults") + tokens
    try:
        *parsed, _config, unknown = parser.parse_args_into_dataclasses(
            tokens, look_for_args_file=False, return_remaining_strings=True
        )
    except (ValueError, TypeError, ImportError, OSError) as error:
        raise UserError(one_line(error)) from error
    if unknown:
        raise UserError(f"{_unknown(unknown[0].partition('=')[0], parser)} (see --help)")
    return tuple(parsed)


def _tokens(values: Mapping[str, Any], parser: Parser, source: str) -> list[str]:
    """Returns `values` as command-line tokens; a null means the flag's default and gives no token."""
    tokens: list[str] = []
    for given, value in values.items():
        key = parser.known(given)
        if key not in parser.flags or key in ("config", "help"):
            raise UserError(f"{source}: {_unknown(f'--{given}', parser).replace('--', '')}")
        if isinstance(value, dict):
            tokens.append(f"--{key}={_json(key, value, source)}")
        elif value is True and parser.flags[key].const is True:
            tokens.append(f"--{key}")  # a bare flag may mean something else than the word "True" (--fsdp)
        elif isinstance(value, list):
            tokens += [f"--{key}", *map(str, value)]
        elif value is not None:
            tokens.append(f"--{key}={value}")
    return tokens


def _json(key: str, value: dict[Any, Any], source: str) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:  # dates, bytes; anchors that contain themselves
        raise UserError(f"{source}: {key}: {one_line(error, 200)}") from error


def _flag(token: str) -> str:
    return token.partition("=")[0].removeprefix("--").replace("-", "_") if token.startswith("--") else ""


def _unknown(option: str, parser: Parser) -> str:
    if not option.startswith("-"):
        return f"'{option}' belongs to no flag"
    return f"no flag '{option}'{did_you_mean(option, (f'--{name}' for name in parser.flags))}"
