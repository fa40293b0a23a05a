"""`ckpt-ft merge`: a trained adapter into full weights."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from .console import progress


class Precision(str, Enum):
    auto = "auto"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


def merge(
    adapter: Annotated[str, typer.Argument(help="a LoRA run's output_dir")],
    output: Annotated[str, typer.Option("--output", help="directory for the merged model")],
    base: Annotated[
        str, typer.Option("--base", help="Hub id or directory; by default the one that the adapter names")
    ] = "",
    dtype: Annotated[
        Precision, typer.Option("--dtype", help="of the merged weights; auto keeps the base's")
    ] = Precision.auto,
) -> None:
    """Merge a trained adapter into its base model: full weights that load without peft."""
    from ckpt_ft.training.merge import merge as merge_adapter

    with progress() as say:
        say(f"merging {adapter}")
        merged = merge_adapter(adapter, output, base, dtype.value)
    print(f"merged: {merged}")


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command()(merge)
