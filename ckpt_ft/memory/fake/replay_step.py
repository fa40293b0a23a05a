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
from typing import Any

from torch import nn

from ckpt_ft.memory.record.events import Item, Op, is_allocation, is_free
from ckpt_ft.memory.record.in_place_gradients import covers_storage
from ckpt_ft.memory.record.tracker import Tracker

from .faked_model import Fakes


class ReplayStep:
    """Follows the next step that `tracker` records, and may repeat it; `update` runs the part after its backward."""

    def __init__(self, model: nn.Module, tracker: Tracker, fakes: Fakes, update: Callable[[], object]) -> None:
        self.model, self.tracker, self.fakes, self.update = model, tracker, fakes, update
        self.recorder = tracker.recorder
        self._start = self.recorder.position
        self._repeatable = False  # one optimizer phase, before which each gradient has a storage of its own
        self._seen = False
        self._gradients: dict[Any, Any] = {}  # by storage: the parameter of each, and a gradient like it
        tracker.context.phase_listeners.append(self._phase_begins)

    def _phase_begins(self, phase: str) -> None:
        if phase != "optimizer":
            return
        given: list[tuple[Any, Any]] = [(p, p.grad) for p in self.model.parameters() if p.grad is not None]
        whole = [pair for pair in given if covers_storage(pair[1])]
        indices = {self.recorder.index_of(gradient): (p, gradient) for p, gradient in whole}
        self._repeatable = not self._seen and len(indices) == len(given) and None not in indices
        self._seen = True
        if self._repeatable:
            self._gradients = {index: (p, self.fakes.like(gradient)) for index, (p, gradient) in indices.items()}

    def replay(self) -> bool:
        """Record the step once more; returns False if a second run of it might do something else."""
        self.tracker.context.phase_listeners.remove(self._phase_begins)
        gradients = self._gradients
        if not self._repeatable:
            return False
        items = self.recorder.since(self._start)
        stop = _where_update_begins(items)
        held = self._held_until_return(items, stop, gradients)
        if held is None:
            return False
        number = self._copy(items[:stop], gradients, {~item for item in items if is_free(item)})
        self.tracker.resume_before_update()
        self.update()
        self.recorder.events.extend(~number[index] for index in held)
        return True

    def _held_until_return(self, items: list[Item], stop: int, gradients: dict[int, Any]) -> list[int] | None:
        """The storages, besides gradients, that live until the step returns (loss, batch), in the order of frees.

        None if something else is left behind, or something older was freed.

        stop: number of the item with which the update begins.
        """
        made = {item for item in items[:stop] if is_allocation(item)}
        freed, freed_later = ({~item for item in part if is_free(item)} for part in (items[:stop], items[stop:]))
        lasting = {index for index in made - freed_later if self.recorder.storages[index].category == "workspace"}
        held = made - freed - lasting - gradients.keys()
        last = [~event for event in self.recorder.events[len(self.recorder.events) - len(held) :]]
        if not freed <= made or not gradients.keys() <= made & freed_later or set(last) != held:
            return None
        return last

    def _copy(self, items: list[Item], gradients: dict[int, Any], freed: set[int]) -> dict[int, int]:
        """Append copies of `items`; returns the new index of each storage."""
        recorder = self.recorder
        number: dict[int, int] = {}
        for item in items:
            if isinstance(item, Op):
                recorder.ops.append(item.later(len(recorder.events) - item.at))
            elif isinstance(item, str):
                recorder.mark(item)
            elif item in gradients:
                parameter, parameter.grad = gradients.pop(item)  # the update must free it
                number[item] = recorder.follow_like(parameter.grad, item)
                recorder.events.append(number[item])
            elif item in freed:
                number[item] = len(recorder.storages)
                recorder.storages.append(recorder.storages[item].copy())
                recorder.events.append(number[item])
            elif ~item in number:
                recorder.events.append(~number[~item])
        return number


def _where_update_begins(items: list[Item]) -> int:
    """The number of the item before which the graph of the loss has been freed."""
    ops = [(at, item.phase) for at, item in enumerate(items) if isinstance(item, Op)]
    detach = next(number for number, (_, phase) in enumerate(ops) if phase == "optimizer")
    return ops[detach + 1][0] if detach + 1 < len(ops) else ops[detach][0] + 1
