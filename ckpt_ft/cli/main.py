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
from .named import is_card, phrase, unpacked
from .params import GroupedCommand, words_in_our_names


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
        raise UserError(f"{one_line(error.format_message())}{given}") from error
    if isinstance(done, KeyboardInterrupt):
        raise done
    return done


def _with_command(words: Sequence[str]) -> Sequence[str]:
    """`words` with their command: what names a model or a training file is `estimate`'s.

    Raises:
        UserError: the first word is neither.
    """
    word = words[0] if words else ""
    if (dashed := word.replace("_", "-")) in _commands().commands:
        return [dashed, *words[1:]]
    if not word or word.startswith("-"):
        return words
    if is_card(said := " ".join(words)) and not Path(said).exists():
        print(f"note: ckpt-ft where --device {shlex.quote(said)}", file=sys.stderr)
        return ["where", "--device", said]
    is_file = Path(word).exists() or Path(word).suffix in (".py", ".yaml", ".yml", ".json", ".toml", ".gguf")
    said = phrase(words)[0]
    if is_file or find_model(said) or unpacked(said):
        print(f"note: ckpt-ft estimate {shlex.quote(said)}", file=sys.stderr)
        return ["estimate", *words]
    close = did_you_mean(word, _commands().commands)
    raise UserError(f"no command '{word}'{close} ({_GUIDE})")


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
for command in (recipe.merge, browser.app):
    app.command()(command)

if __name__ == "__main__":
    main()
