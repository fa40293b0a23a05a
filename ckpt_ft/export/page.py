"""An HTML page as one self-contained file, and the page of a step: every allocation, drawn by the scripts in assets/.

A page has its data as JSON, and the style and scripts that draw it. It opens from disk, and its content security
policy allows no network access. The scripts draw with SVG and one canvas: a chart library would be larger than the
rest of the page, and none draws ten thousand allocations one by one. They get columns of whole numbers: one allocation
takes a few bytes, so a step of 20,000 events takes some hundred KB and nothing is left out.
"""

from __future__ import annotations

import html
import json
import shlex
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from ckpt_ft.files import write
from ckpt_ft.redact import redacted
from ckpt_ft.units import format_bytes, format_number

from .holders import merge_layer_numbers, short_op
from .timeline import CATEGORY_COLOURS, HOST_COLOURS

if TYPE_CHECKING:
    from ckpt_ft.memory.record.trace import StepTrace
    from ckpt_ft.planning.results import Estimate

SCRIPTS = ("base", "step", "chart", "icicle", "table", "step_view", "report", "main")


@dataclass(frozen=True)
class Figure:
    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A section of a page: `kind` names a view in assets/main.js, `data` is the dataclass or list that it draws."""

    kind: str
    title: str
    data: Any


def _asked() -> str:
    name, *words = sys.argv
    today = f"{date.today():%Y-%m-%d}"
    ours = Path(name).name == "ckpt-ft" or Path(name).parent.name == "cli"
    return f"{shlex.join(['ckpt-ft', *redacted(words)])} · {today}" if ours else today


@dataclass
class Page:
    """The content of a page. `answer`: one sentence, which comes first. `made`: what made it, for the footer."""

    title: str
    subtitle: str
    sections: list[Section] = field(default_factory=list)
    made: str = ""
    answer: str = ""
    asked: str = field(default_factory=_asked)

    def html(self) -> str:
        document = json.dumps(vars(self), default=asdict, separators=(",", ":"), ensure_ascii=False)
        # No text can end the <script> element or open a comment.
        safe = document.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
        parts = {
            "title": html.escape(self.title),
            "style": _categories() + _asset("page.css"),
            "script": "\n".join(_asset(f"{name}.js") for name in SCRIPTS),
            "data": safe,
        }
        return Template(_asset("page.html")).substitute(parts)

    def write(self, path: str | Path) -> Path:
        """Write the page to `path`, completely or not at all."""
        return write(path, self.html())


def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _categories() -> str:
    named = {**CATEGORY_COLOURS, **HOST_COLOURS}
    colours = "".join(f"--{name}:light-dark({light},{dark});" for name, (light, dark) in named.items())
    return f":root{{{colours}}}\n"


STEP_TITLE = "Memory over the step"


def step_view(trace: StepTrace, name: str = "", limit: int | None = None, host: bool = False) -> dict[str, Any]:
    """The data of the measured step of `trace` on the device, or in `host` memory by its kinds.

    A moment is the number of events since the step began.
    last: the last moment. phases: (moment, phase that begins there). peak: the moment of the peak.
    reserved: (moment, bytes reserved from there on), where they change.
    microseconds: from each moment to the next, on the device; None if its speed is not modelled.
    limit: bytes that the allocator can reserve on the device; None without a card.
    bytes, category, place, op, phase, made, life: columns with one entry per allocation, sorted by category and age.
        `category`, `place`, `op` and `phase` are positions in the lists of texts below. `made` is the moment of the
        allocation minus that of the entry before it in the same category. `life` is a number of moments, -1 for an
        allocation that outlives the step.
    group: for each place, its position in `groups`: the names with a model's repeated layers merged.
    """
    names = HOST_COLOURS if host else CATEGORY_COLOURS
    column, numbers = "host_kind" if host else "category", {category: i for i, category in enumerate(names)}
    of = [(numbers[getattr(lifetime.storage, column)], lifetime) for lifetime in trace.lifetimes(host)]
    lifetimes = [lifetime for _, lifetime in sorted(of, key=lambda entry: entry[0])]
    storages = [lifetime.storage for lifetime in lifetimes]
    kinds = [getattr(storage, column) for storage in storages]
    places, groups, ops = _Texts(), _Texts(), _Texts()
    times = None if trace.device == "cpu" else trace.moment_times(trace.schedule())
    phase_names = ["", *trace.peaks]
    return {
        "name": name,
        "device": trace.device,
        "source": trace.source,
        "last": len(trace.events) - trace.start,
        "phases": [(at - trace.start, phase) for at, phase in trace.phase_marks],
        "peak": (trace.host_peak_at if host else trace.peak_at) - trace.start + 1,
        "reserved": [] if host else _changes(trace),
        "microseconds": None if times is None else [round(1e6 * b) - round(1e6 * a) for a, b in pairwise(times)],
        "limit": limit,
        "bytes": [lifetime.nbytes for lifetime in lifetimes],
        "category": [numbers[kind] for kind in kinds],
        "place": [places.number(storage.place) for storage in storages],
        "op": [ops.number(short_op(storage.op)) for storage in storages],
        "phase": [phase_names.index(storage.phase) for storage in storages],
        "made": _differences(zip(kinds, (lifetime.made for lifetime in lifetimes), strict=True)),
        "life": [-1 if lifetime.freed is None else lifetime.freed - lifetime.made for lifetime in lifetimes],
        "categories": list(names),
        "places": list(places),
        "group": [groups.number(merge_layer_numbers(place)) for place in places],
        "groups": list(groups),
        "ops": list(ops),
        "phase_names": phase_names,
    }


def step_page(trace: StepTrace, title: str = "", limit: int | None = None) -> Page:
    """The page of `StepTrace.to_html`."""
    name = title or f"a step on {trace.device}"
    return Page(name, f"{trace.source}, {trace.device}", _steps(trace, name, limit))


def _steps(trace: StepTrace, name: str, limit: int | None, host_limit: int | None = None) -> list[Section]:
    """The step on the device, and in host memory if it takes any."""
    found = [Section("step", STEP_TITLE, step_view(trace, name, limit))]
    if trace.peak_host:
        view = step_view(trace, f"{name}, host memory", host_limit, host=True)
        found.append(Section("step", "Host memory over the step", view))
    return found


def estimate_page(result: Estimate, trace: StepTrace) -> Page:
    """The page of `estimate --html`."""
    shape = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in result.shape.items())
    launched = f", {result.launch}: this is each GPU" if result.launch else ""
    limit = None if result.capacity is None else result.capacity - result.context
    return Page(
        f"{result.model} under {result.policy}",
        f"predicted for {result.device}: batch {result.batch_size}, {shape}{launched}",
        [
            Section("figures", "", _estimate_figures(result)),
            *([Section("tables", "Would fit", [result.answer.table])] if result.answer and result.answer.ways else []),
            *_steps(trace, result.model, limit, result.host_capacity),
        ],
        " ".join(f"{note}." for note in result.notes),
        ". ".join(result.verdicts),
    )


def _estimate_figures(result: Estimate) -> list[Figure]:
    found: list[Figure] = []
    if result.headroom is not None and result.capacity is not None:
        fits, room = result.headroom >= 0, format_bytes(abs(result.headroom))
        value = f"{room} {'to spare' if fits else 'too much'}"
        found.append(Figure("fits" if fits else "does not fit", value, f"of {format_bytes(result.capacity)}"))
    phase = max(result.peaks, key=result.peaks.__getitem__)
    found.append(Figure("peak allocated", format_bytes(result.peak_allocated), f"in {phase}"))
    if result.device != "cpu":
        context = f"plus {format_bytes(result.context)} of CUDA context"
        found.append(Figure("peak reserved", format_bytes(result.peak_reserved), context))
    if result.peak_host:
        spare = result.host_headroom
        left = [] if spare is None else [f"{format_bytes(abs(spare))} {'to spare' if spare >= 0 else 'too much'}"]
        kinds = [f"{format_bytes(nbytes)} {kind}" for kind, nbytes in result.host_kinds.items()]
        found.append(Figure("peak in host memory", format_bytes(result.peak_host), ", ".join([*left, *kinds])))
    if result.seconds is not None:
        waits = result.seconds_parts.get("waiting for copies", 0.0)
        waiting = f", {format_number(waits)} of it waiting for copies" if waits else ""
        found.append(Figure("seconds a step", format_number(result.seconds), f"bound by {result.bound}{waiting}"))
    return found


class _Texts(dict[str, int]):
    """A list of distinct texts in the order of their first use."""

    def number(self, text: str) -> int:
        return self.setdefault(text, len(self))


def _changes(trace: StepTrace) -> list[tuple[int, int]]:
    """(moment, bytes reserved from there on), where they change."""
    start, reserved = trace.start, trace.replay.reserved
    after = [reserved[start - 1] if start else 0, *reserved[start:]]
    return [(moment, nbytes) for moment, nbytes in enumerate(after) if not moment or nbytes != after[moment - 1]]


def _differences(made: Iterable[tuple[str, int]]) -> list[int]:
    """Each moment minus the one before it in the same category."""
    before: dict[str, int] = {}
    differences = []
    for category, moment in made:
        differences.append(moment - before.get(category, 0))
        before[category] = moment
    return differences
