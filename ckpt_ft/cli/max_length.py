"""`ckpt-ft max-length`: the longest sequence that fits a card, under one policy or the best of several."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_ft.errors import UserError, WorkFailed
from ckpt_ft.export.holders import holders_table
from ckpt_ft.memory.gpus import calibrated, gpu_of
from ckpt_ft.planning.methods import METHODS, method_of
from ckpt_ft.spec.command import command_for
from ckpt_ft.spec.defaults import LORA_R
from ckpt_ft.spec.flags import words_of
from ckpt_ft.spec.training_spec import MOST, TrainingSpec
from ckpt_ft.tables import DASH, Table, print_table
from ckpt_ft.units import format_at_least, format_bytes, format_number

from .console import progress, stdout
from .params import AsJson, takes_spec
from .planning import Margin

if TYPE_CHECKING:
    from ckpt_ft.planning.max_length import MaxLength, NextTerm

# The columns of --table, by their memory.
_CARDS = ("rtx-4090", "a100-40gb", "h100", "h200")
_ANY = 16  # tokens of the batches that the workload is built with; the search makes longer ones
_OF_TABLE = "full,head"


@takes_spec("policy", "seq_length")
def max_length(
    spec: TrainingSpec,
    policy: Annotated[str, typer.Option("--policy", help="e.g. full,head; auto for the best of several")] = "auto",
    table: Annotated[
        bool, typer.Option("--table", help="full fine-tuning, LoRA and QLoRA on cards of 24, 40, 80 and 141 GB")
    ] = False,
    margin: Margin = "",
    as_json: AsJson = False,
) -> None:
    """Predict the longest sequence that fits, without a GPU and without weights.

    Exit code 1 if not even a short sequence fits. Real steps prove a length: recipes/llm.py --find_max_length, and
    find_max_length for a loop of your own.
    """
    from ckpt_ft.planning.max_length import LADDER
    from ckpt_ft.workloads.load import with_task

    policies = LADDER if policy == "auto" else (policy,)
    if table:
        _print_table(spec, (_OF_TABLE,) if policy == "auto" else policies, margin, as_json)
        return
    with progress() as say:
        found, command = _find(spec, policies, margin, say, jobs=0, next_term=policy != "auto")
    gpu = gpu_of(spec.host.device)
    device = gpu.name if gpu else "cpu"
    if not found.length:
        less = {"load_in_4bit": True} if spec.adapter.trains else {"lora_r": LORA_R}
        words = ["ckpt-ft", "max-length", *words_of(spec.edit(**less), without=("seq_length",))]
        leaner = "" if spec.quantisation.bits else f"; try {shlex.join(words)}"
        raise WorkFailed(
            f"{spec.model.name} on {device}: not even {found.granularity} tokens fit in "
            f"{format_bytes(found.room.budget)}; the smallest budget that would do is "
            f"{format_at_least(found.needed)}{leaner}"
        )
    spec = with_task(spec)
    if as_json:
        print(json.dumps({"model": spec.title, "device": device, **asdict(found), "command": command}, indent=2))
        return
    console = stdout()
    print_table(_ladder(spec, found, device), console)
    if found.holders:
        print_table(holders_table(found.holders, found.ladder[0].peak_allocated), console)
    if found.next_term is not None:
        console.print(_next_term(found.next_term, found.length), markup=False)
    for policy, reason in found.rejected.items():
        console.print(f"not possible: {reason if policy in reason else f'{policy}: {reason}'}", markup=False)
    for note in (*found.notes, *["~: scaled from shorter sequences"] * any(one.scaled for one in found.ladder)):
        console.print(f"note: {note}", markup=False)
    console.print(f"train the first of these: {command}", markup=False, soft_wrap=True)


def _find(
    spec: TrainingSpec, policies: tuple[str, ...], margin: str, say: Callable[[str], None], **search: Any
) -> tuple[MaxLength, str]:
    """The longest sequence, and the command that trains on it. search: for `predict_max_length`."""
    from ckpt_ft.planning.max_length import predict_max_length
    from ckpt_ft.workloads.load import load
    from ckpt_ft.workloads.model_config import beyond_note, position_limit, with_rope_scaling

    if spec.data.images:
        raise UserError(f"--images {spec.data.images}: the longest sequence is searched for text alone; leave it out")
    gpu = gpu_of(spec.host.device)
    say(f"building {spec.model.name} from its config")
    workload = load(spec.edit(seq_length=_ANY), gpu or "cpu")
    if "seq_length" not in workload.shape:
        raise UserError(f"the batches of {spec.model.name}, of kind '{workload.kind}', hold no sequences")
    found = predict_max_length(
        workload, policies, spec.host.budget, batch_size=spec.data.batch_size, margin=margin or None, report=say,
        launches=spec.launch.launches, most=position_limit(workload.model) or MOST, host_memory=spec.host.host_memory,
        **search,
    )  # fmt: skip
    beyond = beyond_note(workload.model.config, spec.model.rope_scaling, found.length)
    found = replace(found, notes=[*found.notes, *([beyond] if beyond else [])])
    if not found.length:
        return found, ""
    longest = found.ladder[0]
    picked = spec.edit(policy=longest.policy, launch=longest.launch)
    return found, command_for(with_rope_scaling(picked, workload.model.config, longest.length), workload.kind)


def _ladder(spec: TrainingSpec, found: MaxLength, device: str) -> Table:
    """One row per policy: how long, at what memory and speed."""
    rows = [
        (
            *([one.launch.sharing if one.launch else ""] if spec.launch.launches else []),
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
    words = (0, 1) if spec.launch.launches else (0,)
    return Table(title, (*(["launch"] if spec.launch.launches else []), *header), rows, words)


def _next_term(more: NextTerm, length: int) -> str:
    """What the next term would give, as a sentence."""
    longer = f"{more.longest.length / length:.2g} times as long ({more.longest.length:,} tokens)"
    return f"with '{more.term}': {longer}, {100 * max(more.slower, 0):.0f} % slower at {length:,} tokens"


def _print_table(spec: TrainingSpec, policies: tuple[str, ...], margin: str, as_json: bool) -> None:
    """Print the longest sequence of each method on each card."""
    from ckpt_ft.planning.tracing import run_tasks

    cards = (spec.host.device,) if spec.host.device else _CARDS
    cells = [(method, card) for method in METHODS for card in reversed(cards)]  # those that take long come first
    tasks = [partial(_length, method_of(spec.edit(device=card), method), policies, margin) for method, card in cells]
    lengths: dict[str, dict[str, int]] = {method: dict.fromkeys(cards, 0) for method in METHODS}
    with progress() as say:
        for done, (number, length) in enumerate(run_tasks(tasks, 0), 1):
            method, card = cells[number]
            lengths[method][card] = length
            say(f"{done} of {len(cells)}: {method} on {card}: {length:,} tokens")
    if as_json:
        print(json.dumps({"model": spec.model.name, "policies": policies, "tokens": lengths}, indent=2))
        return
    rows = [
        (method, *(f"{length:,}" if length else DASH for length in found.values()))
        for method, found in lengths.items()
    ]
    title = f"{spec.model.name} under '{policies[0]}', batch {spec.data.batch_size}, {spec.precision.dtype}: tokens"
    print_table(Table(title, ("method", *cards), rows), stdout())


def _length(spec: TrainingSpec, policies: tuple[str, ...], margin: str, tell: Callable[[str], None]) -> int:
    """The longest sequence of one cell of the table, searched for by this process alone."""
    return _find(spec, policies, margin, tell, jobs=1)[0].length
