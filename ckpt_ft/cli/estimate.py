"""`ckpt-ft estimate` and `ckpt-ft report`: what one training step costs, and what a run has cost."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_ft.errors import UserError
from ckpt_ft.export.holders import holders_table
from ckpt_ft.memory.gpus import gpu_of
from ckpt_ft.planning.results import Estimate, Suggestions
from ckpt_ft.spec.flags import on_gpus, words_of
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.tables import DASH, Table, print_table
from ckpt_ft.units import format_bytes

from .answer_cache import AnswerCache, question_of
from .console import progress, stdout
from .params import ONE_LAUNCH, AsJson, Html, cards_of, takes_spec, writable

if TYPE_CHECKING:
    from rich.console import Console


Snapshot = Annotated[
    str,
    typer.Option("--snapshot", callback=writable, help="write the step for pytorch.org/memory_viz here (a pickle)"),
]
Perfetto = Annotated[
    str, typer.Option("--perfetto", callback=writable, help="write the step for ui.perfetto.dev here (JSON)")
]


@takes_spec(*ONE_LAUNCH, counts=True)
def estimate(
    spec: TrainingSpec,
    others: Sequence[TrainingSpec] = (),
    dataset: Annotated[
        str,
        typer.Option("--dataset", help="Hub id or local file whose longest row, up to --seq-length, is the step's"),
    ] = "",
    html: Html = "",
    snapshot: Snapshot = "",
    perfetto: Perfetto = "",
    as_json: AsJson = False,
) -> None:
    """Predict peak memory and time of one training step, without a GPU and without weights.

    If the step does not fit, the command lists changes that would make it fit, each with its time cost. Several cards,
    as in --device t4,rtx-4090, or several models, as in gpt2,Qwen3-0.6B, are compared, a row for each.
    """
    given = {"--html": html, "--snapshot": snapshot, "--perfetto": perfetto}
    files = {flag: Path(file).resolve() for flag, file in given.items() if file}
    if "," in spec.host.device or others:
        if files or dataset:
            raise UserError("estimate: files and --dataset are for one model and one --device; give one")
        _compare([on_gpus(one, *one.launch.launches[-1:]) for one in (spec, *others)], as_json)
        return
    if dataset:
        spec = _with_rows(dataset, spec)
    gpu = gpu_of(spec.host.device)
    if perfetto and gpu is None:
        raise UserError(f"--perfetto {perfetto}: a CPU's speed is not modelled; give a GPU by --device")
    if len({*files.values()}) < len(files):
        raise UserError(f"{' and '.join(files)}: each needs a file of its own")
    if spec.launch.launches:
        spec = _on_fewest(spec)
    cache = AnswerCache("estimate", {**question_of(spec), "gpu": gpu}, Estimate.from_json)
    found, trace = None if files else cache.get(), None
    if found is not None and not as_json:
        print_figures(found)
    if found is None:
        from ckpt_ft.planning.estimate import traced_estimate, with_suggestions

        with progress() as say:
            found, trace = traced_estimate(spec, say)
        if not as_json:  # what would fit takes longer
            print_figures(found)
        with progress() as say:
            found = with_suggestions(spec, found, trace, say)
        cache.put(json.dumps(asdict(found)))
    if dataset:
        found = replace(found, command=found.command.replace("DATASET", shlex.quote(dataset)))
    if as_json:
        room = {"headroom": found.headroom, "host_headroom": found.host_headroom}
        print(json.dumps({**asdict(found), **room, "left_out": spec.host.left_out}, indent=2))
    else:
        print_advice(found, spec)
    if trace is not None and html:  # after the answer, which a full disk does not lose
        from ckpt_ft.export.page import estimate_page

        estimate_page(found, trace).write(html)
    if trace is not None and snapshot:
        trace.to_snapshot(snapshot)
    if trace is not None and perfetto:
        trace.to_perfetto(perfetto)


def _on_fewest(spec: TrainingSpec) -> TrainingSpec:
    """Returns `spec`, whose file does not say how many GPUs, on the fewest that it fits on; prints a table of them."""
    from ckpt_ft.planning.estimate import estimates_of

    each = [on_gpus(spec, launch) for launch in spec.launch.launches]
    with progress() as say:
        found = estimates_of(each, say)
    title = "the file does not say on how many GPUs; --processes chooses"
    rows = [((str(launch.processes),), one) for launch, one in zip(spec.launch.launches, found, strict=True)]
    print_table(estimates_table(title, ("GPUs",), rows), stdout(sys.stderr))
    return next((one for one, estimate in zip(each, found, strict=True) if (estimate.headroom or 0) >= 0), each[-1])


def estimates_table(title: str, heads: tuple[str, ...], found: Iterable[tuple[tuple[str, ...], Estimate]]) -> Table:
    """A row for each estimate; `heads` are those of the cells before its figures."""
    rows = []
    for cells, one in found:
        spare = one.headroom or 0
        left = f"{'-' if spare < 0 else ''}{format_bytes(abs(spare))}"
        fits = (DASH, DASH) if one.headroom is None else ("yes" if spare >= 0 else "no", left)
        took = DASH if one.seconds is None else f"{one.seconds:.3f}"
        peaks = format_bytes(one.peak_allocated), format_bytes(one.peak_reserved)
        rows.append((*cells, *fits, *peaks, took, one.bound or DASH))
    columns = ("fits", "to spare", "peak allocated", "peak reserved", "seconds per step", "bound by")
    return Table(title, (*heads, *columns), rows, text=(*range(len(heads) + 1), len(heads) + 5))


def _with_rows(dataset: str, spec: TrainingSpec) -> TrainingSpec:
    """`spec` with sequences as long as the longest row of a dataset; prints how long the rows are."""
    from ckpt_ft.training.text import dataset_lengths

    with progress(f"reading {dataset}"):
        lengths = dataset_lengths(dataset, spec.model.name, spec.data.tokens)
    common = f"half of its {sum(lengths.rows):,} rows have at most {lengths.quantile(0.5):,} tokens"
    print(f"note: the longest row of {dataset} has {lengths.longest:,} tokens, up to --seq-length; {common}",
          file=sys.stderr)  # fmt: skip
    return spec.edit(seq_length=max(lengths.longest, 2), **({} if spec.data.rows == "packed" else {"rows": "padded"}))


def _compare(specs: Sequence[TrainingSpec], as_json: bool) -> None:
    """Print the figures of the step of each of several models on each of several cards, a row for each."""
    from ckpt_ft.planning.estimate import estimates_on

    cards = cards_of(specs[0].host.device)
    with progress() as say:
        found = [one for spec in specs for one in estimates_on(spec, cards, say)]
    if as_json:
        print(json.dumps([{**asdict(one), "headroom": one.headroom} for one in found], indent=2))
        return
    title = f"policy {found[0].policy}, batch {found[0].batch_size}, predicted"
    rows = [((one.model.rpartition("/")[2], one.device), one) for one in found]
    console, several = stdout(), len(specs) > 1
    print_table(estimates_table(title, ("model", "device"), rows), console)
    fitting = sorted((one for one in found if (one.headroom or 0) >= 0), key=lambda one: one.seconds or 0)
    for spec in specs:
        fast = next((one for one in fitting if one.model == spec.title and one.command), None)
        if fast is not None:
            on = f", fastest on {fast.device}" if len(cards) > 1 else ""
            console.print(f"train {'it' if not several else fast.model}{on}: {fast.command}", markup=False,
                          soft_wrap=True)  # fmt: skip
    if not fitting:
        console.print("fits on none of these cards as it is")
    if several or specs[0].launch.asked:  # `where` chooses launches itself
        return
    words = words_of(specs[0], without=("policy", "batch_size", "device"))
    more = shlex.join(["ckpt-ft", "where", *words, "--device", ",".join(card.name for card in cards if card)])
    console.print(f"other methods and policies on these cards: {more}", markup=False, soft_wrap=True)


def report(
    path: Annotated[Path, typer.Argument(help="memory_report.json, or the directory that holds it")], html: Html = ""
) -> None:
    """Print a memory report that a recipe wrote."""
    from ckpt_ft.memory.measure.report import MemoryReport

    found = MemoryReport.from_json(path)
    found.print()
    if html:
        found.to_html(html)


def print_figures(result: Estimate) -> None:
    """Print whether the step fits, and the figures of an estimate."""
    console = stdout()
    shape = "".join(f"{key.replace('_', ' ')} {value}, " for key, value in result.shape.items())
    launched = f", {result.launch}: this is each GPU" if result.launch else ""
    said = f"{result.model}: policy {result.policy}, batch {result.batch_size}, {shape}on {result.device}{launched}"
    console.print(said, markup=False)
    for verdict in result.verdicts:
        console.print(verdict)
    if result.verdicts:
        console.print()
    print_table(Table("", ("predicted", ""), list(_figures(result))), console)
    print_table(holders_table(result.holders, result.peak_allocated), console)
    for note in result.notes:
        console.print(f"note: {note}", markup=False)
    sys.stdout.flush()


def print_advice(result: Estimate, spec: TrainingSpec) -> None:
    """Print the command that trains as `result` says, or those that would fit."""
    console = stdout()
    if result.answer is not None and result.answer.ways:
        print_ways(result.answer, console)
        quickest = min(result.answer.ways, key=lambda way: way.slower)
        spec = spec.edit(**{k: value for k, value in quickest.edits.items() if k not in ("policy", "batch_size")})
    elif result.answer is not None:
        weights = sum(result.at_peak.get(category, 0) for category in ("parameters", "gradients", "optimizer"))
        shared = "; several GPUs share a model with --launch fsdp2 --processes 2"
        helps = not result.launch and 2 * weights > (result.capacity or 0)
        least = format_bytes(result.answer.needed)
        console.print(f"nothing that was tried fits: the leanest needs {least}{shared if helps else ''}")
    elif result.command:
        console.print(f"train it: {result.command}", markup=False, soft_wrap=True)
    elif spec.trainer.trainer:
        console.print(
            f'train it: in your script with TRL, ACCallback("{result.policy}").attach(trainer)', markup=False
        )
    elif "resolution" in result.shape and spec.precision.dtype != "float32":
        console.print(
            "no recipe trains so: recipes for images take --mixed-precision; leave --dtype out for a command"
        )
    if result.answer is not None:
        words = ["ckpt-ft", "plan", *words_of(spec, without=("policy", "batch_size"))]
        console.print(f"more to choose from: {shlex.join(words)}", markup=False, soft_wrap=True)


def print_ways(answer: Suggestions, console: Console) -> None:
    """Print changes under which the step fits, each with its command."""
    print_table(answer.table, console)
    for way in answer.ways:
        console.print(f"{way.change}:\n  {way.command}", markup=False, soft_wrap=True)


def _figures(result: Estimate) -> Iterator[tuple[str, str]]:
    for phase, nbytes in result.peaks.items():
        yield f"peak allocated, {phase}", format_bytes(nbytes)
    yield "peak allocated", format_bytes(result.peak_allocated)
    for category, nbytes in result.at_peak.items():
        if nbytes:
            yield f"  {category}", format_bytes(nbytes)
    yield "peak reserved", format_bytes(result.peak_reserved)
    if result.context:
        yield f"CUDA context{' and NCCL' if result.launch else ''}", format_bytes(result.context)
    if result.peak_host:
        yield f"host memory{' of each process' if result.launch else ''}", format_bytes(result.peak_host)
        for category, nbytes in (*result.at_host_peak.items(), *result.host_kinds.items()):
            yield f"  {category}", format_bytes(nbytes)
    if result.seconds is not None:
        without = " without generation" if "generation" in result.peaks else ""
        yield f"seconds per step{without}", f"{result.seconds:.3f}"
        for part, seconds in result.seconds_parts.items():
            yield f"  {part}", f"{seconds:.3f}"
        yield "  bound by", result.bound
