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
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

from .events import Item, Op, Storage, is_allocation, is_free
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
    items: range


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
        NotPeriodic: a run does not repeat; the record is as it was.
    """
    if not runs:
        return
    items, storages = recorder.since(start), list(recorder.storages)
    for run in runs:
        try:
            items = _Repeated(items, storages, run).items_with_copies()
        except NotPeriodic as error:
            raise NotPeriodic(f"{run.name}: {error}", [run.name]) from None
    recorder.rewrite(start, items, storages)


class _Repeated:
    """The items of a step with those of the skipped units of one run, whose storages are appended to `storages`."""

    def __init__(self, items: list[Item], storages: list[Storage], run: SkippedRun) -> None:
        self.items, self.storages, self.run, self.units = list(items), storages, run, run.units
        self._four = [run.units[number] for number in (0, _SECOND, _THIRD, -1)]
        self._find_starts()
        self._traversals = list(self._find_traversals())
        self._storage_of: dict[tuple[int, Place], int] = {}  # (one of the four units, place) -> storage
        self._place_of: dict[int, tuple[int, Place]] = {}  # the reverse
        for number, parts in enumerate(self._traversals):
            for part in parts:
                for place, storage in enumerate(filter(is_allocation, self._of(part.items))):
                    self._name_storage(storage, part.unit, (number, place))
        for parts in self._traversals:
            self._compare(*sorted(parts))
        self._copied: dict[tuple[int, Place], int] = {}  # (number of a skipped unit, place) -> storage
        self._copy_storages()
        self._inserted: defaultdict[int, list[Item]] = defaultdict(list)  # before the item with this index
        for parts in self._traversals:
            self._insert_copies(*parts)
        self._free_outside()

    def items_with_copies(self) -> list[Item]:
        """The items with all insertions."""
        found: list[Item] = []
        for at, item in enumerate(self.items):
            found += self._inserted.get(at, ())
            found.append(item)
        return found + self._inserted[len(self.items)]

    def _of(self, part: range) -> list[Item]:
        return self.items[part.start : part.stop]

    # -- where the four units are in the record ---------------------------------------------------------------------

    def _find_starts(self) -> None:
        """Note each op or allocation at which another one of the four units begins."""
        unit_of: dict[str, int | None] = {}
        self._order: list[int] = []
        self._starts: list[int] = []
        for at, item in enumerate(self.items):
            if not isinstance(item, Op) and not is_allocation(item):
                continue
            module = (item if isinstance(item, Op) else self.storages[item]).module
            if module not in unit_of:
                unit_of[module] = next((k for k, unit in enumerate(self._four) if unit.within(module)), None)
            unit = unit_of[module]
            if unit is not None and (not self._order or unit != self._order[-1]):
                self._order.append(unit)
                self._starts.append(at)

    def _find_traversals(self) -> Iterator[list[_Part]]:
        """The parts of the second and the third unit in each traversal, in the order in which they come."""
        order, ends = self._order, [*self._starts, len(self.items)]
        if any(abs(a - b) != 1 and (a, b) != (_LAST, 0) for a, b in pairwise(order)):
            raise NotPeriodic("units run out of order")
        for k, step in enumerate(pairwise(order)):
            if step not in ((_THIRD, _LAST), (_LAST, _THIRD)):
                continue
            first = k if step == (_LAST, _THIRD) else k - 2
            if order[max(first, 0) : first + 4] not in ([0, _SECOND, _THIRD, _LAST], [_LAST, _THIRD, _SECOND, 0]):
                raise NotPeriodic("a traversal turns back")
            parts = [_Part(order[at], range(ends[at], ends[at + 1])) for at in (first + 1, first + 2)]
            if any(isinstance(item, str) for part in parts for item in self._of(part.items)):
                raise NotPeriodic("a phase begins inside of a unit")
            if parts[1].unit == _THIRD:
                last = range(parts[1].items.stop, ends[first + 4])
                if self._forward_of(_THIRD, parts[1].items) != self._forward_of(_LAST, last):
                    raise NotPeriodic("the last unit does something else than the third")
            yield parts

    def _forward_of(self, unit: int, part: range) -> list[Op]:
        """The ops of one of the four units' modules in a forward."""
        forward = (item for item in self._of(part) if isinstance(item, Op) and item.phase == "forward")
        within = functools.cache(self._four[unit].within)
        return [op.later(-op.at, str(within(op.module))) for op in forward if within(op.module)]

    # -- whether the units do the same ------------------------------------------------------------------------------

    def _compare(self, second: _Part, third: _Part) -> None:
        named, freed = self._named(second)
        other_named, other_freed = self._named(third)
        if named != other_named:
            raise NotPeriodic("the second and the third unit do not do the same")
        for (away, one), (_, other) in zip(freed, other_freed, strict=True):
            if away < 0:
                self._name_storage(one, 0, self._place_of[other][1])
            elif away > 0:
                self._name_storage(other, _LAST, self._place_of[one][1])

    def _name_storage(self, storage: int, unit: int, place: Place) -> None:
        self._storage_of[unit, place] = storage
        self._place_of[storage] = unit, place

    def _named(self, part: _Part) -> tuple[list[Any], list[tuple[int, int]]]:
        """The items of a part with names that do not depend on the unit, as if it were the third; and its frees.

        A free is the distance to the storage's unit, and the storage. Consecutive frees are sorted, because autocast's
        cache is freed in the order of addresses. A storage made by neither the second nor the third unit is the
        first's if the second frees it, the last's if the third does.
        """
        as_third = functools.cache(functools.partial(self._four[part.unit].moved, to=self._four[_THIRD]))
        named: list[Any] = []
        freed: list[tuple[int, int]] = []
        for frees, row in groupby(self._of(part.items), is_free):
            if frees:
                names = sorted((self._name_of_free(~item, part.unit), ~item) for item in filter(is_free, row))
                named += [name for name, _ in names]
                freed += [(name[0], storage) for name, storage in names]
            for item in row:
                if isinstance(item, Op):
                    named.append(item.later(-item.at, as_third(item.module)))
                elif isinstance(item, int):
                    named.append(self.storages[item].copy(as_third))
        return named, freed

    def _name_of_free(self, storage: int, by: int) -> tuple[Any, ...]:
        unit, place = self._place_of.get(storage, (0 if by == _SECOND else _LAST, (0, 0)))
        like = self.storages[storage]
        return unit - by, like.op, like.nbytes, () if unit - by else place

    # -- what the skipped units did ---------------------------------------------------------------------------------

    def _copy_storages(self) -> None:
        gradients, third = self.run.gradients, self._four[_THIRD]
        if any(self._place_of.get(gradient, (None,))[0] != _THIRD for gradient in gradients):
            raise NotPeriodic("a gradient is not made in its unit")
        for k, number in enumerate(self.run.missing):
            moved = functools.cache(functools.partial(third.moved, to=self.units[number]))
            for (unit, place), storage in self._storage_of.items():
                if unit == _THIRD:
                    index = gradients[storage][k] if storage in gradients else len(self.storages)
                    self.storages[index : index + 1] = [self.storages[storage].copy(moved)]
                    self._copied[number, place] = index

    def _storage_in(self, number: int, place: Place) -> int:
        """The storage of unit `number` at `place`."""
        if number in self.run.missing:
            return self._copied[number, place]
        return self._storage_of[min(number, _LAST), place]

    def _insert_copies(self, one: _Part, other: _Part) -> None:
        """Insert the skipped units' parts of a traversal, of which these are the second's and the third's."""
        up, missing = other.unit == _THIRD, self.run.missing
        part = other.items if up else one.items
        inserted = self._inserted[part.stop if up else part.start]
        for number in missing if up else reversed(missing):
            moved = functools.cache(functools.partial(self._four[_THIRD].moved, to=self.units[number]))
            for item in self._of(part):
                if isinstance(item, Op):
                    inserted.append(item.later(0, moved(item.module)))
                elif isinstance(item, int):
                    unit, place = self._place_of[max(item, ~item)]
                    storage = self._storage_in(number + unit - _THIRD, place)
                    inserted.append(storage if item >= 0 else ~storage)

    def _free_outside(self) -> None:
        """Free the units' storages that neither the second nor the third unit frees."""
        inside = {at: part.unit for parts in self._traversals for part in parts for at in part.items}
        freed_at = {~item: at for at, item in enumerate(self.items) if is_free(item)}
        row_of = list(accumulate(isinstance(item, Op) or is_allocation(item) for item in self.items))
        first, last = self.run.missing[0], self.run.missing[-1]
        rows: defaultdict[int, list[tuple[int, int, Place]]] = defaultdict(list)
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
                self.items[ends[1]] = ~self._copied[last, place]
            elif by_unit == [False, True]:
                self._check_in(ends[0], 0)
            elif by_unit == [False, False]:
                if row_of[ends[0]] != row_of[ends[1]]:
                    raise NotPeriodic("units' storages are freed one after another, outside of units")
                rows[row_of[ends[0]]].append((*ends, place))
        for storage, at in freed_at.items():
            if inside.get(at) == _THIRD and self._place_of[storage][0] > _THIRD:
                self.items[at] = ~self._copied[first, self._place_of[storage][1]]
        for row in rows.values():
            self._insert_frees(sorted(row, key=lambda freed: freed[1]))

    def _check_in(self, at: int, unit: int) -> None:
        """Raise unless `unit` is the last of the four that began before item `at`."""
        begun = bisect_right(self._starts, at) - 1
        if begun < 0 or self._order[begun] != unit:
            raise NotPeriodic("units do not free what the others free of their neighbours")

    def _insert_frees(self, row: list[tuple[int, int, Place]]) -> None:
        """row: the items that free the second and the third unit's storages at each place, in a row."""
        down = all(second > third for second, third, _ in row)
        numbers = reversed(self.run.missing) if down else self.run.missing
        at = row[0][1] if down else row[-1][1] + 1
        self._inserted[at] += [~self._copied[number, place] for number in numbers for _, _, place in row]
