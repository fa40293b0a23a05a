"""A record of steps in which units of blocks that are alike were skipped (fake/skipping.py), with them put in.

What ran of them repeats itself (repeating.py), and so would the others have done. What a unit allocates is freed by
a unit, or together with the other units' in one row of frees (the weights that autocast has cast), or never, or it
is a gradient, which lives on its own account (`Skipped.gradients`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from .events import Op, Storage
from .passages import FIRST, LAST, SECOND, THIRD, NotPeriodic, Passage
from .repeating import Place, Repeating
from .trace import StepTrace


def unrolled(trace: StepTrace, repeated: Iterable[Repeating], late: int) -> StepTrace:
    """`trace` with the units put in that were skipped where units are `repeated`.

    late: events of the trace that came before those of the record in which they repeat.

    Raises:
        NotPeriodic: what ran does not say what they would have done; names all such series.
    """
    gaps, failed, reasons = [], set(), []
    storages = list(trace.storages)
    freed_at = {~event: at for at, event in enumerate(trace.events) if event < 0}
    for one in repeated:
        try:
            gaps.append(Gap(one.within(trace, late), storages, freed_at))
        except NotPeriodic as error:
            failed.add(one.skipped.name)
            reasons.append(str(error))
    if failed:
        raise NotPeriodic("; ".join(reasons), failed)
    return _merged(trace, storages, gaps) if gaps else trace


@dataclass
class Insertion:
    """What comes before an event and an op of a record; `ops` count events from the insertion's own first one."""

    event: int
    op: int
    events: list[int] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    made: list[int] = field(default_factory=list)  # storages that it allocates


class Gap:
    """The units skipped in one step; their storages are appended to `storages`.

    freed_at: storage -> the event of the record that frees it.

    Attributes:
        insertions: what they did.
        freed: event of the record -> the storage that it frees instead.
    """

    def __init__(self, repeating: Repeating, storages: list[Storage], freed_at: Mapping[int, int]) -> None:
        self.trace, self.skipped, self.repeating = repeating.trace, repeating.skipped, repeating
        self._moves: dict[tuple[int, str], str] = {}  # modules of the third unit as another one's
        self._new: dict[tuple[int, Place], int] = {}  # (number of a unit skipped, place) -> storage
        self._make(storages)
        self.insertions = [self._inserted(k, passage) for k, passage in enumerate(self.repeating.passages)]
        roles = self.repeating.roles.items()
        self.freed = {event: self._new[FIRST, role.place] for event, role in roles if role.away > 0}
        self._free_outside(freed_at)

    def _make(self, storages: list[Storage]) -> None:
        gradients = self.skipped.gradients
        if not all(map(self.repeating.is_of_third, gradients)):
            raise NotPeriodic("a gradient is not made in its unit")
        for (unit, place), storage in self.repeating.own.items():
            if unit == THIRD:
                like = self.trace.storages[storage]
                for k, number in enumerate(self.skipped.missing):
                    made = like.copy(partial(self._called, number))
                    if storage in gradients:
                        self._new[number, place] = gradients[storage][k]
                        storages[gradients[storage][k]] = made
                    else:
                        self._new[number, place] = len(storages)
                        storages.append(made)

    def _called(self, number: int, module: str) -> str:
        """The third unit's module in unit `number`."""
        known = self._moves.get((number, module))
        if known is None:
            units = self.skipped.units
            known = self._moves[number, module] = units[THIRD].moved(module, units[number])
        return known

    def _at(self, number: int, place: Place) -> int:
        """The storage of unit `number` at `place`."""
        if number == len(self.skipped.units) - 1:
            return self.repeating.own[LAST, place]
        return self._new[number, place] if number >= FIRST else self.repeating.own[number, place]

    def _inserted(self, k: int, passage: Passage) -> Insertion:
        inserted = Insertion(*passage.cut)
        pattern, roles = passage.third, self.repeating.roles
        ops, events = self.trace.ops[pattern.ops.start : pattern.ops.stop], self.trace.events
        for number in self.skipped.missing if passage.up else reversed(self.skipped.missing):
            shift, made = len(inserted.events) - pattern.events.start, 0
            called = {module: self._called(number, module) for module in {op.module for op in ops}}
            inserted.ops += [op.later(shift, called[op.module]) for op in ops]
            for event in pattern.events:
                if events[event] >= 0:
                    inserted.events.append(self._new[number, Place(k, made)])
                    inserted.made.append(inserted.events[-1])
                    made += 1
                else:
                    inserted.events.append(~self._at(number + roles[event].away, roles[event].place))
        return inserted

    def _free_outside(self, freed_at: Mapping[int, int]) -> None:
        """See to what the third unit allocates and none of the parts compared frees."""
        inside = [part.events for passage in self.repeating.passages for part in (passage.second, passage.third)]
        own = self.repeating.own
        rows: dict[int, list[tuple[int, int, Place]]] = defaultdict(list)
        for (unit, place), third in own.items():
            if unit != THIRD or third in self.skipped.gradients:
                continue
            second_end, third_end = freed_at.get(own[SECOND, place]), freed_at.get(third)
            if second_end is None or third_end is None:
                if second_end is not third_end:
                    raise NotPeriodic("some units keep what others free")
                continue
            if max(second_end, third_end) >= self._end:
                raise NotPeriodic("a step frees what another one's units allocate")
            by_unit = [any(at in events for events in inside) for at in (second_end, third_end)]
            if by_unit == [True, False]:  # the unit after the second one frees it: that after the third is the last
                self._check_in(third_end, LAST)
                self.freed[third_end] = self._new[self.skipped.missing[-1], place]
            elif by_unit == [False, True]:
                self._check_in(second_end, 0)
            elif by_unit == [False, False]:
                rows[self._row(second_end, third_end)].append((second_end, third_end, place))
        self.insertions += [self._row_of_frees(row) for row in rows.values()]

    @property
    def _end(self) -> int:
        """The event with which the step ends."""
        stop = self.skipped.ops.stop
        return self.trace.ops[stop].at if stop < len(self.trace.ops) else len(self.trace.events)

    def _check_in(self, event: int, unit: int) -> None:
        """Which of the four units began last before `event`."""
        if self.repeating.order.unit_at(self._op_at(event + 1) - 1) != unit:
            raise NotPeriodic("units do not free what the others free of their neighbours")

    def _op_at(self, event: int) -> int:
        """The first op that begins when `event` events have happened, or more."""
        return bisect_left(self.trace.ops, event, key=lambda op: op.at)

    def _row(self, one: int, other: int) -> int:
        """The first event of the row of frees in which both events are."""
        first, last = min(one, other), max(one, other)
        events = self.trace.events
        if any(event >= 0 for event in events[first:last]) or self._op_at(first + 1) != self._op_at(last + 1):
            raise NotPeriodic("units' storages are freed one after another, outside of units")
        while first and events[first - 1] < 0 and self._op_at(first) == self._op_at(first + 1):
            first -= 1
        return first

    def _row_of_frees(self, row: list[tuple[int, int, Place]]) -> Insertion:
        """row: where the second and the third unit's storages at a place are freed."""
        row = sorted(row, key=lambda freed: freed[1])
        down = all(second > third for second, third, _ in row)
        event = row[0][1] if down else row[-1][1] + 1
        numbers = reversed(self.skipped.missing) if down else self.skipped.missing
        return Insertion(event, self._op_at(event), [~self._new[n, place] for n in numbers for _, _, place in row])


def _merged(trace: StepTrace, storages: list[Storage], gaps: list[Gap]) -> StepTrace:
    """The record with all insertions, its storages numbered in the order in which they were made."""
    freed = {event: storage for gap in gaps for event, storage in gap.freed.items()}
    insertions = sorted((i for gap in gaps for i in gap.insertions), key=lambda i: (i.event, i.op))
    old = [~freed[at] if at in freed else event for at, event in enumerate(trace.events)]
    events: list[int] = []
    ops: list[Op] = []
    shifts = [0]  # of what comes before the first, the second, ... insertion
    before: dict[int, list[int]] = defaultdict(list)  # a storage -> those that are made just before it
    at_event = at_op = 0
    for inserted in [*insertions, Insertion(len(old), len(trace.ops))]:
        ops += [op.later(shifts[-1]) for op in trace.ops[at_op : inserted.op]]
        events += old[at_event : inserted.event]
        ops += [op.later(len(events)) for op in inserted.ops]
        events += inserted.events
        shifts.append(shifts[-1] + len(inserted.events))
        at_event, at_op = inserted.event, inserted.op
        if inserted.made:
            before[next((event for event in old[at_event:] if event >= 0), len(trace.storages))] += inserted.made
    places = [inserted.event for inserted in insertions]
    order = _order(len(trace.storages), before)
    number = {storage: place for place, storage in enumerate(order)}
    return replace(
        trace,
        storages=[storages[storage] for storage in order],
        events=[number[event] if event >= 0 else ~number[~event] for event in events],
        ops=ops,
        marks=[(at + shifts[bisect_right(places, at)], name) for at, name in trace.marks],
    )


def _order(count: int, before: dict[int, list[int]]) -> list[int]:
    """All storages in the order in which they are made, the first `count` of them in the record."""
    inserted = {storage for made in before.values() for storage in made}
    order: list[int] = []
    for storage in range(count + 1):
        order += before.get(storage, ())
        if storage < count and storage not in inserted:
            order.append(storage)
    return order
