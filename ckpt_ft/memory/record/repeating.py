"""Whether blocks repeat each other: what the second and the third one do in every passage, event for event, op for op.

They make the same allocations, and free what stands at the same place in the block itself, in the one before"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .events import Op, renamed
from .passages import LAST, SECOND, THIRD, NotPeriodic, Part, Passages, Skipped
from .trace import StepTrace


class Place(NamedTuple):
    """The `number`-th storage that a block allocates in a passage."""

    passage: int
    number: int


class Role(NamedTuple):
    """Whose storage a block frees: the one at `place` of the block `away` (-1, 0 or 1) from it."""

    away: int
    place: Place


class Repeating:
    """What the blocks of a step do, each the same.

    Attributes:
        own: (which of the four blocks, place) -> storage; of the first and the last block those that others free.
        roles: of the frees in the third block's parts, by event.

    Raises:
        NotPeriodic: the second and the third block do not do the same.
    """

    def __init__(self, trace: StepTrace, skipped: Skipped) -> None:
        self.trace, self.names = trace, skipped.names
        self.passages = Passages(trace, skipped)
        self.own: dict[tuple[int, Place], int] = {}
        self.roles: dict[int, Role] = {}
        self._homes: dict[int, tuple[int, Place]] = {}  # `own` the other way round, of the second and third block
        self._as_third: dict[str, str] = {}  # modules of the second block as the third one's
        for number, passage in enumerate(self.passages):
            self._settle(SECOND, number, passage.second)
            self._settle(THIRD, number, passage.third)
        for passage in self.passages:
            self._compare(passage.second, passage.third)
            if passage.up and self._inside(passage.third.ops, THIRD) != self._inside(passage.last, LAST):
                raise NotPeriodic("the last block does something else than the third")

    def is_of_third(self, storage: int) -> bool:
        """Whether the third block allocates it in a passage."""
        return storage in self._homes and self._homes[storage][0] == THIRD

    def _settle(self, block: int, passage: int, part: Part) -> None:
        made = [event for event in self.trace.events[part.events.start : part.events.stop] if event >= 0]
        for number, storage in enumerate(made):
            self._homes[storage] = block, Place(passage, number)
            self.own[block, Place(passage, number)] = storage

    def _compare(self, second: Part, third: Part) -> None:
        if len(second.ops) != len(third.ops) or len(second.events) != len(third.events):
            raise NotPeriodic("blocks do more and less")
        later = third.events.start - second.events.start
        ops = self.trace.ops
        for a, b in zip(second.ops, third.ops, strict=True):
            if not self._same_op(ops[a], ops[b], later):
                raise NotPeriodic(f"blocks do {ops[a]} and {ops[b]}")
        for one, other in zip(self._rows(second), self._rows(third), strict=True):
            self._compare_rows(one, other)

    def _same_op(self, one: Op, other: Op, later: int) -> bool:
        return one.later(later, self._moved(one.module)) == other

    def _moved(self, module: str) -> str:
        known = self._as_third.get(module)
        if known is None:
            known = self._as_third[module] = renamed(module, self.names[SECOND], self.names[THIRD])
        return known

    def _inside(self, ops: range, block: int) -> list[tuple[object, ...]]:
        """What the modules of one of the four blocks do in a forward."""
        name = self.names[-1 if block == LAST else block]
        found = (op for op in (self.trace.ops[at] for at in ops) if op.phase == "forward")
        return [
            (op.name, op.flops, op.nbytes, op.dtype, op.shape, op.kernels, op.around, op.module[len(name) :])
            for op in found
            if op.module == name or op.module.startswith(f"{name}.")
        ]

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
            raise NotPeriodic("blocks free more and less")
        if ones[0] >= 0 and others[0] >= 0:
            made, like = self.trace.storages[ones[0]], self.trace.storages[others[0]]
            if made.copy(self.names[SECOND], self.names[THIRD]) != like:
                raise NotPeriodic(f"blocks make {made} and {like}")
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
                raise NotPeriodic("blocks free unlike storages")

    def _role(self, one: int, other: int) -> Role | None:
        """What `other` is to the third block, if `one` is the same to the second."""
        home, other_home = self._homes.get(one), self._homes.get(other)
        if home is not None and other_home is not None:
            same = (home[0], other_home[0]) == (SECOND, THIRD) and home[1] == other_home[1]
            return Role(0, home[1]) if same else None
        if other_home is not None and other_home[0] == SECOND and self._is_at(0, other_home[1], one, other):
            return Role(-1, other_home[1])
        if home is not None and home[0] == THIRD and self._is_at(LAST, home[1], other, one):
            return Role(1, home[1])
        return None

    def _is_at(self, block: int, place: Place, storage: int, inner: int) -> bool:
        """Whether the first or last block has `storage` where the second or third one has `inner`."""
        a, b = self.trace.storages[storage], self.trace.storages[inner]
        old, new = (0, SECOND) if block == 0 else (-1, THIRD)
        module = renamed(a.module, self.names[old], self.names[new])
        same = (a.nbytes, a.op) == (b.nbytes, b.op) and module in (a.module, b.module)  # or made outside of its block
        return same and self.own.setdefault((block, place), storage) == storage
