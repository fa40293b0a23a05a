"""A step whose forward and backward are those of the step before it: taken from the record, not run once more.

A trace warms up with the very step that it measures, or measures first. What differs is the optimizer, which makes its
state the first time, and workspaces, which stay. So the record gets the forward and backward a second time, the model
the gradients that they leave, and only what comes after the backward runs. Where the first step leaves anything else
(a table that the model keeps, say), the second one would find it: then nothing is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from ckpt_ft.memory.record.passages import Skipped
from ckpt_ft.memory.record.repeating import Repeating
from ckpt_ft.memory.record.tracker import Tracker

from .fakes import Fakes
from .skipping import is_whole


class _Gradient(NamedTuple):
    parameter: nn.Parameter
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Again:
    """Follows the step of `model` that `tracker` records next, which may be recorded once more.

    Args:
        update: what comes after its backward.
        repeated: what units do of which some are skipped, in the steps that are over; the second step's are added.
    """

    def __init__(
        self, model: nn.Module, tracker: Tracker, fakes: Fakes, update: Callable[[], object], repeated: list[Repeating]
    ) -> None:
        self.model, self.tracker, self.fakes, self.update, self.repeated = model, tracker, fakes, update, repeated
        self._start = self._stop = tracker.growing.reached
        self._gradients: dict[int, _Gradient] = {}  # that the backward leaves, by their storages' indices
        self._all_whole = False  # each has a storage of its own

    def backward_is_over(self) -> None:
        """The optimizer's part of the step begins."""
        self._stop = self.tracker.growing.reached
        given = [(p, p.grad) for p in self.model.parameters() if p.grad is not None]
        self._all_whole = all(is_whole(gradient) for _, gradient in given)
        self._gradients = {
            index: _Gradient(parameter, gradient.shape, gradient.stride(), gradient.dtype)
            for parameter, gradient in given
            if self._all_whole and (index := self.tracker.index_of(gradient)) is not None
        }
        self._all_whole &= len(self._gradients) == len(given)

    def recorded(self) -> bool:
        """Record the step, which is over, once more; False where a second run might do something else."""
        held = self._held()
        if held is None:
            return False
        number, ops = self._copied()
        self.update()
        growing = self.tracker.growing
        growing.events.extend(~number[index] for index in held)
        for one in self.repeated[:]:
            skipped = Skipped(one.skipped.units, range(one.skipped.ops.start + ops, len(growing.ops)))
            for index, others in one.skipped.gradients.items():
                skipped.gradients[number[index]] = [number[other] for other in others]
            self.repeated.append(Repeating(growing.as_it_stands(), skipped))
        return True

    def _held(self) -> list[int] | None:
        """What lives on besides gradients until the step returns (the loss, the batch), in the order in which it dies.

        None where something else is left, or touched that was there before.
        """
        growing, start, stop = self.tracker.growing, self._start, self._stop
        if not self._all_whole or any(op.phase == "optimizer" for op in growing.ops[start.ops : stop.ops]):
            return None
        made = set(range(start.storages, stop.storages))
        freed = {~event for event in growing.events[start.events : stop.events] if event < 0}
        freed_later = {~event for event in growing.events[stop.events :] if event < 0}
        lasting = {index for index in made - freed - freed_later if growing.storages[index].category == "workspace"}
        held = made - freed - lasting - set(self._gradients)
        tail = [~event for event in growing.events[len(growing.events) - len(held) :]]
        if not freed <= made or not set(self._gradients) <= made & freed_later or set(tail) != held:
            return None
        return tail

    def _copied(self) -> tuple[dict[int, int], int]:
        """Append the forward and backward to the record: old -> new index of storages, and by how much ops moved."""
        growing, start, stop = self.tracker.growing, self._start, self._stop
        more = len(growing.ops) - start.ops
        made = {~event if event < 0 else event for event in growing.events[start.events : stop.events]}
        dies = {~event for event in growing.events[start.events :] if event < 0}
        number: dict[int, int] = {}
        for index in range(start.storages, stop.storages):
            if index in self._gradients:
                parameter, shape, stride, dtype = self._gradients[index]
                parameter.grad = self.fakes.new(shape, stride, dtype)
                number[index] = self.tracker.follow_like(parameter.grad, index)
            elif index in made and index in dies:
                number[index] = len(growing.storages)
                growing.storages.append(growing.storages[index].copy())
        reached = [len(growing.events)]  # events, when so many of the step's had happened
        for event in growing.events[start.events : stop.events]:
            like = number.get(~event if event < 0 else event)
            if like is not None:
                growing.events.append(~like if event < 0 else like)
            reached.append(len(growing.events))
        for op in growing.ops[start.ops : stop.ops]:
            growing.ops.append(op.later(reached[op.at - start.events] - op.at))
        for at, name in growing.marks[start.marks : stop.marks]:
            if name != "optimizer":  # which `update` begins
                growing.marks.append((reached[at - start.events], name))
        self.tracker.after_backward()
        return number, more
