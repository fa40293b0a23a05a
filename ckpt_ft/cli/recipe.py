"""`ckpt-ft recipe` runs a recipe of the installed package."""

from __future__ import annotations

import gc
import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer

from ckpt_ft.errors import UserError, did_you_mean

PACKAGE = Path(__file__).parents[1]


def recipe(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="llm, text, vlm, dpo, diffusion_unet, diffusion_transformer, ...")],
    path: Annotated[bool, typer.Option("--path", help="only print the script's path, to read or launch")] = False,
) -> None:
    """Run a recipe in this process. Its own flags follow its name; its --help lists them.

    On several processes: accelerate launch -q "$(ckpt-ft recipe --path llm)" ...
    """
    if name in ("-h", "--help"):
        print(f"{context.get_help()}\n\nRecipes: {', '.join(_recipes())}")
        return
    script = find_recipe(name)
    if path:
        print(script)
        return
    sys.argv = [str(script), *context.args]
    gc.enable()  # a run lives for hours, and its cycles hold tensors
    try:
        runpy.run_path(str(script), run_name="__main__")
    except ModuleNotFoundError as error:
        raise UserError(f"recipe {name} needs the package {error.name}: pip install {error.name}") from error


def find_recipe(name: str) -> Path:
    """Returns the script of the recipe `name`: in the installed package, or beside it in a checkout.

    Raises:
        UserError: no recipe has that name.
    """
    known = _recipes()
    if name not in known:
        raise UserError(f"no recipe '{name}'{did_you_mean(name, known)} ({', '.join(known)})")
    return known[name]


def _recipes() -> dict[str, Path]:
    """The script of each recipe by its name."""
    folder = next((place for place in (PACKAGE / "recipes", PACKAGE.parent / "recipes") if place.is_dir()), None)
    return {} if folder is None else {script.stem: script for script in sorted(folder.glob("*.py"))}
