"""`ckpt-ft max-length`: the longest sequence that fits a card, under one policy or the best of several."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_ft.errors import UserError, WorkFailed
from ckpt_ft.export.holders import holders_table
from ckpt_ft.memory.gpus import calibrated, gpu_of
from ckpt_ft.spec.command import command_for
from ckpt_ft.spec.defaults import LORA_R
from ckpt_ft.spec.flags import words_of
from ckpt_ft.spec.training_spec import MOST, TrainingSpec
from ckpt_ft.tables import Table, print_table
from ckpt_ft.units import format_at_least, format_bytes, format_number

from .console import progress, stdout
from .params import AsJson, takes_spec
from .planning import Margin

if TYPE_CHECKING:
    from ckpt_ft.planning.max_length import MaxLength

_ANY = 16  # tokens of the batches that the workload is built with; the search makes longer ones


@takes_spec("policy", "seq_length")
def max_length(
    spec: TrainingSpec,
    policy: Annotated[str, typer.Option("--policy", help="e.g. full,head; auto for the best of several")] = "auto",
    margin: Margin = "",
    as_json: AsJson = False,
) -> None:
    """Predict the longest sequence that fits, without a GPU and without weights.

    Exit code 1 if not even a short sequence fits. Real steps prove a length: recipes/llm.py --find_max_length, and
    find_max_length for a loop of your own.
    """
    from ckpt_ft.planning.max_length import LADDER, predict_max_length
    from ckpt_ft.workloads.load import load, with_task
    from ckpt_ft.workloads.model_config import beyond_note, position_limit, with_rope_scaling

    if spec.data.images:
        raise UserError(f"--images {spec.data.images}: the longest sequence is searched for text alone; leave it out")
    gpu = gpu_of(spec.host.device)
    device = gpu.name if gpu else "cpu"
    with progress(f"building {spec.model.name} from its config") as say:
        workload = load(spec.edit(seq_length=_ANY), gpu or "cpu")
        if "seq_length" not in workload.shape:
            raise UserError(f"the batches of {spec.model.name}, of kind '{workload.kind}', hold no sequences")
        found = predict_max_length(
            workload, LADDER if policy == "auto" else (policy,), spec.host.budget, batch_size=spec.data.batch_size,
            margin=margin or None, report=say, launches=spec.launch.launches,
            most=position_limit(workload.model) or MOST, host_memory=spec.host.host_memory, jobs=0,
        )  # fmt: skip
    if not found.length:
        less = {"load_in_4bit": True} if spec.adapter.trains else {"lora_r": LORA_R}
        words = ["ckpt-ft", "max-length", *words_of(spec.edit(**less), without=("seq_length",))]
        leaner = "" if spec.quantisation.bits else f"; try {shlex.join(words)}"
        raise WorkFailed(
            f"{spec.model.name} on {device}: not even {found.granularity} tokens fit in "
            f"{format_bytes(found.room.budget)}; the smallest budget that would do is "
            f"{format_at_least(found.needed)}{leaner}"
        )
    longest, config = found.ladder[0], workload.model.config
    picked = spec.edit(policy=longest.policy, launch=longest.launch)
    command = command_for(with_rope_scaling(picked, config, longest.length), workload.kind)
    beyond = beyond_note(config, spec.model.rope_scaling, found.length)
    found = replace(found, notes=[*found.notes, *([beyond] if beyond else [])])
    spec = with_task(spec)
    if as_json:
        print(json.dumps({"model": spec.title, "device": device, **asdict(found), "command": command}, indent=2))
        return
    console = stdout()
    print_table(_ladder(spec, found, device), console)
    if found.holders:
        print_table(holders_table(found.holders, found.ladder[0].peak_allocated), console)
    for policy, reason in found.rejected.items():
        console.print(f"not possible: {reason if policy in reason else f'{policy}: {reason}'}", markup=False)
    for note in (*found.notes, *["~: scaled from shorter sequences"] * any(one.scaled for one in found.ladder)):
        console.print(f"note: {note}", markup=False)
    console.print(f"train the first of these: {command}", markup=False, soft_wrap=True)


def _ladder(spec: TrainingSpec, found: MaxLength, device: str) -> Table:
    """One row per policy: how long, at what memory and speed."""
    by_launch = bool(spec.launch.launches) or len({one.launch for one in found.ladder}) > 1
    rows = [
        (
            *([one.launch.sharing if one.launch else ""] if by_launch else []),
            one.policy,
            f"{'~' * one.scaled}{one.length:,}",
            format_bytes(one.peak_allocated),
            format_bytes(one.peak_reserved),
            format_number(one.seconds),
            format_number(one.tokens_per_second),
        )
        for one in found.ladder
    ]
    nominal = "nominal " if device == "cpu" and calibrated("cpu") is None else ""
    header = ("policy", "tokens", "peak allocated", "reserved", f"{nominal}s/step", f"{nominal}tokens/s")
    several = spec.launch.launches or ([spec.launch.launch] if spec.launch.launch else [])
    on = f"{several[0].processes} x {device}" if several and several[0] else device
    title = f"{spec.title} on {on}: longest at batch {found.batch_size}"
    words = (0, 1) if by_launch else (0,)
    return Table(title, (*(["launch"] if by_launch else []), *header), rows, words)
