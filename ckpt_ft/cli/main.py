"""`ckpt-ft`: what a training step costs, which policy fits, and whether it changes any number, from the command line.

Exit codes: 0 done, 1 the work failed (parity broken), 2 the input is wrong (one line on stderr), 128 + N stopped by
signal N.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import shlex
import sys
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import ckpt_ft
from ckpt_ft.errors import UserError, did_you_mean, one_line, run
from ckpt_ft.spec.settings import typed_as
from ckpt_ft.workloads.model_config import find_model

from . import app as browser
from . import catalogue, dry_run, estimate, max_length, planning, policies, recipe, where
from . import run as script_run
from .named import unpacked
from .params import GroupedCommand, print_notes, words_in_our_names
from .words import FILES, hear


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:  # typer would print nothing
            return stop


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help=__doc__,
    context_settings={"token_normalize_func": typed_as},
)

_UsageError: Any = typer.BadParameter.__mro__[1]  # click's, or the copy of click inside newer typers


def main() -> None:
    """The console script."""
    if sys.argv[1:2] == ["run"]:  # the script's process is as python starts it
        os.execv(sys.executable, [sys.executable, "-m", "ckpt_ft.run", *sys.argv[2:]])
    for library in ("TRANSFORMERS", "DIFFUSERS"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    for library in () if sys.stderr.isatty() else ("HF_DATASETS", "HF_HUB"):
        os.environ.setdefault(f"{library}_DISABLE_PROGRESS_BARS", "1")  # bars are torn in a file
    logging.getLogger("DeepSpeed").addFilter(lambda record: False)  # it would write into our standard output
    logging.getLogger("torch._subclasses").setLevel(logging.CRITICAL)  # the error that follows is one line of ours
    for library in ("torchao", "torch.utils._pytree", "bitsandbytes"):  # say that their kernels for a GPU are missing
        logging.getLogger(library).setLevel(logging.ERROR)
    warnings.showwarning = _show_warning
    gc.disable()  # a command lives for seconds and makes no cycles worth looking for among its millions of objects
    atexit.register(gc.freeze)  # at exit none is looked for either
    try:
        run(_main)
    finally:
        gc.enable()


def _main() -> int:
    try:
        words = words_in_our_names(_with_command(sys.argv[1:]), _switches) or ["--help"]
        done = _commands()(words, standalone_mode=False) or 0
    except typer.Exit as stop:
        return stop.exit_code
    except _UsageError as error:
        faults: Any = getattr(error.__cause__, "errors", list)()  # pydantic's, whose message has no value
        given = f": {faults[0]['input']!r}" if faults else ""
        said = (
            one_line(error.format_message()).partition(", unable to parse")[0].replace("Input should be", "it must be")
        )
        raise UserError(f"{said}{given}") from error
    if isinstance(done, KeyboardInterrupt):
        raise done
    return done


def _with_command(words: Sequence[str]) -> Sequence[str]:
    """`words` with their command: that which they ask for, or `estimate` of a model and `where` of a card.

    Raises:
        UserError: they name neither.
    """
    word = words[0] if words else ""
    if (dashed := word.replace("_", "-")) in _commands().commands:
        card = hear(words[1:]).flags.get("device") if dashed == "models" else ""
        return _noted(["where", "--device", card]) if card else [dashed, *words[1:]]
    if not word or word.startswith("-"):
        return words
    if word.endswith(".py"):
        return _noted(["dry-run", *words])
    count = next((at for at, one in enumerate(words) if one.startswith("-")), len(words))
    heard, options = hear(words[:count]), words[count:]
    known = bool(heard.model) and (
        Path(heard.model).exists()
        or Path(heard.model).suffix in FILES
        or bool(find_model(heard.model) or unpacked(heard.model))
    )
    named = known or bool({"--model", "--config"} & {one.partition("=")[0] for one in options})
    close = did_you_mean(word, _commands().commands)
    if (named and not (close and word in heard.ignored)) or (not heard.model and ("device" in heard.flags or options)):
        print_notes(heard.notes())
        command = heard.command or ("estimate" if named else "where")
        model = [heard.model] if known else []
        return _noted([command, *model, *heard.options(), *heard.rest, *options])
    if heard.model and (heard.flags or heard.command or " " in heard.model) and not close:
        lists = "`ckpt-ft models` lists them, others need a Hub id or a file"
        raise UserError(f"no known model is called '{heard.model}'; {lists}")
    raise UserError(f"no command '{word}'{close} ({_GUIDE})")


def _noted(words: list[str]) -> list[str]:
    print(f"note: ckpt-ft {shlex.join(words)}", file=sys.stderr)
    return words


_GUIDE = (
    "estimate MODEL: does it fit? where --device CARD: what does a card train? max-batch, max-length: how much fits? "
    "plan: the fastest way; dry-run SCRIPT.py: your own script; report FILE: what did a run use? --help lists all"
)


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    """One line; what libraries announce to each other's developers is left out, whoever resets the filters."""
    if not issubclass(category, (FutureWarning, DeprecationWarning)):
        print(f"warning: {one_line(message)}", file=sys.stderr)


@cache
def _commands() -> Any:
    return typer.main.get_command(app)


def _switches(command: str) -> dict[str, bool]:
    """The options of a command that takes a spec, and whether each has no value; {} for other commands."""
    found = _commands().commands.get(command)
    options = [one for one in found.params if one.param_type_name == "option"] if found else []
    names = {name: one.is_flag for one in options for name in one.opts}
    return names if "--config" in names else {}


def _print_version(asked: bool) -> None:
    if asked:
        print(ckpt_ft.__version__)
        raise typer.Exit


@app.callback(help=__doc__)
def _common(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="print the version and stop")
    ] = False,
) -> None:
    pass


_ASKS = {"help_option_names": ["--help", "--help-all"]}
for command in (
    estimate.estimate, planning.plan, planning.max_batch, max_length.max_length, where.where, policies.explain,
    policies.check,
):  # fmt: skip
    app.command(cls=GroupedCommand, context_settings=_ASKS)(command)
for command in (estimate.report, catalogue.models, catalogue.gpus, catalogue.calibrate):
    app.command()(command)
for command in (dry_run.dry_run, script_run.run):  # what follows the script's name is the script's own
    app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(command)
# What follows the recipe's name is the recipe's own, its --help included.
app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)(recipe.recipe)  # fmt: skip
app.command()(browser.app)

if __name__ == "__main__":
    main()
