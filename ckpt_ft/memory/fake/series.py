"""Series: blocks in a row that are built alike, and whether they are called alike too, in one step."""

from __future__ import annotations

import random
from typing import Any

import numpy
from torch import nn

from ckpt_ft.memory.record.passages import FIRST, NotPeriodic, Skipped
from ckpt_ft.memory.record.tracker import Tracker

from .calls import Call, Wire, are_handed_on, are_known

FEWEST = FIRST + 3  # blocks in a series; of the fewest, two are skipped


class Series:
    """Follows the calls of a step's forwards, and says of each block whether it may be skipped.

    Attributes:
        blocks, names: modules that are built alike, in order, and what they are called.
        skipped: from when the first one is.
        whole: one was not called like the others: all of them run.
    """

    def __init__(self, blocks: list[nn.Module], names: list[str], step: int, tracker: Tracker) -> None:
        self.blocks, self.names, self.step, self.tracker = blocks, names, step, tracker
        self.skipped: Skipped | None = None
        self.whole = False
        self._begin = tracker.reached[0]
        self._forward()

    def _forward(self) -> None:
        """A forward of the blocks begins."""
        self._last = -1  # block called
        self._calls: list[Call] = []  # of the first three
        self._wires: list[Wire] = []  # of the second one's call, and so of all that follow
        self._entered: list[tuple[int, int]] = []  # what the record had reached when the first three were called
        self._left = (0, 0)  # when the last one returned
        self._holders: list[tuple[int, int, int]] = []  # of what the third one was given
        self._drawn = _random_states()

    def skips(self, number: int, call: Call) -> bool:
        """Block `number` is called: whether it is skipped.

        Raises:
            NotPeriodic: it is not called like those before it, of which some have been skipped.
        """
        if number == 0:
            self._forward()
        elif not self._repeats(number, call):
            self._give_up("a block is called otherwise than those before it")
            return False
        self._last = number
        if len(self._calls) < FIRST:
            self._entered.append(self.tracker.reached)
        if self.whole or not FIRST <= number < len(self.blocks) - 1:
            return False
        if self.skipped is None:
            self.skipped = Skipped(self.names, self.step, range(self._begin, self._begin))
        return True

    def passed_on(self, call: Call) -> object:
        """What a block that is skipped returns."""
        return call.passed_on(self._calls[-1], self._wires)

    def returned(self, call: Call, out: object) -> None:
        """A block has run."""
        if len(self._calls) < FIRST:
            call.returns(out)
            self._calls.append(call)
        self._left = self.tracker.reached

    def runs_again(self, number: int) -> None:
        """Block `number` is called in a backward, by a checkpoint.

        Raises:
            NotPeriodic: it was skipped, for the checkpoint is around more than a block.
        """
        if self.skipped is not None and number in self.skipped.missing:
            raise NotPeriodic("a block that was skipped runs again", [self.step])

    def ends(self) -> None:
        """The step is over."""
        if self.skipped is not None:
            self.skipped.ops = range(self._begin, self.tracker.reached[0])

    def _give_up(self, reason: str) -> None:
        if self.skipped is not None:
            raise NotPeriodic(reason, [self.step])
        self.whole = True

    def _repeats(self, number: int, call: Call) -> bool:
        """Whether the call of block `number` is like that of the one before it, as far as there is one to compare."""
        if number != self._last + 1 or len(self._calls) < min(number, FIRST):
            return False
        before = self._calls[-1]
        wires = call.wires(before)
        if number == 1:
            self._wires = wires
            return are_known(wires) and call.spec == before.spec
        if wires != self._wires or call.spec != before.spec:
            return False
        holders = call.holders(wires)
        if number == 2:
            self._holders = holders
            return True
        if number == FIRST and not self._third_repeats_second():
            return False
        if number == FIRST and self._drawn != _random_states():  # a block may be dropped by a coin
            return False
        return holders == self._holders and self._left == self.tracker.reached

    def _third_repeats_second(self) -> bool:
        _, second, third = self._calls
        if third.outputs != second.outputs or third.returned_spec != second.returned_spec:
            return False
        one = self.tracker.between(self._entered[1], self._entered[2])
        other = self.tracker.between(self._entered[2], self.tracker.reached)
        return are_handed_on(third.outputs, self._wires) and one == other


def _random_states() -> tuple[object, ...]:
    """Of the generators that Python code draws from: torch's, asked for fakes, draw nothing."""
    drawn: Any = numpy.random.get_state()
    return random.getstate(), drawn[1].tobytes(), drawn[2]
