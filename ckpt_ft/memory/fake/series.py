"""Series: units of blocks in a row that are built alike, and whether they are called alike too, in one step."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy
from torch import nn

from ckpt_ft.memory.record.growing import Reached
from ckpt_ft.memory.record.passages import FIRST, NotPeriodic, Skipped, Unit
from ckpt_ft.memory.record.tracker import Tracker

from .calls import Call, Wire, are_handed_on, are_known

FEWEST = 2  # blocks of a series that are skipped


class Stretch(NamedTuple):
    """Numbers of the blocks of a series, and how many make a unit."""

    blocks: range
    period: int

    @property
    def skipped(self) -> int:
        """How many blocks are skipped."""
        return len(self.blocks) - (FIRST + 1) * self.period


def stretches(kinds: Sequence[object]) -> Iterator[Stretch]:
    """The parts of a list of blocks, of these kinds, in which the kinds repeat often enough.

    Of the periods from one block on, the one of which the most is skipped; blocks left over are in none.
    """
    first = 0
    while first < len(kinds):
        found = [_longest(kinds, first, period) for period in range(1, (len(kinds) - first) // (FIRST + 2) + 1)]
        best = max(found, key=lambda one: one.skipped / len(one.blocks), default=None)
        if best is None or best.skipped < FEWEST:
            first += 1
            continue
        yield best
        first = best.blocks.stop


def _longest(kinds: Sequence[object], first: int, period: int) -> Stretch:
    """As many whole units as there are from `first` on."""
    at = first + period
    while at < len(kinds) and kinds[at] == kinds[at - period]:
        at += 1
    return Stretch(range(first, at - (at - first) % period), period)


class Series:
    """Follows the calls of a step's forwards, and says of each block whether it may be skipped.

    A checkpoint around all of them calls them once more in a backward: that is a forward like any other.

    Args:
        blocks, names: those of whole units that are built alike, in order, and what they are called.
        period: blocks in a unit.

    Attributes:
        skipped: from when the first one is.
        whole: one was not called like the others: all of them run.
    """

    def __init__(self, blocks: list[nn.Module], names: list[str], period: int, tracker: Tracker) -> None:
        self.blocks, self.period, self.tracker = blocks, period, tracker
        self.units = [Unit(names[at : at + period]) for at in range(0, len(names), period)]
        self.skipped: Skipped | None = None
        self.whole = False
        self._begin = tracker.growing.reached.ops
        self._forward = _Forward(period, tracker)
        self._again: _Forward | None = None  # in a backward

    def skips(self, number: int, call: Call) -> bool:
        """Block `number` is called: whether it is skipped.

        Raises:
            NotPeriodic: it is not called like those before it, of which some have been skipped.
        """
        if number == 0:
            self._forward = _Forward(self.period, self.tracker)
        if not self._forward.follows(number, call):
            if self.skipped is not None:
                raise NotPeriodic(f"{self.units[0][0]}: a block is called otherwise", [self.units[0][0]])
            self.whole = True
        if self.whole or not self._is_missing(number):
            return False
        if self.skipped is None:
            self.skipped = Skipped(self.units, range(self._begin, self._begin))
        return True

    def skips_again(self, number: int, call: Call) -> bool:
        """Block `number` is called in a backward, by a checkpoint: whether it is skipped.

        Raises:
            NotPeriodic: it was in the forward, and its call is none of a second forward.
        """
        if number == 0:
            self._again = _Forward(self.period, self.tracker)
        if self._again is not None and not self._again.follows(number, call):
            self._again = None
        if self.skipped is None or not self._is_missing(number):
            return False
        if self._again is None:
            raise NotPeriodic(f"{self.units[0][0]}: a block that was skipped runs again", [self.units[0][0]])
        return True

    def passed_on(self, call: Call, again: bool) -> object:
        """What a block that is skipped returns."""
        return (self._again if again and self._again else self._forward).passed_on(call)

    def returned(self, call: Call, again: bool) -> None:
        """A block has run."""
        forward = self._again if again else self._forward
        if forward is not None:
            forward.returned(call)

    def modules(self, unit: int) -> Iterator[nn.Module]:
        """Those of all blocks of a unit."""
        for block in self.blocks[unit * self.period : (unit + 1) * self.period]:
            yield from block.modules()

    def ends(self) -> None:
        """The step is over."""
        if self.skipped is not None:
            self.skipped.ops = range(self._begin, self.tracker.growing.reached.ops)

    def _is_missing(self, number: int) -> bool:
        return FIRST <= number // self.period < len(self.units) - 1


class _Forward:
    """A forward of the blocks, as far as it has come: what their calls are to those a unit before."""

    def __init__(self, period: int, tracker: Tracker) -> None:
        self.period, self.tracker = period, tracker
        self._last = -1  # block called
        self._calls: list[Call] = []  # of the first three units
        self._before: Call | None = None  # the last one that ran
        self._wires: list[list[Wire]] = []  # of the second unit's calls, and so of all that follow
        self._entered: list[Reached] = []  # what the record had reached when the first three units were called
        self._left: tuple[int, ...] = ()  # ops and storages when the last block returned
        self._holders: list[tuple[int, int, int]] = []  # of what the third unit was given
        self._drawn = _random_states()

    def follows(self, number: int, call: Call) -> bool:
        """Whether the call of block `number` is like that a unit before, as far as there is one to compare."""
        unit, place = divmod(number, self.period)
        if number != self._last + 1 or len(self._calls) < min(number, FIRST * self.period):
            return False
        self._last = number
        if unit < FIRST and place == 0:
            self._entered.append(self.tracker.growing.reached)
        return unit == 0 or self._repeats(number, call)

    def returned(self, call: Call) -> None:
        """The block last called has run."""
        self._before = call
        if len(self._calls) < FIRST * self.period:
            self._calls.append(call)
        self._left = self.tracker.growing.reached[:2]

    def passed_on(self, call: Call) -> object:
        """What a block that is skipped returns: in place of what is new, what it was given."""
        place = self._last % self.period
        return call.passed_on(self._calls[place - self.period], self._wires[place])

    def _repeats(self, number: int, call: Call) -> bool:
        unit, place = divmod(number, self.period)
        like = self._calls[min(unit - 1, FIRST - 1) * self.period + place]
        assert self._before is not None, "a unit has run"
        wires = call.wires(like, self._before)
        if call.spec != like.spec:
            return False
        if unit == 1:
            self._wires.append(wires)
            return are_known(wires)
        if wires != self._wires[place]:
            return False
        if unit < FIRST:
            if unit == FIRST - 1 and place == 0:
                self._holders = call.holders(wires)
            return True
        if number == FIRST * self.period and not self._third_repeats_second():
            return False
        if self._before is not self._calls[-1]:  # inside of the last unit
            return True
        return call.holders(wires) == self._holders and self._left == self.tracker.growing.reached[:2]

    def _third_repeats_second(self) -> bool:
        seconds, thirds = self._calls[-2 * self.period : -self.period], self._calls[-self.period :]
        for place, (second, third) in enumerate(zip(seconds, thirds, strict=True)):
            if third.outputs != second.outputs or third.returned_spec != second.returned_spec:
                return False
            if not are_handed_on(third, self._wires[place]):
                return False
        growing = self.tracker.growing
        if self._drawn != _random_states():  # a block may be dropped by a coin
            return False
        one = growing.between(self._entered[1], self._entered[2])
        return one == growing.between(self._entered[2], growing.reached)


def _random_states() -> tuple[object, ...]:
    """Of the generators that Python code draws from: torch's, asked for fakes, draw nothing."""
    drawn: Any = numpy.random.get_state()
    return random.getstate(), drawn[1].tobytes(), drawn[2]
