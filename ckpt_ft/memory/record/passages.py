"""Where in a record the units of a step are of which most were skipped: the first three of them and the last one ran.

A unit is a block, or as many in a row as it takes until their kinds repeat. A passage is one way through the units, up
in a forward (and in a second run of it), down in a backward. Those skipped are missing between the third and the last.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from .trace import StepTrace

FIRST = 3  # units that run before those that are skipped
SECOND, THIRD, LAST = 1, 2, 3  # of the four that run


class NotPeriodic(Exception):
    """Units do not repeat each other, in the series of these names."""

    def __init__(self, reason: str, names: Collection[str] = ()) -> None:
        super().__init__(reason)
        self.names = set(names)


class Unit(tuple[str, ...]):
    """What the blocks of a unit are called, in order."""

    __slots__ = ()

    def place_of(self, module: str) -> int | None:
        """Which of its blocks `module` is, or is a part of."""
        for place, name in enumerate(self):
            if module.startswith(name) and (len(module) == len(name) or module[len(name)] == "."):
                return place
        return None

    def within(self, module: str) -> str | None:
        """What `module` is called inside of the unit, the same in each; None outside."""
        place = self.place_of(module)
        return None if place is None else f"{place}{module[len(self[place]) :]}"

    def moved(self, module: str, to: Unit) -> str:
        """What `module` is in unit `to`; outside of this one it stays what it is."""
        place = self.place_of(module)
        return module if place is None else to[place] + module[len(self[place]) :]


@dataclass
class Skipped:
    """Units that were skipped in one step.

    Attributes:
        units: that are alike, in order; all but the first `FIRST` and the last were skipped.
        ops: of the step.
        gradients: storage of a gradient of the third unit -> those of the units skipped, in order; these are in the
            record but for the events that allocate them.
    """

    units: list[Unit]
    ops: range
    gradients: dict[int, list[int]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the series."""
        return self.units[0][0]

    @property
    def missing(self) -> range:
        """Numbers of the units skipped."""
        return range(FIRST, len(self.units) - 1)


class Part(NamedTuple):
    """What one unit does in one passage, from its first op to that of the next unit."""

    ops: range
    events: range

    def later(self, events: int) -> Part:
        return Part(self.ops, range(self.events.start + events, self.events.stop + events))


class Passage(NamedTuple):
    """The parts of the second and third unit in it, and whether it goes up; where it does, the last unit's ops.

    After these come others that are not the last unit's: the head's, and a backward's.
    """

    second: Part
    third: Part
    up: bool
    last: range = range(0)

    @property
    def cut(self) -> tuple[int, int]:
        """The event and the op before which the units skipped come."""
        if self.up:
            return self.third.events.stop, self.third.ops.stop
        return self.third.events.start, self.third.ops.start

    def later(self, events: int) -> Passage:
        return Passage(self.second.later(events), self.third.later(events), self.up, self.last)


class Passages(list[Passage]):
    """All of a step, in order.

    Raises:
        NotPeriodic: the units do not follow each other from one end to the other.
    """

    def __init__(self, trace: StepTrace, skipped: Skipped) -> None:
        self._ops, self._marks, self._end = trace.ops, trace.marks, skipped.ops.stop
        starts = list(_starts(trace, skipped))
        self._units = [unit for unit, _ in starts]
        self._starts = [at for _, at in starts]
        super().__init__(self._found())

    def unit_at(self, op: int) -> int | None:
        """Which of the four units began last before `op`, or with it."""
        at = bisect_right(self._starts, op) - 1
        return self._units[at] if at >= 0 else None

    def _found(self) -> Iterator[Passage]:
        units = self._units
        if any(abs(a - b) != 1 and (a, b) != (LAST, 0) for a, b in pairwise(units)):
            raise NotPeriodic("units run out of order")
        for k, step in enumerate(pairwise(units)):
            if step == (THIRD, LAST):
                if units[max(k - 2, 0) : k] != [0, SECOND]:
                    raise NotPeriodic("a passage turns back")
                end = self._starts[k + 2] if k + 2 < len(self._starts) else self._end
                last = range(self._starts[k + 1], end)
                yield Passage(self._part(k - 1), self._part(k), up=True, last=last)
            elif step == (LAST, THIRD):
                if units[k + 2 : k + 4] != [SECOND, 0]:
                    raise NotPeriodic("a passage turns back")
                yield Passage(self._part(k + 2), self._part(k + 1), up=False)

    def _part(self, k: int) -> Part:
        ops = range(self._starts[k], self._starts[k + 1])
        events = range(self._ops[ops.start].at, self._ops[ops.stop].at)
        if any(events.start <= at <= events.stop for at, _ in self._marks):
            raise NotPeriodic("a phase begins inside of a unit")
        return Part(ops, events)


def _starts(trace: StepTrace, skipped: Skipped) -> Iterator[tuple[int, int]]:
    """(which of the four, its first op), each time that another one begins."""
    units = skipped.units
    four = [units[0], units[SECOND], units[THIRD], units[-1]]
    known: dict[str, int | None] = {}
    last = None
    for at in skipped.ops:
        module = trace.ops[at].module
        if module not in known:
            inside = (k for k, unit in enumerate(four) if unit.place_of(module) is not None)
            known[module] = next(inside, None)
        unit = known[module]
        if unit is not None and unit != last:
            yield unit, at
            last = unit
