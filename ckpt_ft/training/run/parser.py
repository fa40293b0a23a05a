"""Parses flags and YAML into dataclasses: `HfArgumentParser` with `--config file.yaml` and one-line errors.

Entries of the YAML file are inserted before the user's own flags, so both pass through the same types and checks, and
the command line wins because it comes later. If a flag names a repository of the Hub and the Hub does not answer, the
libraries read their cache: by default, the Hub client retries six times over half a minute for every file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from transformers import HfArgumentParser, TrainingArguments

from ckpt_ft.errors import UserError, meant, one_line
from ckpt_ft.spec.settings import known_as
from ckpt_ft.spec.training_file import read_yaml
from ckpt_ft.workloads.model_config import hub_answers

# Flags of TrainingArguments and TRL's DPOConfig that `--help` shows.
COMMON = (
    "output_dir", "overwrite_output_dir", "resume_from_checkpoint", "per_device_train_batch_size",
    "gradient_accumulation_steps", "learning_rate", "num_train_epochs", "max_steps", "lr_scheduler_type",
    "warmup_steps", "optim", "bf16", "fp16", "max_grad_norm", "torch_compile", "logging_steps", "save_steps",
    "eval_strategy", "report_to", "seed", "max_length", "beta", "loss_type", "precompute_ref_log_probs",
)  # fmt: skip


class _AsWritten(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Prints examples unchanged, and the default after each flag that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        shown = action.default not in (None, False, argparse.SUPPRESS)
        return super()._get_help_string(action) if shown else action.help


class _Help(argparse._HelpAction):
    """Prints our own flags, and of the hundred of TrainingArguments the `COMMON` ones."""

    def __call__(self, parser: Parser, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        kinds = [kind for kind in parser.dataclass_types if issubclass(kind, TrainingArguments)]
        foreign = {field.name for kind in kinds for field in fields(kind)}
        for action in parser._actions:
            if action.dest in foreign and action.dest not in COMMON:
                action.help = argparse.SUPPRESS
        super().__call__(parser, *args, **kwargs)


class Parser(HfArgumentParser):
    """`HfArgumentParser` that raises `UserError` (one line, exit 2) and accepts no abbreviated flags."""

    def __init__(self, dataclass_types: Sequence[type], **kwargs: Any) -> None:
        super().__init__(
            dataclass_types, allow_abbrev=False, add_help=False, formatter_class=_AsWritten, usage="%(prog)s [flags]",
            **kwargs,
        )  # fmt: skip
        self.add_argument("--config", metavar="FILE.yaml", help="YAML file of flags; those on the command line win")
        self.add_argument("-h", "--help", action=_Help, help="Show the flags that most runs need.")
        self.add_argument("--help-all", action="help", help="Show every flag.")

    @property
    def names(self) -> list[str]:
        """Names of all flags, with underscores."""
        return [name[2:] for name in self._option_string_actions if name.startswith("--") and "-" not in name[2:]]

    def known(self, name: str) -> str:
        """Returns this parser's name for the flag `name`."""
        return known_as(name, self.names)

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

    If a flag names a Hub repository, checks once whether the Hub answers.

    Args:
        dataclass_types: as for `HfArgumentParser`.
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
    path = _config_path(argv)
    tokens = (_tokens(read_yaml(path), parser, path) if path else []) + [_renamed(token, parser) for token in argv]
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
    read_cache_where_offline(parsed)
    return tuple(parsed)


def _config_path(argv: Sequence[str]) -> str | None:
    for index, token in enumerate(argv):
        if token == "--config":
            if index + 1 == len(argv):
                raise UserError("--config: expected the path of a YAML file after it")
            return argv[index + 1]
        if token.startswith("--config="):
            return token.partition("=")[2]
    return None


def _tokens(values: Mapping[str, Any], parser: Parser, source: str) -> list[str]:
    """Returns `values` as command-line tokens; a null means the flag's default and gives no token."""
    tokens: list[str] = []
    for given, value in values.items():
        key = parser.known(given)
        if f"--{key}" not in parser._option_string_actions or key in ("config", "help"):
            raise UserError(f"{source}: {_unknown(f'--{given}', parser).replace('--', '')}")
        if isinstance(value, dict):
            tokens.append(f"--{key}={_json(key, value, source)}")
        elif value is True and parser._option_string_actions[f"--{key}"].const is True:
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


def _renamed(token: str, parser: Parser) -> str:
    """Returns `token` with its flag renamed to this parser's name."""
    if not token.startswith("--"):
        return token
    name, equals, value = token[2:].partition("=")
    return f"--{parser.known(name)}{equals}{value}"


def _flag(token: str) -> str:
    return token.partition("=")[0].removeprefix("--").replace("-", "_") if token.startswith("--") else ""


def _unknown(option: str, parser: Parser) -> str:
    if not option.startswith("-"):
        return f"'{option}' belongs to no flag"
    return f"no flag '{option}'{meant(option, (f'--{name}' for name in parser.names))}"


# Flags whose value may be the name of a Hub repository.
_NAMES = (
    "model_name_or_path", "dataset_name", "pretrained_model_name_or_path", "pretrained_vae_model_name_or_path",
    "train_data_dir",
)  # fmt: skip


def read_cache_where_offline(groups: Iterable[Any]) -> None:
    """Switch the Hub libraries to offline mode, with a note, if `groups` of flags name something that is not a local
    path and the Hub does not answer."""
    from huggingface_hub import constants

    given = [getattr(group, name, None) for group in groups for name in _NAMES]
    named = [name for name in given if name and not Path(name).exists()]
    if not named or constants.HF_HUB_OFFLINE or hub_answers():
        return
    constants.HF_HUB_OFFLINE = True
    os.environ["HF_HUB_OFFLINE"] = "1"  # for subprocesses
    datasets = sys.modules.get("datasets.config")
    if datasets is not None:
        datasets.HF_HUB_OFFLINE = datasets.HF_DATASETS_OFFLINE = True  # type: ignore[attr-defined]
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"note: {constants.ENDPOINT} does not answer; {', '.join(named)}: from the cache here", file=sys.stderr)
