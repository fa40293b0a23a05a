"""`ckpt-ft merge`: a trained adapter into full weights; `ckpt-ft kohya`: a U-Net's LoRA under kohya's names."""

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


def kohya(
    adapter: Annotated[str, typer.Argument(help="a U-Net's LoRA run's output_dir, or its file")],
    output: Annotated[str, typer.Option("--output", help="file to write, NAME.safetensors")],
) -> None:
    """Write a U-Net's LoRA under kohya's names, for AUTOMATIC1111, ComfyUI, InvokeAI and others."""
    from ckpt_ft.training.kohya import to_kohya

    print(f"written: {to_kohya(adapter, output)}")


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command()(merge)
    app.command()(kohya)
