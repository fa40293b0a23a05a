"""Repeats the forward and backward of a step in the record, without running them.

The warm-up step and the measured step run the same code. In the second step only the optimizer's state and the
workspaces differ, because they exist already. So forward and backward are copied in the record, the model gets their
gradients, and only the optimizer's part runs. If the first step leaves anything else behind (such as a table that the
model keeps), the second one might use it, and nothing is copied.

A step ends its backward with `loss.detach()`, as a Trainer does. It is the first operator of the optimizer's phase.
The graph of the loss is freed after it, before the update begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from ckpt_ft.memory.record.recorder import Position
from ckpt_ft.memory.record.tracker import Tracker

from .faked_model import Fakes
from .skipped_blocks import is_whole


class _Gradient(NamedTuple):
    parameter: nn.Parameter
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class ReplayStep:
    """Follows the step of `model` that `tracker` records next, and may repeat it.

    update: runs the part of a step after its backward.
    """

    def __init__(self, model: nn.Module, tracker: Tracker, fakes: Fakes, update: Callable[[], object]) -> None:
        self.model, self.tracker, self.fakes, self.update = model, tracker, fakes, update
        self.recorder = tracker.recorder
        self._start = self.recorder.position
        self._repeatable = False  # one optimizer phase, before which each gradient has a storage of its own
        self._seen = False
        self._mark = 0  # the one with which the optimizer's phase begins
        tracker.context.phase_listeners.append(self._phase_begins)

    def _phase_begins(self, phase: str) -> None:
        if phase != "optimizer":
            return
        given = [(p, p.grad) for p in self.model.parameters() if p.grad is not None]
        indices = {self.recorder.index_of(gradient): (p, gradient) for p, gradient in given if is_whole(gradient)}
        self._repeatable = not self._seen and len(indices) == len(given) and None not in indices
        self._seen, self._mark = True, len(self.recorder.marks) - 1
        self.recorder.attached = {
            index: _Gradient(parameter, gradient.shape, gradient.stride(), gradient.dtype)
            for index, (parameter, gradient) in indices.items()
            if index is not None
        }

    def replay(self) -> bool:
        """Record the step once more; returns False if a second run of it might do something else."""
        self.tracker.context.phase_listeners.remove(self._phase_begins)
        gradients, self.recorder.attached = self.recorder.attached, {}
        if not self._repeatable:
            return False
        begins = self._where_update_begins()
        held = self._held_until_return(begins.events, gradients)
        if held is None:
            return False
        number = self._copy(begins, gradients)
        self.tracker.resume_before_update()
        self.update()
        self.recorder.events.extend(~number[index] for index in held)
        return True

    def _where_update_begins(self) -> Position:
        """Returns the place at which the graph of the loss has been freed."""
        recorder = self.recorder
        later = range(self._start.ops, len(recorder.ops))
        detach = next((at for at in later if recorder.ops[at].phase == "optimizer"), len(recorder.ops))
        events = recorder.ops[detach + 1].at if detach + 1 < len(recorder.ops) else recorder.marks[self._mark][0]
        return Position(min(detach + 1, len(recorder.ops)), len(recorder.storages), events, self._mark + 1)

    def _held_until_return(self, stop: int, gradients: dict[int, Any]) -> list[int] | None:
        """The storages, besides gradients, that live until the step returns (loss, batch), in the order of frees.

        None if something else is left behind, or something older was freed.

        stop: event with which the update begins.
        """
        events = self.recorder.events
        made = {event for event in events[self._start.events : stop] if event >= 0}
        freed = {~event for event in events[self._start.events : stop] if event < 0}
        freed_later = {~event for event in events[stop:] if event < 0}
        left = made - freed - freed_later
        lasting = {index for index in left if self.recorder.storages[index].category == "workspace"}
        held = made - freed - lasting - gradients.keys()
        last = [~event for event in events[len(events) - len(held) :]]
        if not freed <= made or not gradients.keys() <= made & freed_later or set(last) != held:
            return None
        return last

    def _copy(self, stop: Position, gradients: dict[int, Any]) -> dict[int, int]:
        """Append the step up to `stop`, where the update begins; returns the new index of each storage."""
        recorder, start = self.recorder, self._start
        events = recorder.events[start.events : stop.events]
        ops = recorder.ops[start.ops : stop.ops]
        marks = recorder.marks[start.marks : stop.marks]
        freed = {~event for event in recorder.events[start.events :] if event < 0}
        number: dict[int, int] = {}
        for index in sorted(event for event in events if event >= 0):
            if index in gradients:
                parameter, shape, stride, dtype = gradients[index]
                parameter.grad = self.fakes.new(shape, stride, dtype)
                number[index] = recorder.follow_like(parameter.grad, index)
            elif index in freed:
                number[index] = len(recorder.storages)
                recorder.storages.append(recorder.storages[index].copy())
        reached = [len(recorder.events)]  # events of the copy, after each of the original's
        for event in events:
            like = number.get(~event if event < 0 else event)
            if like is not None:
                recorder.events.append(~like if event < 0 else like)
            reached.append(len(recorder.events))
        recorder.ops += [op.later(reached[op.at - start.events] - op.at) for op in ops]
        recorder.marks += [(reached[at - start.events], name) for at, name in marks]
        return number
