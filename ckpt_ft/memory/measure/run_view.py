"""RunView: a run as the page draws it: what each rank measured in each phase, beside what was predicted."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ckpt_ft.export.page import Figure, Page, Section
from ckpt_ft.export.step_page import STEP_TITLE, StepView
from ckpt_ft.memory.record.events import PHASES
from ckpt_ft.units import format_bytes

from .report_tables import headline, lines, tables

if TYPE_CHECKING:
    from .report import History, MemoryReport, Prediction, RankMemory


@dataclass(frozen=True)
class RankView:
    """What a rank measured and what was predicted for it.

    measured, predicted: "forward", ..., "reserved" -> bytes; one is missing where it is not known.
    """

    rank: int
    device: str
    measured: dict[str, int]
    predicted: dict[str, int]
    history: History


@dataclass(frozen=True)
class RunView:
    """Each rank; `figures` are those that any has: phases, then "reserved"."""

    ranks: list[RankView]
    figures: list[str]


def run_view(report: MemoryReport) -> RunView:
    """What a report knows of its run."""
    ranks = [_rank(rank, _prediction(rank)) for rank in report.ranks]
    known = {name for rank in ranks for name in (*rank.measured, *rank.predicted)}
    return RunView(ranks, [name for name in (*PHASES, "reserved") if name in known])


def report_page(report: MemoryReport, step: StepView | None) -> Page:
    """The page of a report. `step`: every allocation of the step; without it the timeline in short."""
    sections = [Section("figures", "", _figures(report)), Section("run", "The run", run_view(report))]
    if step is not None:
        sections.append(Section("step", f"{STEP_TITLE}, {step.source}", step))
    elif report.timeline is not None:
        timeline = {**asdict(report.timeline), "svg": report.timeline.svg(1230, 440)}
        sections.append(Section("timeline", f"{STEP_TITLE}, {report.timeline.source}", timeline))
    sections.append(Section("tables", "The report", list(tables(report))))
    facts = report.provenance
    versions = ", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items())
    made = f"Made by {facts.get('command', '')} with {versions} on {facts.get('machine')}."
    return Page("Memory report", headline(report), sections, " ".join([*lines(report), made]))


def _prediction(rank: RankMemory) -> Prediction | None:
    """What was predicted for `rank`; a prediction for a card says nothing of a CPU."""
    predicted = rank.predicted
    return predicted if predicted and (predicted.device == "cpu") == (rank.device == "cpu") else None


def _rank(rank: RankMemory, predicted: Prediction | None) -> RankView:
    measured = {phase: figures["allocated"] for phase, figures in rank.peaks.items() if "allocated" in figures}
    reserved = rank.peak("reserved")
    if reserved is not None:
        measured["reserved"] = reserved
    expected = {}
    if predicted is not None:
        expected = dict(predicted.peaks)
        if predicted.reserved is not None:
            expected["reserved"] = predicted.reserved
    return RankView(rank.rank, rank.device, measured, expected, rank.history)


def _figures(report: MemoryReport) -> list[Figure]:
    fullest, several = report.fullest, len(report.ranks) > 1
    where = f"rank {fullest.rank}, the fullest of {len(report.ranks)}" if several else fullest.device
    found = [Figure("peak allocated, measured", format_bytes(fullest.peak() or 0), where)]
    predicted = _prediction(fullest)
    if predicted is not None:
        peak = fullest.peak()
        error = f"{100 * (predicted.allocated / peak - 1):+.1f} % beside what was measured" if peak else ""
        found.append(Figure("peak allocated, predicted", format_bytes(predicted.allocated), error))
    reserved = fullest.peak("reserved")
    if reserved is not None:
        found.append(Figure("peak reserved, measured", format_bytes(reserved)))
    if fullest.seconds is not None:
        found.append(Figure("seconds a step", f"{fullest.seconds:.3g}", f"{fullest.sampled} steps measured"))
    return found
