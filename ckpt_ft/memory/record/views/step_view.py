"""StepView: a step as the page draws it (page/): every allocation of it, in columns, and what stands around them.

All of it is figures; what they mean for memory has been worked out here. Columns of whole numbers are a few bytes an
allocation, so that a step of 20,000 events is some hundred KB and nothing has to be left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from ckpt_ft.memory.record.events import CATEGORIES, PHASES
from ckpt_ft.memory.record.holders import short_op, together
from ckpt_ft.memory.record.recorded import Recorded

from .lives import lives, ticks

STEP_TITLE = "Memory over the step"


@dataclass
class StepView:
    """A measured step. A moment is a number of events into it.

    last: the last moment. phases: (moment, phase that begins there). peak: the moment of the peak.
    reserved: (moment, bytes reserved from there on), where they change.
    microseconds: from each moment to the next, on the device; None where its speed is not modelled.
    limit: bytes that the allocator can reserve on `device`; None where no card is meant.
    bytes, category, place, op, phase, made, life: of each allocation, by category and age. `category`, `place`, `op`
        and `phase` count in the texts below. `made` is the moment, less the one above it of its category; `life` is in
        moments, -1 for one that outlives the step.
    group: of each place its number in `groups`: names with a model's repeated layers taken together.
    """

    name: str
    device: str
    source: str
    last: int
    phases: list[tuple[int, str]]
    peak: int
    reserved: list[tuple[int, int]]
    microseconds: list[int] | None
    limit: int | None
    bytes: list[int]
    category: list[int]
    place: list[int]
    op: list[int]
    phase: list[int]
    made: list[int]
    life: list[int]
    categories: list[str]
    places: list[str]
    group: list[int]
    groups: list[str]
    ops: list[str]
    phase_names: list[str]

    @classmethod
    def from_trace(cls, trace: Recorded, name: str = "", limit: int | None = None) -> StepView:
        """The measured step of `trace`; `limit` are the bytes that may be reserved."""
        found = sorted(lives(trace), key=lambda life: CATEGORIES.index(life.storage.category))
        places, groups, ops = _Texts(), _Texts(), _Texts()
        clock = None if trace.device == "cpu" else ticks(trace, trace.schedule())
        numbers = {category: i for i, category in enumerate(CATEGORIES)}
        phase_names = ["", *PHASES]
        view = cls(
            name=name,
            device=trace.device,
            source=trace.source,
            last=len(trace.events) - trace.start,
            phases=[(at - trace.start, phase) for at, phase in trace.phase_marks],
            peak=trace.peak_at - trace.start + 1,
            reserved=_changes(trace),
            microseconds=None if clock is None else [round(1e6 * b) - round(1e6 * a) for a, b in pairwise(clock)],
            limit=limit,
            bytes=[life.nbytes for life in found],
            category=[numbers[life.storage.category] for life in found],
            place=[places.number(life.storage.place) for life in found],
            op=[ops.number(short_op(life.storage.op)) for life in found],
            phase=[phase_names.index(life.storage.phase) for life in found],
            made=_differences((life.storage.category, life.made) for life in found),
            life=[-1 if life.freed is None else life.freed - life.made for life in found],
            categories=list(CATEGORIES),
            places=list(places),
            group=[groups.number(together(place)) for place in places],
            groups=list(groups),
            ops=list(ops),
            phase_names=phase_names,
        )
        return view


class _Texts(dict[str, int]):
    """Texts in the order in which they were first met."""

    def number(self, text: str) -> int:
        return self.setdefault(text, len(self))


def _changes(trace: Recorded) -> list[tuple[int, int]]:
    """(moment, bytes reserved) where they change."""
    start, reserved = trace.start, trace.replay.reserved
    first = reserved[start - 1] if start else 0
    changes = [(0, first)]
    for moment, nbytes in enumerate(reserved[start:], 1):
        if nbytes != changes[-1][1]:
            changes.append((moment, nbytes))
    return changes


def _differences(made: Iterable[tuple[str, int]]) -> list[int]:
    before: dict[str, int] = {}
    differences = []
    for category, moment in made:
        differences.append(moment - before.get(category, 0))
        before[category] = moment
    return differences
