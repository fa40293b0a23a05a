"""Lists of blocks in a model, and in each step the series that they make."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from ckpt_ft.memory.record.passages import FIRST
from ckpt_ft.memory.record.tracker import Tracker

from .alike import Alike
from .calls import Call, Manners
from .series import Series, stretches

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_SHORTEST = FIRST + 2  # list with a series
_MANNERS: weakref.WeakKeyDictionary[nn.Module, list[int]] = weakref.WeakKeyDictionary()  # of lists, when last called


class BlockList:
    """Numbered modules of one module, which `holds` them."""

    def __init__(
        self, holds: nn.Module, blocks: list[nn.Module], names: list[str], shared: set[int], tracker: Tracker
    ) -> None:
        self.holds, self.blocks, self.names, self.tracker = holds, blocks, names, tracker
        self._shares = [any(id(p) in shared for p in block.parameters()) for block in blocks]
        self._modules = [module for block in blocks for module in block.modules()]
        self._stood: list[Callable[[], Any]] = []  # in place of forwards when the blocks were compared
        self._were: list[object] = []  # the rest that may change between steps
        self._alike: Alike | None = None
        self._kinds: list[int] = []
        self.forget(set())

    def forget(self, whole: set[str]) -> None:
        """A step begins, in which every block of the series called `whole` runs."""
        self.whole, self.runs_whole = whole, False
        self.series: list[Series] = []
        self._series_of: list[tuple[Series | None, int]] = []
        self._manners, self._called = Manners(), 0

    def series_of(self, number: int) -> tuple[Series | None, int]:
        """The series that a block is in, if it is in one, and the number of its first block."""
        if self.runs_whole:
            return None, 0
        if not self._series_of:
            self._divide()
        return self._series_of[number]

    def heard(self, number: int, call: Call) -> None:
        """A block is called in a forward: how, the next steps know."""
        if number == 0:
            self._manners, self._called = Manners(), 0
        if number == self._called:
            self._manners.add(call)
            self._called += 1
            if self._called == len(self.blocks):
                _MANNERS[self.holds] = self._manners.numbers()

    def _divide(self) -> None:
        """Find the series of this step: policies and what is trained may have changed since the last."""
        self._compare()
        self._series_of = [(None, 0)] * len(self.blocks)
        manners = _MANNERS.get(self.holds, [0] * len(self.blocks))
        for at, period in stretches(list(zip(self._kinds, manners, strict=True))):
            if self.names[at.start] not in self.whole:
                numbers = slice(at.start, at.stop)
                series = Series(self.blocks[numbers], self.names[numbers], period, self.tracker)
                self.series.append(series)
                self._series_of[numbers] = [(series, at.start)] * len(at)

    def _compare(self) -> None:
        """Compare the blocks, or what changed of them since: those that ran have learned what others have not."""
        standing = [module.__dict__.get("forward") for module in self._modules]
        are: list[object] = [
            p.requires_grad for module in self._modules for p in module._parameters.values() if p is not None
        ]
        are += [(module.training, *(list(getattr(module, hooks)) for hooks in _HOOKS)) for module in self._modules]
        if self._alike is None or are != self._were:
            self._alike = Alike(self.blocks, self._shares)
        elif all(stood() is now for stood, now in zip(self._stood, standing, strict=True)):
            return
        self._kinds = self._alike.kinds()
        self._stood, self._were = [_weakly(forward) for forward in standing], are


def block_lists(model: nn.Module, tracker: Tracker) -> Iterator[BlockList]:
    """The lists of modules in `model` that are long enough for a series."""
    names = {id(module): name for name, module in model.named_modules()}
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    shared = {parameter for parameter, count in uses.items() if count > 1}
    taken: set[int] = set()
    for module in model.modules():
        children = list(module._modules.items())
        if len(children) < _SHORTEST or any(child is None or not key.isdecimal() for key, child in children):
            continue
        blocks = [child for _, child in children if child is not None]
        if len({id(block) for block in blocks} - taken) == len(blocks):
            taken |= {id(block) for block in blocks}
            yield BlockList(module, blocks, [names[id(block)] for block in blocks], shared, tracker)


def _weakly(forward: Any) -> Callable[[], Any]:
    """A reference that does not keep a policy alive, nor what it holds; one that is gone is no forward, nor None."""
    try:
        found = weakref.ref(forward)
    except TypeError:
        return object if forward is not None else lambda: None
    return lambda: object if found() is None else found()
