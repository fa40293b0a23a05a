"""On how many GPUs, and by which strategy: what `--launch`, `--gpus` and the options beside them say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ckpt_ft.errors import UserError
from ckpt_ft.spec.launch import STRATEGIES, WORTH_A_LOOK, Launch, launches_on
from ckpt_ft.spec.launch_file import read_launch
from ckpt_ft.units import parse_bytes


def asked_launch(given: str, processes: int, machines: int, link: str, mixed_precision: str) -> Launch | None:
    """What `--launch` and the options beside it say; None for one process."""
    if not given:
        for option, value in (("--processes", processes), ("--machines", machines), ("--link", link)):
            if value:
                raise UserError(f"{option} {value}: for several GPUs give --launch too (ddp, fsdp2, a file)")
        return None
    if given in STRATEGIES:
        if not processes:
            raise UserError(f"--launch {given}: on how many GPUs? give --processes")
        launch = Launch(given, processes, mixed_precision=mixed_precision)
    elif Path(given).suffix in (".yaml", ".yml", ".json"):
        launch = read_launch(given, processes or None, mixed_precision)
    else:
        raise UserError(
            f"--launch {given}: neither a strategy ({', '.join(STRATEGIES)}) nor accelerate's configuration (.yaml)"
        )
    return replace(launch, machines=machines or launch.machines, link=_rate(link))


def _rate(link: str) -> float | None:
    """Bytes a second, of `--link`."""
    try:
        rate = parse_bytes(link.removesuffix("/s")) if link else None
    except UserError:
        rate = 0
    if rate == 0:
        raise UserError(f"--link {link}: give the bytes that a GPU sends in a second, 25GB/s for example")
    return rate


def asked_launches(
    gpus: int, given: str, processes: int, machines: int, link: str, mixed_precision: str
) -> tuple[Launch, ...]:
    """The launches that `--gpus` and the options beside it leave to choose from."""
    if processes or Path(given).suffix:
        said = f"--processes {processes}" if processes else f"--launch {given}"
        raise UserError(f"--gpus {gpus} and {said}: --gpus chooses among strategies by name, a file is one launch")
    strategies = [name.strip() for name in given.split(",")] if given else WORTH_A_LOOK
    return tuple(launches_on(gpus, machines, strategies, mixed_precision=mixed_precision, link=_rate(link)))
