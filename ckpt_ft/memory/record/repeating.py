"""Whether units repeat each other: what the second and the third one do in every passage, event for event, op for op.

They make the same allocations, and free what stands at the same place in the unit itself or in a neighbour of it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import NamedTuple

from .events import Op
from .passages import LAST, SECOND, THIRD, NotPeriodic, Part, Passage, Passages, Skipped
from .trace import StepTrace


class Place(NamedTuple):
    """The `number`-th storage that a unit allocates in a passage."""

    passage: int
    number: int


class Role(NamedTuple):
    """Whose storage a unit frees: the one at `place` of the unit `away` (-1, 0 or 1) from it."""

    away: int
    place: Place


class Repeating:
    """What the units of a step do, each the same.

    Attributes:
        own: (which of the four units, place) -> storage; of the first and the last unit those that others free.
        roles: of the frees in the third unit's parts, by event.

    Raises:
        NotPeriodic: the second and the third unit do not do the same.
    """

    def __init__(self, trace: StepTrace, skipped: Skipped) -> None:
        self.trace, self.skipped = trace, skipped
        self.passages: list[Passage] = []
        self.own: dict[tuple[int, Place], int] = {}
        self.roles: dict[int, Role] = {}
        self._four = [skipped.units[number] for number in (0, SECOND, THIRD, -1)]
        self._homes: dict[int, tuple[int, Place]] = {}  # `own` the other way round, of the second and third unit
        self._moves: dict[tuple[int, int, str], str] = {}  # modules of one of the four as another one's
        try:
            self._find()
        except NotPeriodic as error:
            raise NotPeriodic(f"{skipped.name}: {error}", [skipped.name]) from None

    def _find(self) -> None:
        self.order = Passages(self.trace, self.skipped)
        self.passages = list(self.order)
        for number, passage in enumerate(self.passages):
            self._settle(SECOND, number, passage.second)
            self._settle(THIRD, number, passage.third)
        for passage in self.passages:
            self._compare(passage.second, passage.third)
            if passage.up and self._inside(passage.third.ops, THIRD) != self._inside(passage.last, LAST):
                raise NotPeriodic("the last unit does something else than the third")

    def within(self, trace: StepTrace, late: int) -> Repeating:
        """The same in a `trace` in which `late` events came before those of this one."""
        other = copy.copy(self)
        other.trace = trace
        other.passages = [passage.later(late) for passage in self.passages]
        other.roles = {event + late: role for event, role in self.roles.items()}
        return other

    def is_of_third(self, storage: int) -> bool:
        """Whether the third unit allocates it in a passage."""
        return storage in self._homes and self._homes[storage][0] == THIRD

    def _settle(self, unit: int, passage: int, part: Part) -> None:
        made = [event for event in self.trace.events[part.events.start : part.events.stop] if event >= 0]
        for number, storage in enumerate(made):
            self._homes[storage] = unit, Place(passage, number)
            self.own[unit, Place(passage, number)] = storage

    def _compare(self, second: Part, third: Part) -> None:
        if len(second.ops) != len(third.ops) or len(second.events) != len(third.events):
            raise NotPeriodic("units do more and less")
        later = third.events.start - second.events.start
        ops = self.trace.ops
        for a, b in zip(second.ops, third.ops, strict=True):
            if not self._same_op(ops[a], ops[b], later):
                raise NotPeriodic(f"units do {ops[a]} and {ops[b]}")
        for one, other in zip(self._rows(second), self._rows(third), strict=True):
            self._compare_rows(one, other)

    def _same_op(self, one: Op, other: Op, later: int) -> bool:
        return one.later(later, self._moved(one.module, SECOND, THIRD)) == other

    def _moved(self, module: str, one: int, other: int) -> str:
        """A module of one of the four units as that of another."""
        known = self._moves.get((one, other, module))
        if known is None:
            known = self._moves[one, other, module] = self._four[one].moved(module, self._four[other])
        return known

    def _inside(self, ops: range, unit: int) -> list[tuple[object, ...]]:
        """What the modules of one of the four units do in a forward."""
        within: dict[str, str | None] = {}
        found: list[tuple[object, ...]] = []
        for op in (self.trace.ops[at] for at in ops):
            if op.phase != "forward":
                continue
            if op.module not in within:
                within[op.module] = self._four[unit].within(op.module)
            if within[op.module] is not None:
                done = op.name, op.flops, op.nbytes, op.dtype, op.shape, op.kernels, op.around
                found.append((*done, within[op.module]))
        return found

    def _rows(self, part: Part) -> Iterator[range]:
        """A part's events: each allocation by itself, and frees in a row."""
        begun = {self.trace.ops[at].at for at in part.ops}
        start = part.events.start
        for at in part.events:
            if at > start and (at in begun or self.trace.events[at] >= 0 or self.trace.events[at - 1] >= 0):
                yield range(start, at)
                start = at
        if start < part.events.stop:
            yield range(start, part.events.stop)

    def _compare_rows(self, second: range, third: range) -> None:
        """Of frees in a row the order may differ: autocast's cache goes in that of addresses."""
        ones, others = ([self.trace.events[at] for at in row] for row in (second, third))
        if len(ones) != len(others):
            raise NotPeriodic("units free more and less")
        if ones[0] >= 0 and others[0] >= 0:
            made, like = self.trace.storages[ones[0]], self.trace.storages[others[0]]
            if made.copy(lambda module: self._moved(module, SECOND, THIRD)) != like:
                raise NotPeriodic(f"units make {made} and {like}")
            return
        freed = [~one for one in ones]
        for at, other in zip(third, others, strict=True):
            for one in freed:
                role = self._role(one, ~other)
                if role is not None:
                    self.roles[at] = role
                    freed.remove(one)
                    break
            else:
                raise NotPeriodic("units free unlike storages")

    def _role(self, one: int, other: int) -> Role | None:
        """What `other` is to the third unit, if `one` is the same to the second."""
        home, other_home = self._homes.get(one), self._homes.get(other)
        if home is not None and other_home is not None:
            same = (home[0], other_home[0]) == (SECOND, THIRD) and home[1] == other_home[1]
            return Role(0, home[1]) if same else None
        if other_home is not None and other_home[0] == SECOND and self._is_at(0, other_home[1], one, other):
            return Role(-1, other_home[1])
        if home is not None and home[0] == THIRD and self._is_at(LAST, home[1], other, one):
            return Role(1, home[1])
        return None

    def _is_at(self, unit: int, place: Place, storage: int, inner: int) -> bool:
        """Whether the first or last unit has `storage` where the second or third one has `inner`."""
        a, b = self.trace.storages[storage], self.trace.storages[inner]
        module = self._moved(a.module, unit, SECOND if unit == 0 else THIRD)
        same = (a.nbytes, a.op) == (b.nbytes, b.op) and module in (a.module, b.module)  # or made outside of its unit
        return same and self.own.setdefault((unit, place), storage) == storage
