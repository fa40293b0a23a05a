"""Blocks that are alike need not be traced one by one: of five and more, all but the first three and the last are
skipped, and what they would have done is put into the record afterwards (record/unrolled.py).

What repeats is a unit: one block, or, where kinds of blocks take turns (five with a window of attention, one without),
as many as it takes until the kinds repeat. Blocks are of a kind that are built alike (alike.py) and, as far as that
was seen, called alike (calls.py). A block that is skipped returns what it is given, so that the last unit follows the
third, and when a backward ends it has gradients as that of the third unit has. All else is the step's own: the head,
clipping, the optimizer over every parameter.

Skipped is a block that is called like that of the unit before it (series.py): with outputs of the block before it, the
same tensors as that, or equal values, while the model does nothing between two calls and holds nothing. The first
three units tell. Where it turns out to be otherwise, the step is taken back and called again, and all blocks of that
list run.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ckpt_ft.memory.record.passages import FIRST, NotPeriodic, Skipped
from ckpt_ft.memory.record.repeating import Repeating
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.memory.record.tracker import Tracker
from ckpt_ft.memory.record.unrolled import unrolled

from .block_lists import BlockList, block_lists
from .calls import Call
from .fakes import Fakes
from .series import Series
from .surroundings import tensors_held

Whole = set[tuple[int, str]]  # numbers of steps, and the series' names of which every block runs in that step


class Skipping:
    """Skips blocks of `model` while `tracker` records its steps, but for series in `whole`, which grows.

    Attributes:
        repeated: what units do of which some were skipped, in the steps that are over.
    """

    def __init__(self, model: nn.Module, tracker: Tracker, fakes: Fakes, whole: Whole) -> None:
        self.model, self.tracker, self.fakes, self.whole = model, tracker, fakes, whole
        self.repeated: list[Repeating] = []
        self._step = 0  # number of the one that is recorded
        self._lists = list(block_lists(model, tracker))
        self._members = {id(block): (found, k) for found in self._lists for k, block in enumerate(found.blocks)}
        self._busy = False  # inside of a block of a series: lists in it are not looked at
        self._failed: set[str] = set()

    @contextmanager
    def on(self) -> Iterator[None]:
        """Look at every module that is called."""
        plain = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            found = self._members.get(id(module))
            if found is None:
                return plain(module, *args, **kwargs)
            return self._call(*found, plain, module, args, kwargs)

        with patch.object(nn.Module, "__call__", call):
            yield

    def records(self, step: Callable[[], object], number: int) -> None:
        """Record the step of a number: again, if units turn out not to repeat each other.

        Raises:
            NotPeriodic: they do not, and the step has left something, so that all have to be recorded once more.
        """
        self._step = number
        while not self._recorded(step):
            gc.collect()

    def backward_begins(self) -> None:
        """In a backward: when it ends, the blocks skipped have gradients."""
        torch.autograd.Variable._execution_engine.queue_callback(self._give_gradients)

    def unrolled(self, trace: StepTrace) -> StepTrace:
        """`trace`, of all steps, with what was skipped put in.

        Raises:
            NotPeriodic: what that would have done is not known.
        """
        try:
            return unrolled(trace, self.repeated, len(trace.events) - len(self.tracker.growing.events))
        except NotPeriodic as error:
            self.whole |= {(step, name) for step in range(self._step + 1) for name in error.names}
            raise

    def _recorded(self, step: Callable[[], object]) -> bool:
        reached = self.tracker.growing.reached
        bare = [parameter for parameter in self.model.parameters() if parameter.grad is None]
        self._failed.clear()
        for found in self._lists:
            found.forget({name for number, name in self.whole if number == self._step})
        self.tracker.start_step()
        try:
            step()
            self.repeated += self._repeating()
            return True
        except NotPeriodic as error:
            names = error.names
        except Exception:  # of the step's own, or of what is missing in it: run whole, it tells
            names = {series.skipped.name for series in self._series() if series.skipped is not None}
            if not names:
                raise
        self.whole |= {(self._step, name) for name in names}
        self._busy = False
        for parameter in bare:
            parameter.grad = None
        gc.collect()
        if not self.tracker.growing.take_back(reached):
            raise NotPeriodic("a step that cannot be taken back")
        return False

    def _hold(self, series: Series, skipped: Skipped) -> None:
        """What the third unit was seen to hold beside its parameters (PEFT's indices) the others hold, too."""
        third, *others = [list(series.modules(unit)) for unit in (FIRST - 1, *skipped.missing)]
        for number, module in enumerate(third):
            for place, tensor in tensors_held(module).items():
                for other in others:
                    self.tracker.add_resident_like(tensors_held(other[number])[place], tensor)

    def _repeating(self) -> list[Repeating]:
        """What the units of this step do."""
        found = []
        for series in self._series():
            series.ends()
            if series.skipped is not None:
                try:
                    found.append(Repeating(self.tracker.growing.as_it_stands(), series.skipped))
                except NotPeriodic as error:
                    self._failed |= error.names
        if self._failed:
            raise NotPeriodic("units do not repeat each other", self._failed)
        for series in self._series():
            if series.skipped is not None:
                self._hold(series, series.skipped)
        return found

    def _series(self) -> Iterator[Series]:
        for found in self._lists:
            yield from found.series

    def _call(
        self, found: BlockList, number: int, plain: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        again = torch._C._current_graph_task_id() >= 0
        if self._busy and not again:
            found.runs_whole = True
        call = Call(args, kwargs)
        if not again:
            found.heard(number, call)
        series, first = found.series_of(number)
        if series is None or series.whole:
            out = plain(module, *args, **kwargs)
        elif (series.skips_again if again else series.skips)(number - first, call):
            out = series.passed_on(call, again)
        else:
            busy, self._busy = self._busy, True
            try:
                out = plain(module, *args, **kwargs)
            finally:
                self._busy = busy
            call.returns(out)
            series.returned(call, again)
            return out
        call.returns(out)
        return out

    def _give_gradients(self) -> None:
        for series in self._series():
            if series.skipped is not None:
                self._give_gradients_of(series, series.skipped)

    def _give_gradients_of(self, series: Series, skipped: Skipped) -> None:
        third, *others = [
            [parameter for module in series.modules(unit) for parameter in module.parameters(recurse=False)]
            for unit in (FIRST - 1, *skipped.missing)
        ]
        for like, *missing in zip(third, *others, strict=True):
            if like.grad is None:
                continue
            index = self.tracker.index_of(like.grad)
            known = (skipped, *(one.skipped for one in self.repeated))
            if any(index in one.gradients for one in known):
                continue
            if index is None or not is_whole(like.grad):
                self._failed.add(skipped.name)
                return
            skipped.gradients[index] = [self._give(parameter, like.grad, index) for parameter in missing]

    def _give(self, parameter: torch.Tensor, like: torch.Tensor, index: int) -> int:
        """A gradient `like` that of the third unit, which is storage `index`; returns its own storage."""
        if parameter.grad is not None:
            self.tracker.unfollow(parameter.grad)
        parameter.grad = self.fakes.new(like.shape, like.stride(), like.dtype)
        return self.tracker.follow_like(parameter.grad, index)


def is_whole(gradient: torch.Tensor) -> bool:
    """Whether it is a fake that has a storage to itself."""
    if type(gradient) is not FakeTensor or gradient.layout is not torch.strided:
        return False
    return gradient.untyped_storage().nbytes() == gradient.numel() * gradient.itemsize
