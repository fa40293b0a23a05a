"""Adds the blocks that a trace skipped (fake/skipped_blocks.py) to the record of the step.

A run is a sequence of units that repeat: a unit is a block, or as many blocks as it takes until their kinds repeat. Of
each run the first three units and the last one were traced. A traversal visits the units once: upwards in a
forward (and when a checkpoint runs the forward again), downwards in a backward.

In every traversal, the second and the third unit must do the same, op for op and event for event: allocate equal
storages, and free those at the same place in the unit itself or in its neighbour. Then what the third unit did is
inserted once for each skipped unit. If anything else is found, the run is `NotPeriodic`, and all of its blocks must be
traced.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from .events import Op, Storage
from .recorder import Position, Recorder

FIRST = 3  # units at the beginning of a run that are traced; of the others only the last is
_SECOND, _THIRD, _LAST = 1, 2, 3  # of the four traced units


class NotPeriodic(Exception):
    """The units of the runs with these names do not repeat each other."""

    def __init__(self, reason: str, names: Collection[str] = ()) -> None:
        super().__init__(reason)
        self.names = set(names)


class Unit(tuple[str, ...]):
    """The names of a unit's blocks, in order."""

    __slots__ = ()

    def place_of(self, module: str) -> int | None:
        """Which of the blocks `module` is, or is a part of."""
        for place, name in enumerate(self):
            if module.startswith(name) and (len(module) == len(name) or module[len(name)] == "."):
                return place
        return None

    def within(self, module: str) -> str | None:
        """The name of `module` relative to the unit; None if it is outside."""
        place = self.place_of(module)
        return None if place is None else f"{place}{module[len(self[place]) :]}"

    def moved(self, module: str, to: Unit) -> str:
        """The module of unit `to` that corresponds to `module`; `module` itself if it is outside of this unit."""
        place = self.place_of(module)
        return module if place is None else to[place] + module[len(self[place]) :]


@dataclass
class SkippedRun:
    """A run of which units were skipped in this step: all but the first `FIRST` and the last.

    gradients: storage of a gradient of the third unit -> those of the skipped units, in order. The recorder follows
        them; only the events that allocate them are missing.
    """

    units: list[Unit]
    gradients: dict[int, list[int]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.units[0][0]

    @property
    def missing(self) -> range:
        """Numbers of the skipped units."""
        return range(FIRST, len(self.units) - 1)


def splice(recorder: Recorder, start: Position, runs: Sequence[SkippedRun]) -> dict[int, str]:
    """Insert the skipped units of `runs` into what was recorded since `start`, the beginning of this step.

    Returns the storages of units that are still alive, with the names of their runs. Should one be freed in a later
    step, then this record is wrong: the skipped units' storages do not hear of it.

    Raises:
        NotPeriodic: for all runs that do not repeat; the record is as it was.
    """
    storages = list(recorder.storages)
    copies, reasons, failed = [], [], set()
    for run in runs:
        try:
            copies.append(_Copies(recorder, start, run, storages))
        except NotPeriodic as error:
            reasons.append(f"{run.name}: {error}")
            failed.add(run.name)
    if failed:
        raise NotPeriodic("; ".join(reasons), failed)
    number = _merge(recorder, start, storages, copies)
    return {number.get(storage, storage): copy.run.name for copy in copies for storage in copy.lasting}


class _Part(NamedTuple):
    """What one unit does in one traversal, from its first op to that of the next unit."""

    ops: range
    events: range


class _Traversal(NamedTuple):
    """Its parts of the second and the third unit. If it goes up, `last` are the last unit's ops and what follows."""

    second: _Part
    third: _Part
    up: bool
    last: range = range(0)


class _Place(NamedTuple):
    """The `number`-th storage that a unit allocates in a traversal."""

    traversal: int
    number: int


class _Role(NamedTuple):
    """Which storage a unit frees: the one at `place` of the unit that is `away` (-1, 0 or 1) from it."""

    away: int
    place: _Place


@dataclass
class _Insertion:
    """Events and ops that come before an event and an op of the record; `ops` count the insertion's own events."""

    event: int
    op: int
    events: list[int] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    made: list[int] = field(default_factory=list)  # storages that it allocates


class _Copies:
    """What the skipped units of one run did. Their storages are appended to `storages`.

    Attributes:
        insertions: their events and ops.
        freed: event of the record -> the storage that it frees instead.
        lasting: storages of units that are not freed in this step.
    """

    def __init__(self, recorder: Recorder, start: Position, run: SkippedRun, storages: list[Storage]) -> None:
        self.ops, self.events, self.marks, self.storages = recorder.ops, recorder.events, recorder.marks, storages
        self.start, self.run = start, run
        self.insertions: list[_Insertion] = []
        self.freed: dict[int, int] = {}
        self.lasting: set[int] = set()
        self._four = [run.units[number] for number in (0, _SECOND, _THIRD, -1)]
        self._own: dict[tuple[int, _Place], int] = {}  # (which of the four units, place) -> storage
        self._homes: dict[int, tuple[int, _Place]] = {}  # the reverse, for the second and third unit
        self._roles: dict[int, _Role] = {}  # of the frees in the third unit's parts, by event
        self._new: dict[tuple[int, _Place], int] = {}  # (number of a skipped unit, place) -> storage
        self._moves: dict[tuple[Unit, Unit, str], str] = {}
        self._find_starts()
        self._traversals = list(self._find_traversals())
        self._compare()
        self._copy_storages()
        for number, traversal in enumerate(self._traversals):
            self.insertions.append(self._inserted(number, traversal))
        self.freed = {at: self._new[FIRST, role.place] for at, role in self._roles.items() if role.away > 0}
        self._free_outside()

    def _moved(self, module: str, unit: Unit, to: Unit) -> str:
        known = self._moves.get((unit, to, module))
        if known is None:
            known = self._moves[unit, to, module] = unit.moved(module, to)
        return known

    # -- where the four units are in the record ---------------------------------------------------------------------

    def _find_starts(self) -> None:
        """Note which of the four units begins at which op, each time that another one begins."""
        unit_of: dict[str, int | None] = {}
        self._units: list[int] = []
        self._starts: list[int] = []
        for at in range(self.start.ops, len(self.ops)):
            module = self.ops[at].module
            if module not in unit_of:
                inside = (k for k, unit in enumerate(self._four) if unit.place_of(module) is not None)
                unit_of[module] = next(inside, None)
            unit = unit_of[module]
            if unit is not None and (not self._units or unit != self._units[-1]):
                self._units.append(unit)
                self._starts.append(at)

    def _find_traversals(self) -> Iterator[_Traversal]:
        units = self._units
        if any(abs(a - b) != 1 and (a, b) != (_LAST, 0) for a, b in pairwise(units)):
            raise NotPeriodic("units run out of order")
        for k, step in enumerate(pairwise(units)):
            if step == (_THIRD, _LAST):
                if units[max(k - 2, 0) : k] != [0, _SECOND]:
                    raise NotPeriodic("a traversal turns back")
                end = self._starts[k + 2] if k + 2 < len(self._starts) else len(self.ops)
                last = range(self._starts[k + 1], end)
                yield _Traversal(self._part(k - 1), self._part(k), up=True, last=last)
            elif step == (_LAST, _THIRD):
                if units[k + 2 : k + 4] != [_SECOND, 0]:
                    raise NotPeriodic("a traversal turns back")
                yield _Traversal(self._part(k + 2), self._part(k + 1), up=False)

    def _part(self, k: int) -> _Part:
        ops = range(self._starts[k], self._starts[k + 1])
        events = range(self.ops[ops.start].at, self.ops[ops.stop].at)
        if any(events.start <= at <= events.stop for at, _ in self.marks):
            raise NotPeriodic("a phase begins inside of a unit")
        return _Part(ops, events)

    # -- whether the second and the third unit do the same ----------------------------------------------------------

    def _compare(self) -> None:
        for number, traversal in enumerate(self._traversals):
            for unit, part in ((_SECOND, traversal.second), (_THIRD, traversal.third)):
                made = [event for event in self.events[part.events.start : part.events.stop] if event >= 0]
                for index, storage in enumerate(made):
                    place = _Place(number, index)
                    self._homes[storage] = unit, place
                    self._own[unit, place] = storage
        for traversal in self._traversals:
            self._compare_parts(traversal.second, traversal.third)
            if traversal.up and self._forward_of(traversal.third.ops, _THIRD) != self._forward_of(
                traversal.last, _LAST
            ):
                raise NotPeriodic("the last unit does something else than the third")

    def _compare_parts(self, second: _Part, third: _Part) -> None:
        if len(second.ops) != len(third.ops) or len(second.events) != len(third.events):
            raise NotPeriodic("units do more and less")
        later = third.events.start - second.events.start
        for a, b in zip(second.ops, third.ops, strict=True):
            one, other = self.ops[a], self.ops[b]
            if one.later(later, self._moved(one.module, self._four[_SECOND], self._four[_THIRD])) != other:
                raise NotPeriodic(f"units do {one} and {other}")
        for ones, others in zip(self._rows(second), self._rows(third), strict=True):
            self._compare_rows(ones, others)

    def _forward_of(self, ops: range, unit: int) -> list[tuple[object, ...]]:
        """What the modules of one of the four units do in a forward."""
        within: dict[str, str | None] = {}
        found: list[tuple[object, ...]] = []
        for op in (self.ops[at] for at in ops):
            if op.phase != "forward":
                continue
            if op.module not in within:
                within[op.module] = self._four[unit].within(op.module)
            if within[op.module] is not None:
                done = op.name, op.flops, op.nbytes, op.dtype, op.shape, op.kernels, op.around
                found.append((*done, within[op.module]))
        return found

    def _rows(self, part: _Part) -> Iterator[range]:
        """A part's events: each allocation by itself, and frees in a row together."""
        begun = {self.ops[at].at for at in part.ops}
        start = part.events.start
        for at in part.events:
            if at > start and (at in begun or self.events[at] >= 0 or self.events[at - 1] >= 0):
                yield range(start, at)
                start = at
        if start < part.events.stop:
            yield range(start, part.events.stop)

    def _compare_rows(self, second: range, third: range) -> None:
        """The order of frees in a row may differ: autocast's cache is freed in the order of addresses."""
        ones, others = ([self.events[at] for at in row] for row in (second, third))
        if len(ones) != len(others):
            raise NotPeriodic("units free more and less")
        if ones[0] >= 0 and others[0] >= 0:
            made, like = self.storages[ones[0]], self.storages[others[0]]
            if made.copy(lambda module: self._moved(module, self._four[_SECOND], self._four[_THIRD])) != like:
                raise NotPeriodic(f"units make {made} and {like}")
            return
        freed = [~one for one in ones]
        for at, other in zip(third, others, strict=True):
            for one in freed:
                role = self._role(one, ~other)
                if role is not None:
                    self._roles[at] = role
                    freed.remove(one)
                    break
            else:
                raise NotPeriodic("units free unlike storages")

    def _role(self, one: int, other: int) -> _Role | None:
        """The role of `other`, freed by the third unit, if `one` has the same role for the second."""
        home, other_home = self._homes.get(one), self._homes.get(other)
        if home is not None and other_home is not None:
            same = (home[0], other_home[0]) == (_SECOND, _THIRD) and home[1] == other_home[1]
            return _Role(0, home[1]) if same else None
        if other_home is not None and other_home[0] == _SECOND and self._is_at(0, other_home[1], one, other):
            return _Role(-1, other_home[1])
        if home is not None and home[0] == _THIRD and self._is_at(_LAST, home[1], other, one):
            return _Role(1, home[1])
        return None

    def _is_at(self, unit: int, place: _Place, storage: int, inner: int) -> bool:
        """Whether the first or last unit has `storage` where the second or third one has `inner`."""
        a, b = self.storages[storage], self.storages[inner]
        module = self._moved(a.module, self._four[unit], self._four[_SECOND if unit == 0 else _THIRD])
        same = (a.nbytes, a.op) == (b.nbytes, b.op) and module in (a.module, b.module)  # or made outside of its unit
        return same and self._own.setdefault((unit, place), storage) == storage

    # -- what the skipped units did ---------------------------------------------------------------------------------

    def _copy_storages(self) -> None:
        gradients, units = self.run.gradients, self.run.units
        if any(self._homes.get(gradient, (None,))[0] != _THIRD for gradient in gradients):
            raise NotPeriodic("a gradient is not made in its unit")
        for (unit, place), storage in self._own.items():
            if unit != _THIRD:
                continue
            like = self.storages[storage]
            for k, number in enumerate(self.run.missing):
                made = like.copy(lambda module, to=units[number]: self._moved(module, units[_THIRD], to))  # type: ignore[misc]
                if storage in gradients:
                    self._new[number, place] = gradients[storage][k]
                    self.storages[gradients[storage][k]] = made
                else:
                    self._new[number, place] = len(self.storages)
                    self.storages.append(made)

    def _at(self, number: int, place: _Place) -> int:
        """The storage of unit `number` at `place`."""
        if number == len(self.run.units) - 1:
            return self._own[_LAST, place]
        return self._new[number, place] if number >= FIRST else self._own[number, place]

    def _inserted(self, k: int, traversal: _Traversal) -> _Insertion:
        like, units, missing = traversal.third, self.run.units, self.run.missing
        up = traversal.up
        inserted = _Insertion(like.events.stop, like.ops.stop) if up else _Insertion(like.events.start, like.ops.start)
        ops = self.ops[like.ops.start : like.ops.stop]
        modules = {op.module for op in ops}
        for number in missing if up else reversed(missing):
            shift, made = len(inserted.events) - like.events.start, 0
            name = {module: self._moved(module, units[_THIRD], units[number]) for module in modules}
            inserted.ops += [op.later(shift, name[op.module]) for op in ops]
            for at in like.events:
                if self.events[at] >= 0:
                    inserted.made.append(self._new[number, _Place(k, made)])
                    inserted.events.append(inserted.made[-1])
                    made += 1
                else:
                    inserted.events.append(~self._at(number + self._roles[at].away, self._roles[at].place))
        return inserted

    def _free_outside(self) -> None:
        """Free what the units allocate, and none of the parts compared frees."""
        inside = [part.events for one in self._traversals for part in (one.second, one.third)]
        freed_at = {~self.events[at]: at for at in range(self.start.events, len(self.events)) if self.events[at] < 0}
        rows: dict[int, list[tuple[int, int, _Place]]] = defaultdict(list)
        for (unit, place), third in self._own.items():
            if unit != _THIRD or third in self.run.gradients:
                continue
            second = self._own[_SECOND, place]
            second_end, third_end = freed_at.get(second), freed_at.get(third)
            if second_end is None or third_end is None:
                if second_end is not third_end:
                    raise NotPeriodic("some units keep what others free")
                self.lasting |= {second, third, *(self._new[number, place] for number in self.run.missing)}
                continue
            by_unit = [any(at in events for events in inside) for at in (second_end, third_end)]
            if by_unit == [True, False]:  # the unit after the second one frees it: that after the third is the last
                self._check_in(third_end, _LAST)
                self.freed[third_end] = self._new[self.run.missing[-1], place]
            elif by_unit == [False, True]:
                self._check_in(second_end, 0)
            elif by_unit == [False, False]:
                rows[self._row(second_end, third_end)].append((second_end, third_end, place))
        self.insertions += [self._row_of_frees(row) for row in rows.values()]

    def _check_in(self, event: int, unit: int) -> None:
        """Raise unless `unit` is the one of the four that began last before `event`."""
        at = bisect_right(self._starts, self._op_at(event + 1) - 1) - 1
        if at < 0 or self._units[at] != unit:
            raise NotPeriodic("units do not free what the others free of their neighbours")

    def _op_at(self, event: int) -> int:
        """The first op that begins after `event` events, or more."""
        return bisect_left(self.ops, event, self.start.ops, key=lambda op: op.at)

    def _row(self, one: int, other: int) -> int:
        """The first event of the row of frees that has both events."""
        first, last = min(one, other), max(one, other)
        if any(event >= 0 for event in self.events[first:last]) or self._op_at(first + 1) != self._op_at(last + 1):
            raise NotPeriodic("units' storages are freed one after another, outside of units")
        while first and self.events[first - 1] < 0 and self._op_at(first) == self._op_at(first + 1):
            first -= 1
        return first

    def _row_of_frees(self, row: list[tuple[int, int, _Place]]) -> _Insertion:
        """row: the events that free the second and the third unit's storages at each place."""
        row = sorted(row, key=lambda freed: freed[1])
        down = all(second > third for second, third, _ in row)
        event = row[0][1] if down else row[-1][1] + 1
        numbers = reversed(self.run.missing) if down else self.run.missing
        return _Insertion(event, self._op_at(event), [~self._new[n, place] for n in numbers for _, _, place in row])


def _merge(recorder: Recorder, start: Position, storages: list[Storage], copies: list[_Copies]) -> dict[int, int]:
    """Put all insertions into the record; returns the new number of each storage since `start`.

    Storages are numbered in the order in which they are allocated.
    """
    freed = {event: storage for one in copies for event, storage in one.freed.items()}
    insertions = sorted((i for one in copies for i in one.insertions), key=lambda i: (i.event, i.op))
    recorded = len(recorder.storages)
    old = [~freed[at] if at in freed else event for at, event in enumerate(recorder.events)]
    events, ops = old[: start.events], recorder.ops[: start.ops]
    shifts = [0]  # of what comes before the first, the second, ... insertion
    before: dict[int, list[int]] = defaultdict(list)  # a storage -> those that are allocated just before it
    at_event, at_op = start.events, start.ops
    for inserted in [*insertions, _Insertion(len(old), len(recorder.ops))]:
        ops += [op.later(shifts[-1]) for op in recorder.ops[at_op : inserted.op]]
        events += old[at_event : inserted.event]
        ops += [op.later(len(events)) for op in inserted.ops]
        events += inserted.events
        shifts.append(shifts[-1] + len(inserted.events))
        at_event, at_op = inserted.event, inserted.op
        if inserted.made:
            before[next((event for event in old[at_event:] if event >= 0), recorded)] += inserted.made
    moved = {storage for made in before.values() for storage in made}
    order: list[int] = []
    for storage in range(start.storages, recorded + 1):
        order += before.get(storage, ())
        if storage < recorded and storage not in moved:
            order.append(storage)
    number = {storage: start.storages + place for place, storage in enumerate(order)}
    places = [inserted.event for inserted in insertions]
    recorder.ops[:] = ops
    recorder.events[:] = [number.get(event, event) if event >= 0 else ~number.get(~event, ~event) for event in events]
    recorder.marks[start.marks :] = [
        (at + shifts[bisect_right(places, at)], name) for at, name in recorder.marks[start.marks :]
    ]
    recorder.storages[start.storages :] = [storages[storage] for storage in order]
    recorder.renumber(number)
    return number
