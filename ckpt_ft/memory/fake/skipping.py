"""Blocks that are alike need not be traced one by one: of six and more, all but the first three and the last are
skipped, and what they would have done is put into the record afterwards (record/unrolled.py).

A block that is skipped returns what it is given, so that the last one follows the third, and when a backward ends it
has gradients as the third one has. All else is the step's own: the head, clipping, the optimizer over every parameter.

Skipped is a block that is built like the one before it (alike.py) and called like it (series.py): with outputs of the
block before it, the same tensors as that, or equal values, while the model does nothing between two calls and holds
nothing. The first three tell; where it is otherwise (layers that alternate, or are dropped at random), all run.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ckpt_ft.memory.record.passages import NotPeriodic, Skipped
from ckpt_ft.memory.record.tracker import Tracker

from .alike import Alike
from .calls import Call
from .fakes import Fakes
from .series import FEWEST, Series
from .surroundings import tensors_held

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Skipping:
    """Skips blocks of `model` while `tracker` records its steps, but for those numbered in `whole`.

    Attributes:
        skipped: what was, in the steps that are over.
    """

    def __init__(self, model: nn.Module, tracker: Tracker, fakes: Fakes, whole: Collection[int] = ()) -> None:
        self.tracker, self.fakes, self.whole = tracker, fakes, whole
        self.skipped: list[Skipped] = []
        self._step = -1
        self._lists = list(_lists(model, tracker))
        self._members = {id(block): (found, k) for found in self._lists for k, block in enumerate(found.blocks)}
        self._busy = False  # inside of a block of a series: lists in it are not looked at
        self._failed: dict[int, str] = {}

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

    def step_begins(self) -> None:
        """Also where the last step ends."""
        for found in self._lists:
            for series in found.series:
                series.ends()
                if series.skipped is not None:
                    self.skipped.append(series.skipped)
                    self._hold(series.blocks[2], [series.blocks[number] for number in series.skipped.missing])
            found.forget(self._step + 1)
        self._step += 1

    def _hold(self, third: nn.Module, others: list[nn.Module]) -> None:
        """What the third block was seen to hold beside its parameters (PEFT's indices) the others hold, too."""
        modules = [list(other.modules()) for other in others]
        for number, module in enumerate(third.modules()):
            for place, tensor in tensors_held(module).items():
                for other in modules:
                    self.tracker.add_resident_like(tensors_held(other[number])[place], tensor)

    def backward_begins(self) -> None:
        """In a backward: when it ends, the blocks skipped have gradients."""
        torch.autograd.Variable._execution_engine.queue_callback(self._give_gradients)

    def finished(self) -> list[Skipped]:
        """What was skipped, when all steps are over.

        Raises:
            NotPeriodic: what the blocks skipped would have done is not known.
        """
        self.step_begins()
        if self._failed:
            raise NotPeriodic("; ".join(self._failed.values()), self._failed)
        return self.skipped

    def _call(
        self, found: _List, number: int, plain: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        if self._step in self.whole:
            return plain(module, *args, **kwargs)
        again = torch._C._current_graph_task_id() >= 0
        if self._busy and not again:
            found.runs_whole = True
        series, first = found.series_of(number)
        if series is not None and again:
            series.runs_again(number - first)
        if series is None or series.whole or again:
            return plain(module, *args, **kwargs)
        call = Call(args, kwargs)
        if series.skips(number - first, call):
            return series.passed_on(call)
        self._busy = True
        try:
            out = plain(module, *args, **kwargs)
        finally:
            self._busy = False
        series.returned(call, out)
        return out

    def _give_gradients(self) -> None:
        for found in self._lists:
            for series in found.series:
                if series.skipped is not None:
                    self._give_gradients_of(series, series.skipped)

    def _give_gradients_of(self, series: Series, skipped: Skipped) -> None:
        others = [series.blocks[number].parameters() for number in skipped.missing]
        for third, *missing in zip(series.blocks[2].parameters(), *others, strict=True):
            if third.grad is None:
                continue
            index = self.tracker.index_of(third.grad)
            if any(index in known.gradients for known in (*self.skipped, skipped)):
                continue
            if index is None or not _is_whole(third.grad):
                self._failed[skipped.step] = "a gradient is a part of something"
                return
            skipped.gradients[index] = [self._give(parameter, third.grad, index) for parameter in missing]

    def _give(self, parameter: torch.Tensor, like: torch.Tensor, index: int) -> int:
        """A gradient `like` that of the third block, which is storage `index`; returns its own storage."""
        if parameter.grad is not None:
            self.tracker.unfollow(parameter.grad)
        parameter.grad = self.fakes.new(like.shape, like.stride(), like.dtype)
        return self.tracker.follow_like(parameter.grad, index)


class _List:
    """Numbered modules of one module."""

    def __init__(self, blocks: list[nn.Module], names: list[str], shared: set[int], tracker: Tracker) -> None:
        self.blocks, self.names, self.tracker = blocks, names, tracker
        self.shares = [any(id(p) in shared for p in block.parameters()) for block in blocks]
        self._modules = [module for block in blocks for module in block.modules()]
        self._stood: list[Callable[[], Any]] = []  # in place of forwards when the blocks were compared
        self._were: list[object] = []  # the rest that may change between steps
        self._alike: Alike | None = None
        self._same: list[bool] = []  # each block but the last and the next one
        self.forget(0)

    def forget(self, step: int) -> None:
        """A step begins."""
        self.step, self.runs_whole = step, False
        self.series: list[Series] = []
        self._series_of: list[tuple[Series | None, int]] = []

    def series_of(self, number: int) -> tuple[Series | None, int]:
        """The series that a block is in, if it is in one, and the number of its first block."""
        if self.runs_whole:
            return None, 0
        if not self._series_of:
            self._divide()
        return self._series_of[number]

    def _divide(self) -> None:
        """Find the series of this step: policies and what is trained may have changed since the last."""
        self._compare()
        self._series_of = [(None, 0)] * len(self.blocks)
        first = 0
        for k in range(1, len(self.blocks) + 1):
            if k == len(self.blocks) or not self._same[k - 1]:
                if k - first >= FEWEST:
                    series = Series(self.blocks[first:k], self.names[first:k], self.step, self.tracker)
                    self.series.append(series)
                    self._series_of[first:k] = [(series, first)] * (k - first)
                first = k

    def _compare(self) -> None:
        """Compare the blocks, or what changed of them since: those that ran have learned what others have not."""
        standing = [module.__dict__.get("forward") for module in self._modules]
        are: list[object] = [
            p.requires_grad for module in self._modules for p in module._parameters.values() if p is not None
        ]
        are += [(module.training, *(list(getattr(module, hooks)) for hooks in _HOOKS)) for module in self._modules]
        if self._alike is None or are != self._were:
            self._alike = Alike(self.blocks, [one or other for one, other in pairwise(self.shares)])
        elif all(stood() is now for stood, now in zip(self._stood, standing, strict=True)):
            return
        self._same = self._alike.as_they_stand()
        self._stood, self._were = [_weakly(forward) for forward in standing], are


def _lists(model: nn.Module, tracker: Tracker) -> Iterator[_List]:
    """The lists of modules in `model` that are long enough for a series."""
    names = {id(module): name for name, module in model.named_modules()}
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    shared = {parameter for parameter, count in uses.items() if count > 1}
    taken: set[int] = set()
    for module in model.modules():
        children = list(module._modules.items())
        if len(children) < FEWEST or any(child is None or not key.isdecimal() for key, child in children):
            continue
        blocks = [child for _, child in children if child is not None]
        if len({id(block) for block in blocks} - taken) == len(blocks):
            taken |= {id(block) for block in blocks}
            yield _List(blocks, [names[id(block)] for block in blocks], shared, tracker)


def _weakly(forward: Any) -> Callable[[], Any]:
    """A reference that does not keep a policy alive, nor what it holds."""
    try:
        return weakref.ref(forward)
    except TypeError:
        return object if forward is not None else lambda: None


def _is_whole(gradient: torch.Tensor) -> bool:
    if type(gradient) is not FakeTensor or gradient.layout is not torch.strided:
        return False
    return gradient.untyped_storage().nbytes() == gradient.numel() * gradient.itemsize
