"""Adds the blocks that a trace skipped (fake/skipped_blocks.py) to the record of the step.

A run is a sequence of units that repeat: a unit is one block, or the shortest sequence of blocks that repeats. Of
each run the first three units and the last one were traced. A traversal visits these four once: upwards in a forward
(and when a checkpoint runs the forward again), downwards in a backward.

A unit's part of a traversal ends where the next unit begins. A storage is named by its unit and its place among the
allocations of that part; a free is named by this place and by the distance, in units, to the storage's unit. By these
names the parts of the second and the third unit must be equal, op for op and event for event. Then the third unit's
part is inserted once for each skipped unit. Otherwise the run is `NotPeriodic`, and all of its blocks must be traced.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from .events import Op, Storage
from .recorder import Position, Recorder

FIRST = 3  # units at the beginning of a run that are traced; of the others only the last is traced
_SECOND, _THIRD, _LAST = 1, 2, 3  # of the four traced units

Place = tuple[int, int]  # of an allocation: the traversal, and the number among those of the unit's part of it


class NotPeriodic(Exception):
    """The units of the runs with these names do not repeat."""

    def __init__(self, reason: str, names: Collection[str] = ()) -> None:
        super().__init__(reason)
        self.names = set(names)


class Unit(tuple[str, ...]):
    """The names of a unit's blocks, in order."""

    __slots__ = ()

    def within(self, module: str) -> tuple[int, str] | None:
        """Returns the index of the block that contains `module`, and the rest of its name; None if none does."""
        for place, name in enumerate(self):
            if module.startswith(name) and (len(module) == len(name) or module[len(name)] == "."):
                return place, module[len(name) :]
        return None

    def moved(self, module: str, to: Unit) -> str:
        """The module of unit `to` that corresponds to `module`; `module` itself if it is outside of this unit."""
        found = self.within(module)
        return module if found is None else to[found[0]] + found[1]


class _Part(NamedTuple):
    """The part of one of the four units in one traversal, from its first op to that of the next unit."""

    unit: int
    ops: range
    events: range


@dataclass
class _Insertion:
    """Events and ops that come before an event and an op of the record; `ops` count the insertion's own events."""

    event: int
    op: int
    events: list[int] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)


class SkippedRun:
    """A run in which units were skipped in this step: all but the first `FIRST` and the last.

    gradients: storage of a gradient of the third unit -> those of the skipped units, in order. The recorder follows
        them; only the events that allocate them are missing.
    """

    def __init__(self, units: list[Unit]) -> None:
        self.units = units
        self.gradients: dict[int, list[int]] = {}

    @property
    def name(self) -> str:
        return self.units[0][0]

    @property
    def missing(self) -> range:
        """Numbers of the skipped units."""
        return range(FIRST, len(self.units) - 1)


def splice(recorder: Recorder, start: Position, runs: Sequence[SkippedRun]) -> None:
    """Insert the skipped units of `runs`, one run after another, into what was recorded since `start` of this step.

    Raises:
        NotPeriodic: a run does not repeat; the runs before it are in the record.
    """
    for at, run in enumerate(runs):
        try:
            copies = _Copies(recorder, start, run)
        except NotPeriodic as error:
            raise NotPeriodic(f"{run.name}: {error}", [run.name]) from None
        number = copies.insert()
        for other in runs[at + 1 :]:
            other.gradients = {number[like]: [number[one] for one in made] for like, made in other.gradients.items()}


class _Copies:
    """The ops and events of the skipped units of one run, as insertions into the record."""

    def __init__(self, recorder: Recorder, start: Position, run: SkippedRun) -> None:
        self.recorder, self.start, self.run, self.units = recorder, start, run, run.units
        self.ops, self.events, self.storages = recorder.ops, list(recorder.events), list(recorder.storages)
        self._four = [run.units[number] for number in (0, _SECOND, _THIRD, -1)]
        self._find_starts()
        self._number_rows()
        self._traversals = list(self._find_traversals())
        self._storage_of: dict[tuple[int, Place], int] = {}  # (one of the four units, place) -> storage
        self._place_of: dict[int, tuple[int, Place]] = {}  # the reverse
        for number, parts in enumerate(self._traversals):
            for part in parts:
                made = (self.events[at] for at in part.events if self.events[at] >= 0)
                for place, storage in enumerate(made):
                    self._name_storage(storage, part.unit, (number, place))
        for one, other in self._traversals:
            self._compare(*((one, other) if one.unit == _SECOND else (other, one)))
        self._new: dict[tuple[int, Place], int] = {}  # (number of a skipped unit, place) -> storage
        self._copy_storages()
        self._insertions = [self._inserted(one, other) for one, other in self._traversals]
        self._free_outside()

    # -- where the four units are in the record ---------------------------------------------------------------------

    def _find_starts(self) -> None:
        """Record each op at which another one of the four units begins."""
        unit_of: dict[str, int | None] = {}
        self._order: list[int] = []
        self._starts: list[int] = []
        for at in range(self.start.ops, len(self.ops)):
            module = self.ops[at].module
            if module not in unit_of:
                unit_of[module] = next((k for k, unit in enumerate(self._four) if unit.within(module)), None)
            unit = unit_of[module]
            if unit is not None and (not self._order or unit != self._order[-1]):
                self._order.append(unit)
                self._starts.append(at)

    def _number_rows(self) -> None:
        """Number the rows of events; a row begins with each op and each allocation."""
        begun = {self.ops[at].at for at in range(self.start.ops, len(self.ops))}
        begins = (at in begun or event >= 0 for at, event in enumerate(self.events))
        self._rows = list(accumulate(begins))

    def _find_traversals(self) -> Iterator[list[_Part]]:
        """The parts of the second and the third unit in each traversal, in the order in which they come."""
        order = self._order
        if any(abs(a - b) != 1 and (a, b) != (_LAST, 0) for a, b in pairwise(order)):
            raise NotPeriodic("units run out of order")
        for k, step in enumerate(pairwise(order)):
            if step not in ((_THIRD, _LAST), (_LAST, _THIRD)):
                continue
            first = k if step == (_LAST, _THIRD) else k - 2
            if order[max(first, 0) : first + 4] not in ([0, _SECOND, _THIRD, _LAST], [_LAST, _THIRD, _SECOND, 0]):
                raise NotPeriodic("a traversal turns back")
            parts = []
            for at in (first + 1, first + 2):
                ops = range(self._starts[at], self._starts[at + 1])
                parts.append(_Part(order[at], ops, range(self.ops[ops.start].at, self.ops[ops.stop].at)))
            begin, end = parts[0].events.start, parts[1].events.stop
            if any(begin <= at <= end for at, _ in self.recorder.marks[self.start.marks :]):
                raise NotPeriodic("a phase begins inside of a unit")
            if parts[1].unit == _THIRD:
                last = range(parts[1].ops.stop, [*self._starts, len(self.ops)][first + 4])
                if self._forward_of(_THIRD, parts[1].ops) != self._forward_of(_LAST, last):
                    raise NotPeriodic("the last unit does something else than the third")
            yield parts

    # -- whether the units do the same ------------------------------------------------------------------------------

    def _forward_of(self, unit: int, ops: range) -> list[Op]:
        """The ops of one of the four units' modules in a forward."""
        names = {module: self._four[unit].within(module) for module in {self.ops[at].module for at in ops}}
        forward = (op for op in self.ops[ops.start : ops.stop] if op.phase == "forward" and names[op.module])
        return [op.later(-op.at, str(names[op.module])) for op in forward]

    def _compare(self, second: _Part, third: _Part) -> None:
        ops, made, freed = self._named(second)
        other_ops, other_made, other_freed = self._named(third)
        if ops != other_ops or made != other_made:
            raise NotPeriodic("the second and the third unit do not do the same")
        if [name for name, _ in freed] != [name for name, _ in other_freed]:
            raise NotPeriodic("the second and the third unit do not free the same")
        for (name, one), (_, other) in zip(freed, other_freed, strict=True):
            if name[1] < 0:
                self._name_storage(one, 0, self._place_of[other][1])
            elif name[1] > 0:
                self._name_storage(other, _LAST, self._place_of[one][1])

    def _name_storage(self, storage: int, unit: int, place: Place) -> None:
        self._storage_of[unit, place] = storage
        self._place_of[storage] = unit, place

    def _named(self, part: _Part) -> tuple[list[Op], list[tuple[int, Storage]], list[tuple[tuple[Any, ...], int]]]:
        """A part's ops, storages and frees with names that do not depend on the unit, as if it were the third.

        Consecutive frees are sorted, because autocast's cache is freed in the order of addresses. A storage made by
        neither the second nor the third unit is the first's if the second frees it, the last's if the third does.
        """
        as_third = functools.cache(functools.partial(self._four[part.unit].moved, to=self._four[_THIRD]))
        start, made, freed = part.events.start, [], []
        for at in part.events:
            event, row = self.events[at], self._rows[at] - self._rows[start]
            if event >= 0:
                made.append((row, self.storages[event].copy(as_third)))
            else:
                like = self.storages[~event]
                unit, place = self._place_of.get(~event, (0 if part.unit == _SECOND else _LAST, (0, 0)))
                away = unit - part.unit
                freed.append(((row, away, like.op, like.nbytes, place if not away else ()), ~event))
        ops = [op.later(-start, as_third(op.module)) for op in self.ops[part.ops.start : part.ops.stop]]
        return ops, made, sorted(freed)

    def _role(self, storage: int, part: _Part) -> tuple[int, Place]:
        """The distance from the part's unit to the one that allocates `storage`, and the place there."""
        unit, place = self._place_of[storage]
        return unit - part.unit, place

    # -- what the skipped units did ---------------------------------------------------------------------------------

    def _copy_storages(self) -> None:
        gradients, missing, third = self.run.gradients, self.run.missing, self._four[_THIRD]
        if any(self._place_of.get(gradient, (None,))[0] != _THIRD for gradient in gradients):
            raise NotPeriodic("a gradient is not made in its unit")
        for number, k in ((number, k) for k, number in enumerate(missing)):
            moved = functools.cache(functools.partial(third.moved, to=self.units[number]))
            for (unit, place), storage in self._storage_of.items():
                if unit == _THIRD:
                    self.storages.append(self.storages[storage].copy(moved))
                    self._new[number, place] = len(self.storages) - 1
                    if storage in gradients:
                        self._new[number, place] = gradients[storage][k]
                        self.storages[gradients[storage][k]] = self.storages.pop()

    def _storage_in(self, number: int, place: Place) -> int:
        """The storage of unit `number` at `place`."""
        if number in self.run.missing:
            return self._new[number, place]
        return self._storage_of[min(number, _LAST), place]

    def _inserted(self, one: _Part, other: _Part) -> _Insertion:
        """The skipped units' parts of a traversal of which `one` and `other` are the second's and the third's."""
        up = other.unit == _THIRD
        like = other if up else one
        inserted = _Insertion(like.events.stop, like.ops.stop) if up else _Insertion(like.events.start, like.ops.start)
        missing, third = self.run.missing, self._four[_THIRD]
        ops = self.ops[like.ops.start : like.ops.stop]
        events = [
            (event >= 0, *self._role(max(event, ~event), like))
            for event in self.events[like.events.start : like.events.stop]
        ]
        for number in missing if up else reversed(missing):
            moved = functools.cache(functools.partial(third.moved, to=self.units[number]))
            shift = len(inserted.events) - like.events.start
            inserted.ops += [op.later(shift, moved(op.module)) for op in ops]
            for made, away, place in events:
                storage = self._storage_in(number + away, place)
                inserted.events.append(storage if made else ~storage)
        return inserted

    def _free_outside(self) -> None:
        """Free the units' storages that neither the second nor the third unit frees."""
        inside = {at: part for parts in self._traversals for part in parts for at in part.events}
        events = range(self.start.events, len(self.events))
        freed_at = {~self.events[at]: at for at in events if self.events[at] < 0}
        first, last = self.run.missing[0], self.run.missing[-1]
        rows: dict[int, list[tuple[int, int, Place]]] = defaultdict(list)
        for place in [place for unit, place in self._storage_of if unit == _THIRD]:
            second, third = (self._storage_of[unit, place] for unit in (_SECOND, _THIRD))
            if third in self.run.gradients:
                continue
            if second not in freed_at or third not in freed_at:
                raise NotPeriodic("units keep what they allocate")
            ends = freed_at[second], freed_at[third]
            by_unit = [at in inside for at in ends]
            if by_unit == [True, False]:  # the unit after the second one frees it: that after the third is the last
                self._check_in(ends[1], _LAST)
                self.events[ends[1]] = ~self._new[last, place]
            elif by_unit == [False, True]:
                self._check_in(ends[0], 0)
            elif by_unit == [False, False]:
                if self._rows[ends[0]] != self._rows[ends[1]]:
                    raise NotPeriodic("units' storages are freed one after another, outside of units")
                rows[self._rows[ends[0]]].append((*ends, place))
        for at, part in inside.items():
            storage = ~self.events[at]
            if part.unit == _THIRD and storage >= 0 and self._role(storage, part)[0] > 0:
                self.events[at] = ~self._new[first, self._place_of[storage][1]]
        self._insertions += map(self._row_of_frees, rows.values())

    def _check_in(self, event: int, unit: int) -> None:
        """Raise unless `unit` is the last of the four that began before `event`."""
        at = bisect_right(self._starts, self._op_at(event + 1) - 1) - 1
        if at < 0 or self._order[at] != unit:
            raise NotPeriodic("units do not free what the others free of their neighbours")

    def _op_at(self, event: int) -> int:
        """The first op that begins after `event` events, or more."""
        return bisect_left(self.ops, event, self.start.ops, key=lambda op: op.at)

    def _row_of_frees(self, row: list[tuple[int, int, Place]]) -> _Insertion:
        """row: the events that free the second and the third unit's storages at each place."""
        row = sorted(row, key=lambda freed: freed[1])
        down = all(second > third for second, third, _ in row)
        event = row[0][1] if down else row[-1][1] + 1
        numbers = reversed(self.run.missing) if down else self.run.missing
        return _Insertion(event, self._op_at(event), [~self._new[n, place] for n in numbers for _, _, place in row])

    # -- the new record ---------------------------------------------------------------------------------------------

    def insert(self) -> dict[int, int]:
        """Put all insertions into the record; returns the new number of each storage since the step began.

        Storages are numbered in the order in which they are allocated.
        """
        recorder, start, old = self.recorder, self.start, self.events
        insertions = sorted(self._insertions, key=lambda i: (i.event, i.op))
        events, ops = old[: start.events], self.ops[: start.ops]
        shifts = [0]  # the record before the first, the second, ... insertion
        at_event, at_op = start.events, start.ops
        for inserted in [*insertions, _Insertion(len(old), len(self.ops))]:
            for op in self.ops[at_op : inserted.op]:
                op.at += shifts[-1]
                ops.append(op)
            events += old[at_event : inserted.event]
            for op in inserted.ops:
                op.at += len(events)
                ops.append(op)
            events += inserted.events
            shifts.append(shifts[-1] + len(inserted.events))
            at_event, at_op = inserted.event, inserted.op
        made = {events[at]: at for at in range(start.events, len(events)) if events[at] >= 0}
        at, new = start.events, set(self._new.values())
        for storage in range(start.storages, len(recorder.storages)):
            if storage not in new:
                at = made.setdefault(storage, at)  # a resident comes after what was recorded before it
        order = sorted(made, key=lambda storage: (made[storage], storage))
        number = {storage: start.storages + place for place, storage in enumerate(order)}
        places = [inserted.event for inserted in insertions]
        recorder.ops[:] = ops
        recorder.events[:] = [number.get(e, e) if e >= 0 else ~number.get(~e, ~e) for e in events]
        recorder.marks[start.marks :] = [
            (at + shifts[bisect_right(places, at)], name) for at, name in recorder.marks[start.marks :]
        ]
        recorder.storages[start.storages :] = [self.storages[storage] for storage in order]
        recorder.renumber(number)
        return number
