"""`ckpt-ft recipe`: run a recipe of the installed package, or say where its script lies."""

from __future__ import annotations

import gc
import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer

from ckpt_ft.errors import UserError, meant

PACKAGE = Path(__file__).parents[1]


def recipe(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="llm, vlm, dpo, diffusion_unet, diffusion_transformer, ...")],
    path: Annotated[bool, typer.Option("--path", help="only print the script's path, to read or launch")] = False,
) -> None:
    """Run a recipe in this process, with its own flags behind its name; its --help lists them.

    On several processes: accelerate launch -q "$(ckpt-ft recipe --path llm)" ...
    """
    script = find_recipe(name)
    if path:
        print(script)
        return
    sys.argv = [str(script), *context.args]
    gc.enable()  # a run lives for hours, and its cycles hold tensors
    runpy.run_path(str(script), run_name="__main__")


def find_recipe(name: str) -> Path:
    """The script of the recipe called `name`: inside of the installed package, or beside it in a checkout.

    Raises:
        UserError: there is no such recipe.
    """
    folder = next((place for place in (PACKAGE / "recipes", PACKAGE.parent / "recipes") if place.is_dir()), None)
    known = {} if folder is None else {script.stem: script for script in sorted(folder.glob("*.py"))}
    if name not in known:
        raise UserError(f"no recipe '{name}'{meant(name, known)} ({', '.join(known)})")
    return known[name]


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    # what stands behind the name is the recipe's, its --help included
    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command(context_settings=settings)(recipe)
