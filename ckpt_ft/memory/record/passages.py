"""Where in a record the blocks of a step are of which most were skipped: the first three of them and the last one ran.

A passage is one way through them, up in a forward (and in the second run of a segment), down in a backward. The blocks
skipped are missing between the third and the last one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from .trace import StepTrace

FIRST = 3  # blocks that run before those that are skipped
SECOND, THIRD, LAST = 1, 2, 3  # of the four that run


class NotPeriodic(Exception):
    """Blocks that are built alike do not repeat each other, in `steps`."""

    def __init__(self, reason: str, steps: Iterable[int] = ()) -> None:
        super().__init__(reason)
        self.steps = set(steps)


@dataclass
class Skipped:
    """Blocks that were skipped in one step.

    Attributes:
        names: of the modules that are alike, in order; all but the first `FIRST` and the last were skipped.
        step: which of the record's.
        ops: of the step.
        gradients: storage of a gradient of the third block -> those of the blocks skipped, in order; these are in the
            record but for the events that allocate them.
    """

    names: list[str]
    step: int
    ops: range
    gradients: dict[int, list[int]] = field(default_factory=dict)

    @property
    def missing(self) -> range:
        """Numbers of the blocks skipped."""
        return range(FIRST, len(self.names) - 1)


class Part(NamedTuple):
    """What one block does in one passage, from its first op to that of the next block."""

    ops: range
    events: range


class Passage(NamedTuple):
    """The parts of the second and third block in it, and whether it goes up; where it does, the last block's ops.

    After these come others that are not the last block's: the head's, and a backward's.
    """

    second: Part
    third: Part
    up: bool
    last: range = range(0)

    @property
    def cut(self) -> tuple[int, int]:
        """The event and the op before which the blocks skipped come."""
        if self.up:
            return self.third.events.stop, self.third.ops.stop
        return self.third.events.start, self.third.ops.start


class Passages(list[Passage]):
    """All of a step, in order.

    Raises:
        NotPeriodic: the blocks do not follow each other from one end to the other.
    """

    def __init__(self, trace: StepTrace, skipped: Skipped) -> None:
        self._ops, self._marks, self._end = trace.ops, trace.marks, skipped.ops.stop
        starts = list(_starts(trace, skipped))
        self._blocks = [block for block, _ in starts]
        self._starts = [at for _, at in starts]
        super().__init__(self._found())

    def block_at(self, event: int) -> int | None:
        """Which of the four blocks began last before `event`."""
        at = bisect_right(self._starts, event, key=lambda op: self._ops[op].at) - 1
        return self._blocks[at] if at >= 0 else None

    def _found(self) -> Iterator[Passage]:
        blocks = self._blocks
        if any(abs(a - b) != 1 and (a, b) != (LAST, 0) for a, b in pairwise(blocks)):
            raise NotPeriodic("blocks run out of order")
        for k, step in enumerate(pairwise(blocks)):
            if step == (THIRD, LAST):
                if blocks[max(k - 2, 0) : k] != [0, SECOND]:
                    raise NotPeriodic("a passage turns back")
                end = self._starts[k + 2] if k + 2 < len(self._starts) else self._end
                last = range(self._starts[k + 1], end)
                yield Passage(self._part(k - 1), self._part(k), up=True, last=last)
            elif step == (LAST, THIRD):
                if blocks[k + 2 : k + 4] != [SECOND, 0]:
                    raise NotPeriodic("a passage turns back")
                yield Passage(self._part(k + 2), self._part(k + 1), up=False)

    def _part(self, k: int) -> Part:
        ops = range(self._starts[k], self._starts[k + 1])
        events = range(self._ops[ops.start].at, self._ops[ops.stop].at)
        if any(events.start <= at <= events.stop for at, _ in self._marks):
            raise NotPeriodic("a phase begins inside of a block")
        return Part(ops, events)


def _starts(trace: StepTrace, skipped: Skipped) -> Iterator[tuple[int, int]]:
    """(which of the four, its first op), each time that another one begins."""
    names = skipped.names
    four = [names[0], names[SECOND], names[THIRD], names[-1]]
    known: dict[str, int | None] = {}
    last = None
    for at in skipped.ops:
        module = trace.ops[at].module
        if module not in known:
            inside = (k for k, name in enumerate(four) if module == name or module.startswith(f"{name}."))
            known[module] = next(inside, None)
        block = known[module]
        if block is not None and block != last:
            yield block, at
            last = block
