"""`ckpt-ft explain` and `ckpt-ft check`: what a policy covers and keeps, and that it changes no number."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpt_ft.memory.gpus import GPU
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.tables import Table, print_table
from ckpt_ft.units import format_bytes

from .asked import takes
from .console import progress, stdout
from .options import ONE_PROCESS, BatchSize, Model, PolicyOption, parse_policy

CHECKED_TOKENS = 32  # of a sequence: a step is made for real


@takes({"optimizer": "none", **ONE_PROCESS})
def explain(
    model: Model,
    policy: PolicyOption = "full",
    batch_size: BatchSize = 1,
    *,
    gpu: GPU | None,
    spec: TrainingSpec,
) -> None:
    """Show which modules a policy covers and the bytes that each kind of block keeps for backward under it."""
    from ckpt_ft.checkpointing.apply import apply_policy
    from ckpt_ft.workloads.load import load

    parse_policy(policy)
    with progress() as say:
        say(f"building {model} from its config")
        workload = load(spec.edit(model=model), gpu or "cpu")
        kept = {}
        for name in dict.fromkeys(("none", policy)):
            say(f"tracing a step under {name}")
            applied = apply_policy(workload.model, name)
            kept[name] = workload.trace(batch_size).module_activations()
        blocks = applied.found.blocks or apply_policy(workload.model, "full").found.blocks
    print(applied.explain())
    rows = []
    for kind in dict.fromkeys(type(block).__name__ for block in blocks.values()):
        names = [name for name, block in blocks.items() if type(block).__name__ == kind]
        per_block = (format_bytes(_inside(activations, names) // len(names)) for activations in kept.values())
        rows.append((kind, str(len(names)), *per_block))
    rows.append(("whole model", "", *(format_bytes(sum(activations.values())) for activations in kept.values())))
    header = ("kind of block", "blocks", *(f"kept by one, {name}" for name in kept))
    print_table(Table(f"Activations kept for backward, batch {batch_size}", header, rows), stdout())


@takes({"optimizer": "none", "dtype": "float32", "load_in_4bit": False, "prepare_kbit": False, **ONE_PROCESS})
def check(
    model: Model,
    policy: PolicyOption = "full",
    batch_size: BatchSize = 2,
    *,
    spec: TrainingSpec,
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=2**32 - 1, help="of weights (where none are saved), batch and dropout")
    ] = 0,
) -> None:
    """Prove on a real step that a policy changes no loss, gradient, buffer or random state; exit 1 if it does."""
    from ckpt_ft.planning.check import check_model

    parse_policy(policy)
    if not spec.data.images:
        spec = spec.edit(default_seq_length=CHECKED_TOKENS)
    with progress() as say:
        say(f"running {model} with and without '{policy}'")
        parity = check_model(spec.edit(model=model, policy=policy, batch_size=batch_size), seed)
    print(parity)
    if not parity.ok:
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    """Add the commands of this module to `app`."""
    app.command()(explain)
    app.command()(check)


def _inside(activations: dict[str, int], names: list[str]) -> int:
    prefixes = tuple(f"{name}." for name in names)
    return sum(nbytes for module, nbytes in activations.items() if module in names or module.startswith(prefixes))
