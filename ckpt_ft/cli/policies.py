"""`ckpt-ft explain` and `ckpt-ft check`: what a policy covers and keeps, and that it changes no number."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.tables import Table, print_table
from ckpt_ft.units import format_bytes

from .console import progress, stdout
from .params import ONE_PROCESS, takes_spec

_DEFAULTS = {"policy": "full"}
CHECKED_TOKENS = 32  # of a sequence: a check makes a real step
FUSED_KERNELS = ("liger", "liger_kernel_config", "cut_cross_entropy")  # only traced, never run


@takes_spec(*ONE_PROCESS, "budget", "host_memory", defaults=_DEFAULTS, fixed={"optimizer": "none"})
def explain(spec: TrainingSpec) -> None:
    """Show which modules a policy covers and the bytes that each kind of block keeps for backward under it."""
    from ckpt_ft.checkpointing.apply import apply_policy
    from ckpt_ft.workloads.load import load

    with progress(f"building {spec.model.name} from its config") as say:
        workload = load(spec)
        kept = {}
        for name in dict.fromkeys(("none", spec.policy)):
            say(f"tracing a step under {name}")
            applied = apply_policy(workload.model, name)
            kept[name] = workload.trace(spec.data.batch_size).module_activations()
        blocks = applied.found.blocks or apply_policy(workload.model, "full").found.blocks
    print(applied.explain())
    rows = []
    for kind in dict.fromkeys(type(block).__name__ for block in blocks.values()):
        names = [name for name, block in blocks.items() if type(block).__name__ == kind]
        inside = tuple(f"{name}." for name in names)
        sums = (sum(n for at, n in each.items() if f"{at}.".startswith(inside)) for each in kept.values())
        rows.append((kind, str(len(names)), *(format_bytes(nbytes // len(names)) for nbytes in sums)))
    rows.append(("whole model", "", *(format_bytes(sum(activations.values())) for activations in kept.values())))
    header = ("kind of block", "blocks", *(f"kept by one, {name}" for name in kept))
    print_table(Table(f"Activations kept for backward, batch {spec.data.batch_size}", header, rows), stdout())


@takes_spec(
    *ONE_PROCESS,
    "budget",
    "host_memory",
    "device",
    *FUSED_KERNELS,
    defaults={**_DEFAULTS, "batch_size": 2, "default_seq_length": CHECKED_TOKENS},
    fixed={"optimizer": "none", "dtype": "float32", "load_in_4bit": False, "prepare_kbit": False},
)
def check(
    spec: TrainingSpec,
    seed: Annotated[
        int,
        typer.Option(
            "--seed", min=0, max=2**32 - 1, help="seed of the weights (if none are saved), the batch and dropout"
        ),
    ] = 0,
) -> None:
    """Prove on a real step that a policy changes no loss, gradient, buffer or random state; exit 1 if it does."""
    from ckpt_ft.planning.check import check_model

    with progress(f"running {spec.model.name} with and without '{spec.policy}'"):
        parity = check_model(spec, seed)
    print(parity)
    if not parity.ok:
        raise typer.Exit(1)
