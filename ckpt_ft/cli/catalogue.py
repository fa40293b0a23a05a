"""`ckpt-ft models`, `gpus` and `calibrate`: the models and GPUs known by name, and this machine's own card."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from ckpt_ft.errors import UserError
from ckpt_ft.files import check_writable
from ckpt_ft.memory.gpus import GPUS, calibrated_cards, card_path, write_card
from ckpt_ft.tables import DASH, Table, print_table
from ckpt_ft.units import GIB, format_number

from .console import progress, stdout
from .params import AsJson

Part = Annotated[str, typer.Argument(help="list only those with this text in a name or a kind")]


def models(part: Part = "", as_json: AsJson = False) -> None:
    """List the models whose configurations come with the package, with their other names."""
    from ckpt_ft.workloads.model_config import known_models

    found = [
        model
        for model in known_models().values()
        if _matches(part, (model.name, *model.also, model.kind, model.family))
    ]
    if not found:
        raise UserError(f"no model has '{part}' in its name; `ckpt-ft models` lists all")
    if as_json:
        print(json.dumps([asdict(model) for model in found], indent=2))
        return
    print(f"{len(found)} known offline, with their other names; any other model: a Hub id, directory or config file")
    width = max(len(model.name) for model in found)
    for model in found:  # whole names, so that they can be copied and searched for
        print(f"{model.name:{width}}  {_size(model.parameters):>6}  {model.kind}")
        also = ", ".join(model.also)
        print(textwrap.indent(textwrap.fill(also, 76, break_long_words=False, break_on_hyphens=False), "    "), end="")
        print("\n" * bool(also), end="")


def gpus(part: Part = "", as_json: AsJson = False) -> None:
    """List the GPUs that an estimate can be made for, with their memory and rates."""
    found = [gpu for gpu in (*calibrated_cards(), *GPUS.values()) if _matches(part, (gpu.name, gpu.note))]
    if not found:
        raise UserError(f"no GPU has '{part}' in its name; `ckpt-ft gpus` lists all")
    if as_json:
        print(json.dumps([asdict(gpu) for gpu in found], indent=2))
        return
    rows = []
    for gpu in found:
        rates = (gpu.fp32, gpu.tf32, gpu.fp16, gpu.bf16, gpu.fp8)
        shown = (format_number(rate / 1e12) if rate and not gpu.sized else DASH for rate in rates)
        memory, arch = f"{gpu.memory / GIB:.1f}", DASH if gpu.is_cpu else f"{gpu.arch[0]}.{gpu.arch[1]}"
        rows.append((gpu.name, memory, format_number(gpu.bandwidth / 1e9), *shown, str(gpu.sms), arch))
    header = ("card", "GiB", "GB/s", "fp32", "tf32", "fp16", "bf16", "fp8", "SMs", "sm")
    console = stdout()
    print_table(Table(f"{len(found)} cards, in TFLOP/s; another: --device 'l4 20GB'", header, rows),
                console)  # fmt: skip
    for note in dict.fromkeys(gpu.note for gpu in found if gpu.note):
        console.print(f"note: {note}", markup=False)
    for gpu in found:
        if gpu.calibration is not None:
            path = card_path("cpu" if gpu.is_cpu else gpu.name)
            console.print(f"{gpu.name}: calibrated on {gpu.calibration.date}, {path}", markup=False)


def calibrate() -> None:
    """Measure this machine's GPU or CPU in about a minute, so that `--device here` predicts its seconds.

    The card is written to the cache and is the default device from then on.
    """
    check_writable(card_path("cpu"), "the cache's card")
    with progress("importing PyTorch") as say:
        from ckpt_ft.memory.measure import calibrate

        card = calibrate.calibrate(say)
        path = write_card(card)
    own = card.calibration
    assert own is not None
    print(f"{card.name}: {1e6 * own.per_op:.1f} us for each op, {len(own.curves)} kinds of operators")
    print(f"wrote {path}; it is --device here, and the default")


def _matches(part: str, texts: Sequence[str]) -> bool:
    return any(part.lower() in text.lower() for text in texts)


def _size(parameters: int | str) -> str:
    if isinstance(parameters, str):
        return parameters
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"
