"""`ckpt-ft run`: a training script under a policy, measured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ckpt_ft.errors import UserError
from ckpt_ft.errors import run as ended_well
from ckpt_ft.files import check_writable

Kinds = ("json", "md", "html", "png")


def run(
    words: Annotated[list[str] | None, typer.Argument(metavar="SCRIPT ARGS...", help="as after python")] = None,
    module: Annotated[str, typer.Option("-m", metavar="MODULE", help="run a module, as python -m does")] = "",
    policy: Annotated[
        str, typer.Option("--policy", "--ac_policy", help="apply this policy; 'auto' takes the fastest that fits")
    ] = "",
    budget: Annotated[str, typer.Option("--budget", "--ac_budget", help="memory for 'auto', such as 20GiB")] = "",
    report: Annotated[
        str, typer.Option("--report", "--ac_report", help="what to write at the end: json, md, html, png, or none")
    ] = "json,html",
    folder: Annotated[str, typer.Option("--report-dir", help="where the report is written")] = ".",
    predict: Annotated[bool, typer.Option(help="predict by a dry run what was measured")] = True,
) -> None:
    """Run a training script as it is, under a policy, and report its memory at the end.

    The script needs no change, and its numbers are those of the script alone. On several processes:
    accelerate launch -q -m ckpt_ft.run [OPTIONS] SCRIPT ARGS...
    """
    from ckpt_ft.host.live import LiveRun
    from ckpt_ft.host.script import Script

    script = Script.of(words or (), module)
    kinds = [] if report == "none" else report.split(",")
    if unknown := [kind for kind in kinds if kind not in Kinds]:
        raise UserError(f"--report {unknown[0]}: give {', '.join(Kinds)}, or none")
    if budget and policy != "auto":
        raise UserError(f"--budget {budget}: is for --policy auto, which chooses; drop it, or the policy")
    if kinds:
        check_writable(Path(folder, "memory_report.json"), "--report-dir")
    raise typer.Exit(LiveRun(script, policy or None, budget, kinds, folder, predict).run())


def main() -> None:
    """`python -m ckpt_ft.run`."""
    ended_well(_main)


def _main() -> int:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(run)
    try:
        return typer.main.get_command(app)(sys.argv[1:] or ["--help"], standalone_mode=False) or 0
    except typer.Exit as stop:
        return stop.exit_code
    except typer.BadParameter.__mro__[1] as error:  # type: ignore[misc]
        raise UserError(error.format_message()) from error
