"""Prints a recipe's `--help` from its flag dataclasses alone, because importing the training libraries takes seconds.

It lists the most used TrainingArguments; `--help-all` prints the parser's list of every flag.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, NamedTuple

from ckpt_ft.training.flags import OVERWRITE

_WIDEST = 100
_FEW = 5  # more choices than this are listed in the text
_FLAGS = 38  # widest column of flags, in characters


class Line(NamedTuple):
    """A flag as shown. value: the placeholder after it, "" for a switch. default: "" to show none."""

    name: str
    value: str
    default: str
    text: str


# Flags of transformers.TrainingArguments, ordered by how soon users need them.
TRAINING = (
    Line("output_dir", "DIR", "", "Where the result, checkpoints and reports go."),
    Line("per_device_train_batch_size", "N", "8", "Samples on a device at once."),
    Line("gradient_accumulation_steps", "N", "1", "Micro-batches of an optimizer step."),
    Line("learning_rate", "RATE", "5e-05", "Peak learning rate."),
    Line("num_train_epochs", "N", "3.0", "Passes over the data."),
    Line("max_steps", "N", "-1", "Optimizer steps; above 0 they decide, not the passes over the data."),
    Line("lr_scheduler_type", "NAME", "linear", "linear, cosine, constant, constant_with_warmup, ..."),
    Line("warmup_steps", "N", "0", "Warm-up steps; a number below 1 is a share of all steps."),
    Line("optim", "NAME", "adamw_torch_fused", "adamw_torch, adamw_bnb_8bit, paged_adamw_8bit, adafactor, sgd, ..."),
    Line("bf16", "", "", "Mixed precision in bfloat16."),
    Line("fp16", "", "", "Mixed precision in float16."),
    Line("max_grad_norm", "NORM", "1.0", "Clip gradients to this norm; 0 for no clipping."),
    Line("torch_compile", "", "", "Compile the model."),
    Line("logging_steps", "N", "500", "Steps between two lines of the log."),
    Line("save_steps", "N", "500", "Steps between checkpoints."),
    Line("eval_strategy", "WHEN", "no", "no, steps or epoch."),
    Line("report_to", "NAME", "none", "Trackers: tensorboard, wandb, ..., all, or none."),
    Line("seed", "N", "42", "Seed of every random choice."),
)
DPO = (
    Line("max_length", "N", "1024", "Tokens of a prompt with its answer; longer ones are cut."),
    Line("beta", "B", "0.1", "Weight of staying close to the reference model: the higher, the closer."),
    Line("loss_type", "NAME", "sigmoid", "sigmoid, hinge, ipo, ..."),
    Line(
        "precompute_ref_log_probs",
        "",
        "",
        "Run the reference once, before training, so that it is not in memory then.",
    ),
)
CONFIG = (
    Line("config", "FILE.yaml", "", "Flags from a file; those on the command line win."),
    Line("help-all", "", "", "Every flag."),
)
RUN = (
    Line("overwrite_output_dir", "", "", OVERWRITE),
    Line("resume_from_checkpoint", "WHICH", "", "latest, or the path of a checkpoint."),
    *CONFIG,
)

Group = type | Sequence[Line]


def answer_help(description: str | None, groups: Mapping[str, Group], argv: Sequence[str] | None = None) -> None:
    """Print the help and exit if `argv` has `-h` or `--help`; otherwise do nothing.

    Args:
        description: text above the flags, printed unchanged.
        groups: maps each title to a dataclass of flags or to lines.
    """
    if not {"-h", "--help"} & set(sys.argv[1:] if argv is None else argv):
        return
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    parser = argparse.ArgumentParser(
        usage="%(prog)s [flags]", description=description, add_help=False,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=_FLAGS, width=width),
    )  # fmt: skip
    for title, group in groups.items():
        lines = map(_line, fields(group)) if isinstance(group, type) else group
        shown = parser.add_argument_group(title)
        for line in lines:
            text = f"{line.text} [{line.default}]" if line.default else line.text
            taken = {"metavar": line.value} if line.value else {"action": "store_true"}
            shown.add_argument(f"--{line.name}", help=text.replace("%", "%%"), **taken)  # type: ignore[arg-type]
    parser.print_help()
    raise SystemExit(0)


def _line(field: Field[Any]) -> Line:
    default = field.default if field.default is not MISSING else None
    said = "" if default in (None, "") or isinstance(default, bool) else str(default)
    text = str(field.metadata.get("help", ""))
    choices = field.metadata.get("choices")
    if default is True:
        return Line(f"no_{field.name}", "", "", text)
    value = field.name.rpartition("_")[2].upper()
    if choices and len(choices) < _FEW:
        value = "|".join(choices)
    elif choices:
        text += f" One of {', '.join(choices)}."
    for kind, short in (("bool", ""), ("int", "N"), ("float", "X"), ("list", "A B ...")):
        if str(field.type).startswith(kind):
            value = short
    return Line(field.name, value, said, text)
