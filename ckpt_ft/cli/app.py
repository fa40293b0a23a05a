"""`ckpt-ft`: what a training step costs, which policy fits, and whether it changes any number, from the command line.

Exit codes: 0 done, 1 the work failed (parity broken), 2 the input is wrong (one line on stderr).
"""

from __future__ import annotations

import gc
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import ckpt_ft
from ckpt_ft.errors import UserError, one_line, run
from ckpt_ft.export.holders import holders_table
from ckpt_ft.files import check_writable
from ckpt_ft.memory.gpus import GPU, gpu_of
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.synonyms import typed_as
from ckpt_ft.tables import Table, print_table
from ckpt_ft.units import format_bytes

from . import known, merge, planning, policies, recipe
from .asked import plan_command, takes
from .console import progress, stdout
from .estimate import Estimate
from .kept import Kept, asked_of
from .options import (
    ONE_LAUNCH,
    AsJson,
    BatchSize,
    Model,
    PolicyOption,
    memory,
    parse_policy,
)
from .pages import Files, Html, Perfetto, Snapshot
from .training_file import with_file

if TYPE_CHECKING:
    from rich.console import Console

    from ckpt_ft.memory.record.trace import StepTrace
    from ckpt_ft.planning.results import Suggestions
    from ckpt_ft.planning.tracing import Report
    from ckpt_ft.workloads.workload import Workload

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help=__doc__,
    context_settings={"token_normalize_func": typed_as},
)

_UsageError: Any = typer.BadParameter.__mro__[1]  # click's, or the copy of click inside newer typers


def main() -> None:
    """The console script."""
    for library in ("transformers", "diffusers"):
        logging.getLogger(library).setLevel(logging.ERROR)
    logging.getLogger("torch._subclasses").setLevel(logging.CRITICAL)  # the error that follows is one line of ours
    gc.disable()  # a command lives for seconds and makes no cycles worth looking for among its millions of objects
    try:
        run(_main)
    finally:
        gc.freeze()  # nor at exit
        gc.enable()


def _main() -> int:
    try:
        return app(with_file(sys.argv[1:]), standalone_mode=False) or 0
    except typer.Exit as stop:
        return stop.exit_code
    except _UsageError as error:
        raise UserError(one_line(error.format_message())) from error


def _say_version(asked: bool) -> None:
    if asked:
        print(ckpt_ft.__version__)
        raise typer.Exit


@app.callback(help=__doc__)
def _common(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_say_version, help="print the version and stop")
    ] = False,
) -> None:
    pass


@app.command()
@takes(ONE_LAUNCH)
def estimate(
    model: Model,
    policy: PolicyOption = "none",
    batch_size: BatchSize = 1,
    capacity: Annotated[
        str, typer.Option("--capacity", "--budget", help="memory that there is, e.g. 24GiB; by default the device's")
    ] = "",
    *,
    gpu: GPU | None,
    spec: TrainingSpec,
    html: Html = "",
    snapshot: Snapshot = "",
    perfetto: Perfetto = "",
    as_json: AsJson = False,
    context: typer.Context,
) -> None:
    """Predict peak memory and time of one training step, without a GPU and without weights.

    Where it does not fit, the change that costs least is looked for, and what `ckpt-ft plan` is asked is printed.
    In place of MODEL, --config FILE takes model and flags from a YAML of a recipe, TRL or axolotl.
    """
    parse_policy(policy)
    files = Files(gpu, html, snapshot, perfetto)
    limit = memory("--capacity", capacity) or (gpu.memory if gpu else None)
    question = {**asked_of(model, spec), "policy": policy, "batch_size": batch_size, "gpu": gpu, "limit": limit}
    kept = Kept("estimate", question, Estimate.from_json)
    result = None if files.any else kept.get()
    if result is None:
        with progress() as say:
            result, trace = _made(model, spec, policy, batch_size, gpu, limit, say)
            files.write(result, trace)
        kept.put(json.dumps(asdict(result)))
    if as_json:
        print(json.dumps({**asdict(result), "headroom": result.headroom}, indent=2))
    else:
        _print_estimate(result, plan_command(context))


@app.command()
def report(
    path: Annotated[Path, typer.Argument(help="memory_report.json, or the directory that holds it")], html: Html = ""
) -> None:
    """Print a memory report that a recipe wrote."""
    from ckpt_ft.memory.measure.report import MemoryReport

    file = path / "memory_report.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{path}: no memory_report.json here; recipes write it to their --output_dir")
    if html:
        check_writable(html, "--html")
    found = MemoryReport.from_json(file)
    found.print()
    if html:
        found.to_html(html)


def _made(
    model: str, spec: TrainingSpec, policy: str, batch: int, gpu: GPU | None, limit: int | None, say: Report
) -> tuple[Estimate, StepTrace]:
    """The answer, and the trace that it is read off."""
    from ckpt_ft.planning.budget import MemoryBudget
    from ckpt_ft.planning.suggestions import suggest
    from ckpt_ft.workloads.load import load

    say(f"building {model} from its config")
    workload = load(spec.edit(model=model), gpu or "cpu")
    say(f"tracing two steps of {type(workload.model).__name__} for {gpu.name if gpu else 'cpu'}")
    result, trace = _estimate(workload, policy, batch, limit)
    if limit is not None and result.headroom is not None and result.headroom < 0:
        say("looking for what would fit")
        room = MemoryBudget(limit, result.context)
        given = partial(load, device=gpu or "cpu")
        result = replace(result, answer=suggest(given, spec.edit(model=model), result.policy, batch, trace, room))
    return result, trace


def _estimate(workload: Workload, policy: str, batch_size: int, capacity: int | None) -> tuple[Estimate, StepTrace]:
    from ckpt_ft.checkpointing.apply import apply_policy
    from ckpt_ft.memory.distributed.links import nccl_bytes

    applied = apply_policy(workload.model, policy)
    trace = workload.trace(batch_size)
    gpu = gpu_of(workload.device)
    result = Estimate(
        model=workload.name,
        policy=str(applied.policy),
        device=trace.device,
        batch_size=batch_size,
        accumulation=workload.accumulation,
        shape=workload.shape,
        peak_allocated=trace.peak_allocated,
        peak_reserved=trace.peak_reserved,
        peaks=trace.peaks,
        at_peak=trace.at_peak,
        holders=trace.grouped_holders(8),
        seconds=trace.seconds if gpu else None,
        seconds_parts=trace.seconds_parts.parts if gpu else {},
        bound=trace.seconds_parts.bound if gpu else "",
        capacity=capacity,
        context=0 if gpu is None else gpu.context + (0 if workload.launch is None else nccl_bytes(gpu)),
        launch=str(workload.launch or ""),
        notes=trace.notes,
    )
    return result, trace


def _print_estimate(result: Estimate, plan: str) -> None:
    console = stdout()
    shape = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in result.shape.items())
    launched = f", {result.launch}: this is each GPU" if result.launch else ""
    said = f"{result.model}: policy {result.policy}, batch {result.batch_size}, {shape}, on {result.device}{launched}"
    console.print(said, markup=False)
    print_table(Table("", ("predicted", ""), list(_figures(result))), console)
    print_table(holders_table(result.holders, result.peak_allocated), console)
    if result.headroom is not None and result.capacity is not None:
        room = format_bytes(abs(result.headroom))
        verdict = f"fits, {room} to spare" if result.headroom >= 0 else f"does not fit: {room} too much"
        console.print(f"{verdict} of {format_bytes(result.capacity)} (reserved and context counted)")
    if result.answer is not None:
        _print_answer(result.answer, plan, console)
    for note in result.notes:
        console.print(f"note: {note}", markup=False)


def _print_answer(answer: Suggestions, plan: str, console: Console) -> None:
    """What would fit, and the command that looks at more."""
    if answer.ways:
        rows = [(way.change, format_bytes(way.reserved), f"{way.slower:+.0%}") for way in answer.ways]
        print_table(Table("Would fit", ("with", "peak reserved", "time a sample"), rows), console)
    else:
        console.print(
            f"nothing that was tried fits: the leanest needs {format_bytes(answer.needed)}; several GPUs share a "
            "model with --launch fsdp2 --processes 2"
        )
    console.print(f"more to choose from: {plan}", markup=False, soft_wrap=True)


def _figures(result: Estimate) -> Iterator[tuple[str, str]]:
    for phase, nbytes in result.peaks.items():
        yield f"peak allocated, {phase}", format_bytes(nbytes)
    yield "peak allocated", format_bytes(result.peak_allocated)
    for category, nbytes in result.at_peak.items():
        if nbytes:
            yield f"  of it {category}", format_bytes(nbytes)
    yield "peak reserved", format_bytes(result.peak_reserved)
    if result.context:
        yield f"CUDA context{' and NCCL' if result.launch else ''}", format_bytes(result.context)
    if result.seconds is not None:
        yield "seconds per step", f"{result.seconds:.3f}"
        for part, seconds in result.seconds_parts.items():
            yield f"  of it {part}", f"{seconds:.3f}"
        yield "  bound by", result.bound


policies.register(app)
planning.register(app)
known.register(app)
recipe.register(app)
merge.register(app)

if __name__ == "__main__":
    main()
