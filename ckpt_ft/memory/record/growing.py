"""A record while it grows: how far it has come, and what came since taken back."""

from __future__ import annotations

from typing import NamedTuple

from .events import Op, Storage
from .trace import StepTrace


class Reached(NamedTuple):
    """How much of each a record has."""

    ops: int
    storages: int
    events: int
    marks: int


class Growing(NamedTuple):
    """A tracker's own lists, without what was there before the first event."""

    ops: list[Op]
    storages: list[Storage]
    events: list[int]
    marks: list[tuple[int, str]]

    @property
    def reached(self) -> Reached:
        return Reached(len(self.ops), len(self.storages), len(self.events), len(self.marks))

    def as_it_stands(self) -> StepTrace:
        """A trace of these very lists: no copy."""
        return StepTrace("", self.storages, self.events, self.ops, self.marks)

    def between(self, start: Reached, stop: Reached) -> tuple[list[str], list[int]]:
        """Names of the ops, and bytes of the storages, that came while the record reached `stop` from `start`."""
        names = [op.name for op in self.ops[start.ops : stop.ops]]
        return names, [storage.nbytes for storage in self.storages[start.storages : stop.storages]]

    def take_back(self, to: Reached) -> bool:
        """Forget what came since; False, and nothing is, where some of it lives or something from before has died."""
        freed = {~event for event in self.events[to.events :] if event < 0}
        if freed != set(range(to.storages, len(self.storages))):
            return False
        del self.ops[to.ops :], self.storages[to.storages :], self.events[to.events :], self.marks[to.marks :]
        return True
