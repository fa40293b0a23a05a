"""A memory report as tables, Markdown and an HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ckpt_ft.tables import DASH, Table, code_span, markdown_table, print_table
from ckpt_ft.units import format_bytes, format_change

from .holders import holders_table
from .page import STEP_TITLE, Figure, Page, Section
from .timeline import CATEGORY_COLOURS, PHASES

if TYPE_CHECKING:
    from rich.console import Console

    from ckpt_ft.memory.measure.report import MemoryReport, Prediction, RankMemory


def headline(report: MemoryReport) -> str:
    """One line: the policy, the devices, the batch."""
    facts = report.provenance
    device = report.ranks[0].device
    where = device if len(report.ranks) == 1 else f"{len(report.ranks)} x {device}"
    shapes = ", ".join(f"{name} {_size(shape)}" for name, shape in facts.get("shapes", {}).items())
    return " · ".join(filter(None, (f"policy {facts.get('policy') or 'as it is'}", where, shapes)))


def print_report(report: MemoryReport, console: Console | None = None) -> None:
    from rich.console import Console

    console = console or Console()
    console.print(f"Memory: {headline(report)}", style="bold", markup=False, highlight=False)
    for table in tables(report):
        print_table(table, console)
    for line in lines(report):
        console.print(line, markup=False, highlight=False)


def markdown_report(report: MemoryReport) -> str:
    parts = ["# Memory report", headline(report)]
    for table in tables(report):
        parts += [f"## {table.title}", markdown_table(table)]
    parts += lines(report)
    parts.append(_made_by(report, code_span(report.provenance.get("command", ""))))
    return "\n\n".join(parts) + "\n"


def tables(report: MemoryReport) -> Iterator[Table]:
    """The tables that `report` has figures for, in reading order."""
    yield _peaks(report)
    yield _phases(report)
    fullest = report.fullest
    total = sum(fullest.at_peak.values())
    if total:
        order = [name for name in (*CATEGORY_COLOURS, *fullest.at_peak) if fullest.at_peak.get(name)]
        rows = [(name, format_bytes(n := fullest.at_peak[name]), f"{n / total:.0%}") for name in dict.fromkeys(order)]
        yield Table(f"At the peak of rank {fullest.rank}", ("category", "bytes", "share"), rows)
    if fullest.holders:
        yield holders_table(fullest.holders, total)
    yield from _predicted(report)


def lines(report: MemoryReport) -> list[str]:
    """The sentences below the tables."""
    rank = report.fullest
    steps, sampled = rank.steps, rank.sampled
    said = [
        f"Highest of {sampled} measured steps, of {steps} in all."
        if sampled < steps
        else f"Highest of {steps} steps.",
        *_peak_step(rank),
        *(f"{name.capitalize()} ran after {_steps(after)}." for name, after in rank.between.items()),
    ]
    if rank.predicted is not None and any(rank.peaks[p]["allocated"] > now for p, now in rank.fullest.items()):
        said.append("Predicted phases are those of the step with the highest peak; others rose higher in other steps.")
    batch = report.max_batch
    if batch is not None:
        proved = "" if batch.proved is None else f", proved {batch.proved}"
        said.append(f"Largest batch on {batch.device}: predicted {batch.predicted}{proved}.")
    return said + report.notes


def _peak_step(rank: RankMemory) -> Iterator[str]:
    """Where in the run the peak was, and how its batch compares with the others."""
    highest = max(rank.peaks, key=lambda name: rank.peaks[name].get("allocated", 0), default="")
    where = f"in the {highest}" if highest not in PHASES else f"at step {rank.step}"
    if rank.step and rank.batch:
        name, shape = next(iter(rank.batch.items()))
        batch = f", {name} {_size(shape)}" if highest in PHASES else ""
        yield f"Peak {where}{batch}; median batch {_size(rank.median)}."


def _size(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _steps(numbers: Sequence[int]) -> str:
    """Step 4; steps 2 and 4; or for many the first three, the last, and how many."""
    named = [str(number) for number in numbers]
    if len(named) > 4:
        return f"steps {', '.join(named[:3])}, ..., {named[-1]} ({len(named)} times)"
    return f"step {named[0]}" if len(named) == 1 else f"steps {', '.join(named[:-1])} and {named[-1]}"


def _run(report: MemoryReport) -> dict[str, Any]:
    """The data of the run's bars and history: the peaks of each rank that are known, by phase, and "reserved"."""
    ranks: list[dict[str, Any]] = []
    for rank in report.ranks:
        predicted = _prediction(rank)
        measured = {phase: figures.get("allocated") for phase, figures in rank.peaks.items()}
        peaks = {
            "measured": {**measured, "reserved": rank.peak("reserved")},
            "predicted": {**predicted.peaks, "reserved": predicted.reserved} if predicted else {},
        }
        known = {kind: {name: n for name, n in found.items() if n is not None} for kind, found in peaks.items()}
        ranks.append({"rank": rank.rank, "history": rank.history, "between": rank.between, **known})
    names = {name for rank in ranks for name in (*rank["measured"], *rank["predicted"])}
    return {"ranks": ranks, "figures": [name for name in (*_names(report.ranks), "reserved") if name in names]}


def report_page(report: MemoryReport, step: dict[str, Any] | None) -> Page:
    """The page of a report. `step`: every allocation of the step; None shows the timeline instead."""
    sections = [Section("figures", "", _figures(report)), Section("run", "The run", _run(report))]
    if step is not None:
        sections.append(Section("step", f"{STEP_TITLE}, {step['source']}", step))
    elif report.timeline is not None:
        sections.append(Section("timeline", f"{STEP_TITLE}, {report.timeline.source}", report.timeline))
    sections.append(Section("tables", "The report", list(tables(report))))
    made = _made_by(report, report.provenance.get("command", ""))
    model = report.provenance.get("model") or ""
    title = f"Memory report{f' of {model}' if model else ''}"
    return Page(title, headline(report), sections, " ".join([*lines(report), made]), _answer(report.fullest))


def _answer(rank: RankMemory) -> str:
    """What was measured beside what was predicted, as a sentence."""
    predicted = _prediction(rank)
    peak = rank.peak() if predicted is None else rank.peak("allocated", predicted.peaks)
    if not peak:
        return ""
    beside = "" if predicted is None else f"; predicted {format_bytes(predicted.allocated)}"
    change = "" if predicted is None else f" ({format_change(predicted.allocated / peak - 1)})"
    return f"the step took {format_bytes(peak)} at its peak, measured{beside}{change}"


def _made_by(report: MemoryReport, command: str) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report.provenance.get("versions", {}).items())
    when = report.provenance.get("date", "")
    return f"Made by {command}{f' on {when}' if when else ''} with {versions} on {report.provenance.get('machine')}."


def _prediction(rank: RankMemory) -> Prediction | None:
    """The prediction for `rank`, unless it is for a GPU and the rank ran on a CPU, or the reverse."""
    predicted = rank.predicted
    return predicted if predicted and (predicted.device == "cpu") == (rank.device == "cpu") else None


def _figures(report: MemoryReport) -> list[Figure]:
    fullest, several = report.fullest, len(report.ranks) > 1
    where = f"rank {fullest.rank}, the fullest of {len(report.ranks)}" if several else fullest.device
    found = [Figure("peak allocated, measured", format_bytes(fullest.peak() or 0), where)]
    predicted = _prediction(fullest)
    if predicted is not None:
        peak = fullest.peak("allocated", predicted.peaks)
        error = f"{format_change(predicted.allocated / peak - 1)} against the measurement" if peak else ""
        found.append(Figure("peak allocated, predicted", format_bytes(predicted.allocated), error))
    reserved = fullest.peak("reserved")
    if reserved is not None:
        found.append(Figure("peak reserved, measured", format_bytes(reserved)))
    if fullest.seconds is not None:
        found.append(Figure("seconds per step", f"{fullest.seconds:.3g}", f"{fullest.sampled} steps measured"))
    return found


def _peaks(report: MemoryReport) -> Table:
    on_gpu = any(rank.peak("reserved") is not None for rank in report.ranks)
    in_host = [name for name in ("resident", "pinned") if any(rank.host.get(name) for rank in report.ranks)]
    rows = []
    for rank in report.ranks:
        row = {"rank": str(rank.rank), "device": rank.device, "allocated": _bytes(rank.peak())}
        row |= {kind: _bytes(rank.peak(kind)) for kind in ("reserved", "active") if on_gpu}
        row["s/step"] = _seconds(rank.seconds)
        row |= {"retries": str(rank.retries), "OOMs": str(rank.ooms)} if on_gpu else {}
        row |= {f"host, {name}": _bytes(rank.host.get(name)) for name in in_host}
        rows.append(row)
    return Table("Peak memory", tuple(rows[0]), [tuple(row.values()) for row in rows], text=(0, 1))


def _phases(report: MemoryReport) -> Table:
    names = _names(report.ranks)
    rows = [
        (str(rank.rank), *(_bytes(rank.peaks.get(phase, {}).get("allocated")) for phase in names))
        for rank in report.ranks
    ]
    return Table("Peak allocated by phase", ("rank", *names), rows)


def _names(ranks: Sequence[RankMemory]) -> list[str]:
    """The phases of a step, then the others that any of `ranks` has."""
    return list(dict.fromkeys([*PHASES, *(name for rank in ranks for name in rank.peaks)]))


def _predicted(report: MemoryReport) -> Iterator[Table]:
    """Prediction against measurement: all figures of the fullest rank, and the peaks of each rank."""
    fullest, several = report.fullest, len(report.ranks) > 1
    if fullest.predicted is not None:
        title = f"Predicted for {fullest.predicted.device}" + (f", rank {fullest.rank}" if several else "")
        yield Table(title, ("", "predicted", "measured", "error"), list(_compared(fullest, fullest.predicted)))
    if not several or not any(rank.predicted for rank in report.ranks):
        return
    kinds = [kind for kind in ("allocated", "reserved") if fullest.peak(kind) is not None]
    rows = []
    for rank in report.ranks:
        row = [str(rank.rank)]
        figures = {} if rank.predicted is None else {name: found for name, *found in _compared(rank, rank.predicted)}
        for kind in kinds:
            predicted, _, error = figures.get(f"peak {kind}", (DASH, DASH, DASH))
            row += [_bytes(rank.peak(kind)), predicted, error]
        rows.append(tuple(row))
    header = [head for kind in kinds for head in (kind, "predicted", "error")]
    yield Table("Predicted for each rank", ("rank", *header), rows)


def _compared(measured: RankMemory, predicted: Prediction) -> Iterator[tuple[str, str, str, str]]:
    """Rows of name, prediction, measurement and relative error. An evaluation is measured, and not predicted."""
    same = (predicted.device == "cpu") == (measured.device == "cpu")
    pairs: list[tuple[str, float | None, float | None]] = [
        ("peak allocated", predicted.allocated, measured.peak("allocated", predicted.peaks)),
        ("peak reserved", predicted.reserved, measured.peak("reserved", predicted.peaks)),
        *(
            (f"peak {p}", predicted.peaks.get(p), measured.fullest.get(p, measured.peaks.get(p, {}).get("allocated")))
            for p in _names([measured])
        ),
        ("peak in host memory", predicted.host or None, None),
        ("  pinned", predicted.pinned or None, measured.host.get("pinned")),
        ("s/step", predicted.seconds, measured.seconds),
    ]
    for name, expected, found in pairs:
        if expected is None:
            continue
        form = _seconds if name == "s/step" else _bytes
        compared = found if same else None
        error = format_change(expected / compared - 1) if compared else DASH
        yield name, form(expected), form(compared), error
    for part, seconds in predicted.seconds_parts.items():
        yield f"  {part}", _seconds(seconds), DASH, DASH
    if predicted.bound:
        yield "  bound by", predicted.bound, DASH, DASH


def _bytes(nbytes: float | None) -> str:
    return DASH if nbytes is None else format_bytes(int(nbytes))


def _seconds(seconds: float | None) -> str:
    return DASH if seconds is None else f"{seconds:.3g}"
