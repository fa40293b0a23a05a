"""Traces blocks that are alike once: in a run of five and more, all but the first three and the last are skipped.

What repeats is a unit: one block, or, where kinds of blocks take turns (Gemma 3: five with a window of attention, one
without), as many blocks as it takes until the kinds repeat. Blocks are of one kind if they are built and called alike
(block_equivalence.py). A skipped block returns its input, so that the last unit follows the third. When a backward
ends, skipped blocks get gradients like those of the third unit. When the step ends, record/splice.py inserts into the
record what they would have done. The head, clipping and the optimizer run over all parameters.

A block is skipped only if the model does nothing between its call and the one before, and holds none of the blocks'
outputs. The first three units show it. If a step turns out to be otherwise (layers dropped at random, say), its record
is taken back, and it is called again with all blocks of that run traced.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ckpt_ft.memory.record.recorder import Position, Recorder
from ckpt_ft.memory.record.splice import FIRST, NotPeriodic, SkippedRun, Unit, splice
from ckpt_ft.memory.record.tracker import Tracker

from .block_equivalence import BuiltAlike, Call, CallKinds, Source, are_known
from .faked_model import Fakes, tensors_held

Traced = set[tuple[int, str]]  # numbers of steps, and names of the runs that are traced whole in them
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_FEWEST = 2  # blocks of a run that are skipped
_CALL_KINDS: weakref.WeakKeyDictionary[nn.Module, list[int]] = (
    weakref.WeakKeyDictionary()
)  # of lists, when last called


class SkippedBlocks:
    """Skips blocks of `model` while `tracker` records its steps.

    traced: runs that are not to be skipped. It grows where units turn out not to repeat each other.
    """

    def __init__(self, model: nn.Module, tracker: Tracker, fakes: Fakes, traced: Traced) -> None:
        self.model, self.tracker, self.recorder, self.fakes = model, tracker, tracker.recorder, fakes
        self.traced = traced
        self._step = 0  # number of the one that is recorded
        self._start = self.recorder.position
        self._lists = list(_block_lists(model, self.recorder))
        self._members = {id(block): (found, k) for found in self._lists for k, block in enumerate(found.blocks)}
        self._busy = False  # inside a block of a run: lists in it are traced whole
        self._failed: set[str] = set()
        self._lasting: dict[int, str] = {}  # storages of units that outlived their step, with the run's name
        tracker.context.phase_listeners.append(self._phase_begins)

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

    def record(self, step: Callable[[], object], number: int) -> None:
        """Record step `number`; once more if units turn out not to repeat each other.

        Raises:
            NotPeriodic: they do not, and this step cannot be taken back, or it is an earlier step that was wrong.
        """
        self._step = number
        while not self._is_recorded(step):
            gc.collect()
        freed = {~event for event in self.recorder.events[self._start.events :] if event < 0}
        names = {self._lasting[storage] for storage in freed & self._lasting.keys()}
        if names:
            self.traced |= {(step, name) for step in range(number + 1) for name in names}
            raise NotPeriodic("a step frees what another one's units allocated", names)

    def _is_recorded(self, step: Callable[[], object]) -> bool:
        self._start = self.recorder.position
        bare = [parameter for parameter in self.model.parameters() if parameter.grad is None]
        self._failed.clear()
        for found in self._lists:
            found.begin({name for number, name in self.traced if number == self._step})
        self.tracker.start_step()
        try:
            step()
            self._splice()
            return True
        except NotPeriodic as error:
            names = error.names
        except Exception:  # the step's own, or caused by what is missing in it: traced whole, it shows
            names = {run.skipped.name for run in self._runs() if run.skipped is not None}
            if not names:
                raise
        self.traced |= {(self._step, name) for name in names}
        self._busy = False
        for parameter in bare:
            parameter.grad = None
        gc.collect()
        if not self.recorder.rewind(self._start):
            raise NotPeriodic("a step that cannot be taken back")
        return False

    def _splice(self) -> None:
        if self._failed:
            raise NotPeriodic("units do not repeat each other", self._failed)
        skipped = [run for run in self._runs() if run.skipped is not None]
        if skipped:
            self._lasting |= splice(self.recorder, self._start, [run.skipped for run in skipped if run.skipped])
        for run in skipped:
            self._hold(run)

    def _runs(self) -> Iterator[_Run]:
        for found in self._lists:
            yield from found.runs

    def _hold(self, run: _Run) -> None:
        """What the third unit holds besides its parameters (PEFT's indices) the skipped units hold, too."""
        assert run.skipped is not None
        third, *others = [list(run.modules(unit)) for unit in (FIRST - 1, *run.skipped.missing)]
        for number, module in enumerate(third):
            for place, tensor in tensors_held(module).items():
                for other in others:
                    self.recorder.add_resident_like(tensors_held(other[number])[place], tensor)

    def _call(
        self, found: _BlockList, number: int, plain: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        in_backward = torch._C._current_graph_task_id() >= 0
        if self._busy and not in_backward:
            found.whole = True
        call = Call(args, kwargs)
        if not in_backward:
            found.note_call(number, call)
        run, first = found.run_of(number)
        if run is None or run.whole:
            out = plain(module, *args, **kwargs)
        elif run.skips(number - first, call, in_backward):
            out = run.passed_on(call, in_backward)
        else:
            busy, self._busy = self._busy, True
            try:
                out = plain(module, *args, **kwargs)
            finally:
                self._busy = busy
            call.returns(out)
            run.returned(call, in_backward)
            return out
        call.returns(out)
        return out

    # -- gradients of skipped blocks --------------------------------------------------------------------------------

    def _phase_begins(self, phase: str) -> None:
        if phase == "backward":
            torch.autograd.Variable._execution_engine.queue_callback(self._give_gradients)

    def _give_gradients(self) -> None:
        for run in self._runs():
            if run.skipped is not None:
                self._give_gradients_of(run, run.skipped)

    def _give_gradients_of(self, run: _Run, skipped: SkippedRun) -> None:
        third, *others = [
            [parameter for module in run.modules(unit) for parameter in module.parameters(recurse=False)]
            for unit in (FIRST - 1, *skipped.missing)
        ]
        for like, *missing in zip(third, *others, strict=True):
            if like.grad is None:
                continue
            index = self.recorder.index_of(like.grad)
            if index is not None and (index < self._start.storages or index in skipped.gradients):
                continue  # given when it was made
            if index is None or not is_whole(like.grad):
                self._failed.add(skipped.name)
                return
            skipped.gradients[index] = [self._give(parameter, like.grad, index) for parameter in missing]

    def _give(self, parameter: torch.Tensor, like: torch.Tensor, index: int) -> int:
        """Set a gradient `like` that of the third unit, which is storage `index`; returns its own storage."""
        if parameter.grad is not None:
            self.recorder.unfollow(parameter.grad)
        parameter.grad = self.fakes.new(like.shape, like.stride(), like.dtype)
        return self.recorder.follow_like(parameter.grad, index)


def is_whole(gradient: torch.Tensor) -> bool:
    """Whether it is a fake tensor that covers all of its storage."""
    if type(gradient) is not FakeTensor or gradient.layout is not torch.strided:
        return False
    return gradient.untyped_storage().nbytes() == gradient.numel() * gradient.itemsize


class Stretch(NamedTuple):
    """Numbers of the blocks of a run, and how many blocks make a unit."""

    blocks: range
    period: int

    @property
    def skipped(self) -> int:
        """How many blocks are skipped."""
        return len(self.blocks) - (FIRST + 1) * self.period


def stretches(kinds: Sequence[object]) -> Iterator[Stretch]:
    """The parts of a list of blocks, of these kinds, in which the kinds repeat often enough.

    From each block on, the period with the largest share of skipped blocks is taken.
    """
    first = 0
    while first < len(kinds):
        found = []
        for period in range(1, (len(kinds) - first) // (FIRST + 2) + 1):
            end = first + period
            while end < len(kinds) and kinds[end] == kinds[end - period]:
                end += 1
            found.append(Stretch(range(first, end - (end - first) % period), period))
        best = max(found, key=lambda one: one.skipped / len(one.blocks), default=None)
        if best is None or best.skipped < _FEWEST:
            first += 1
            continue
        yield best
        first = best.blocks.stop


class _BlockList:
    """Numbered modules of one module, which `holds` them, and the runs in them."""

    def __init__(
        self, holds: nn.Module, blocks: list[nn.Module], names: list[str], shared: set[int], recorder: Recorder
    ) -> None:
        self.holds, self.blocks, self.names, self.recorder = holds, blocks, names, recorder
        self._shares = [any(id(p) in shared for p in block.parameters()) for block in blocks]
        self._modules = [module for block in blocks for module in block.modules()]
        self._forwards: list[Callable[[], Any]] = []  # the modules' own, when the blocks were compared
        self._states: list[object] = []  # the rest that may change between steps
        self._alike: BuiltAlike | None = None
        self._kinds: list[int] = []
        self.begin(set())

    def begin(self, traced: set[str]) -> None:
        """A step begins, in which the runs called `traced` are traced whole."""
        self._traced, self.whole = traced, False
        self.runs: list[_Run] = []
        self._run_of: list[tuple[_Run | None, int]] = []
        self._calls = CallKinds()

    def run_of(self, number: int) -> tuple[_Run | None, int]:
        """The run that a block is in, if any, and the number of the run's first block."""
        if self.whole:
            return None, 0
        if not self._run_of:
            self._divide()
        return self._run_of[number]

    def note_call(self, number: int, call: Call) -> None:
        """A block is called in a forward; the next steps know how."""
        if number == 0:
            self._calls = CallKinds()
        if number == len(self._calls):
            self._calls.add(call)
            if len(self._calls) == len(self.blocks):
                _CALL_KINDS[self.holds] = self._calls.kinds()

    def _divide(self) -> None:
        """Find the runs of this step: policies and what is trained may have changed since the last."""
        self._compare()
        self._run_of = [(None, 0)] * len(self.blocks)
        called = _CALL_KINDS.get(self.holds, [0] * len(self.blocks))
        for at, period in stretches(list(zip(self._kinds, called, strict=True))):
            if self.names[at.start] not in self._traced:
                numbers = slice(at.start, at.stop)
                run = _Run(self.blocks[numbers], self.names[numbers], period, self.recorder)
                self.runs.append(run)
                self._run_of[numbers] = [(run, at.start)] * len(at)

    def _compare(self) -> None:
        """Compare the blocks, or what has changed: blocks that ran hold results that skipped ones do not."""
        forwards = [module.__dict__.get("forward") for module in self._modules]
        states: list[object] = [
            p.requires_grad for module in self._modules for p in module._parameters.values() if p is not None
        ]
        states += [(module.training, *(list(getattr(module, hooks)) for hooks in _HOOKS)) for module in self._modules]
        if self._alike is None or states != self._states:
            self._alike = BuiltAlike(self.blocks, self._shares)
        elif all(before() is now for before, now in zip(self._forwards, forwards, strict=True)):
            return
        self._kinds = self._alike.kinds()
        self._forwards, self._states = [_weakly(forward) for forward in forwards], states


def _block_lists(model: nn.Module, recorder: Recorder) -> Iterator[_BlockList]:
    """The lists of modules in `model` that are long enough for a run."""
    names = {id(module): name for name, module in model.named_modules()}
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    shared = {parameter for parameter, count in uses.items() if count > 1}
    taken: set[int] = set()
    for module in model.modules():
        children = list(module._modules.items())
        if len(children) < FIRST + 2 or any(child is None or not key.isdecimal() for key, child in children):
            continue
        blocks = [child for _, child in children if child is not None]
        if len({id(block) for block in blocks} - taken) == len(blocks):
            taken |= {id(block) for block in blocks}
            yield _BlockList(module, blocks, [names[id(block)] for block in blocks], shared, recorder)


def _weakly(forward: Any) -> Callable[[], Any]:
    """A reference that keeps no policy alive; for one that is gone it returns neither a forward nor None."""
    try:
        found = weakref.ref(forward)
    except TypeError:
        return object if forward is not None else lambda: None
    return lambda: object if found() is None else found()


class _Run:
    """Follows the calls of a run's blocks in one step, and says of each whether it is skipped.

    Args:
        blocks, names: those of whole units, in order.
        period: blocks in a unit.

    Attributes:
        skipped: set when the first block is.
        whole: a block was called otherwise before any was skipped: all are traced.
    """

    def __init__(self, blocks: list[nn.Module], names: list[str], period: int, recorder: Recorder) -> None:
        self.blocks, self.period, self.recorder = blocks, period, recorder
        self.units = [Unit(names[at : at + period]) for at in range(0, len(names), period)]
        self.skipped: SkippedRun | None = None
        self.whole = False
        # In a backward, a checkpoint around all of the blocks calls them as a forward does; one around each of them
        # calls them in another order, and is no traversal.
        self._traversals: dict[bool, _Traversal | None] = {False: _Traversal(period, recorder), True: None}

    def skips(self, number: int, call: Call, in_backward: bool) -> bool:
        """Whether block `number`, which is called, is skipped.

        Raises:
            NotPeriodic: it is not called like those before it, of which some were skipped.
        """
        if number == 0:
            self._traversals[in_backward] = _Traversal(self.period, self.recorder)
        traversal = self._traversals[in_backward]
        if traversal is not None and not traversal.follows(number, call):
            traversal = self._traversals[in_backward] = None
        is_missing = FIRST <= number // self.period < len(self.units) - 1
        if traversal is None:
            if self.skipped is not None and (is_missing or not in_backward):
                raise NotPeriodic(f"{self.units[0][0]}: a block is called otherwise", [self.units[0][0]])
            self.whole = self.whole or not in_backward
            return False
        if not is_missing or (in_backward and self.skipped is None):
            return False
        if self.skipped is None:
            self.skipped = SkippedRun(self.units)
        return True

    def passed_on(self, call: Call, in_backward: bool) -> object:
        """What a skipped block returns."""
        traversal = self._traversals[in_backward]
        assert traversal is not None, "`skips` has followed the call"
        return traversal.passed_on(call)

    def returned(self, call: Call, in_backward: bool) -> None:
        """A block has run."""
        traversal = self._traversals[in_backward]
        if traversal is not None:
            traversal.returned(call)

    def modules(self, unit: int) -> Iterator[nn.Module]:
        """Those of all blocks of a unit."""
        for block in self.blocks[unit * self.period : (unit + 1) * self.period]:
            yield from block.modules()


class _Traversal:
    """One forward through the blocks so far: how their calls relate to those a unit before."""

    def __init__(self, period: int, recorder: Recorder) -> None:
        self.period, self.recorder = period, recorder
        self._last = -1  # block called
        self._calls: list[Call] = []  # of the first three units
        self._before: Call | None = None  # the last one that ran
        self._sources: list[list[Source]] = []  # of the second unit's arguments, and so of all that follow
        self._entered: list[Position] = []  # where the record was when each of the first three units was called
        self._left: tuple[int, ...] = ()  # ops and storages when the last block returned
        self._counts: list[tuple[int, int, int]] = []  # of references to the third unit's arguments
        self._drawn = _random_states()

    def follows(self, number: int, call: Call) -> bool:
        """Whether block `number` is called like the one a unit before, so far as there is one."""
        unit, place = divmod(number, self.period)
        if number != self._last + 1 or len(self._calls) < min(number, FIRST * self.period):
            return False
        self._last = number
        if unit < FIRST and place == 0:
            self._entered.append(self.recorder.position)
        return unit == 0 or self._repeats(number, call)

    def returned(self, call: Call) -> None:
        """The block last called has run."""
        self._before = call
        if len(self._calls) < FIRST * self.period:
            self._calls.append(call)
        self._left = self.recorder.position[:2]

    def passed_on(self, call: Call) -> object:
        """What a skipped block returns: its own input in place of what it would have made."""
        place = self._last % self.period
        return call.passed_on(self._calls[place - self.period], self._sources[place])

    def _repeats(self, number: int, call: Call) -> bool:
        unit, place = divmod(number, self.period)
        like = self._calls[min(unit - 1, FIRST - 1) * self.period + place]
        assert self._before is not None, "a unit has run"
        sources = call.sources(like, self._before)
        if call.spec != like.spec:
            return False
        if unit == 1:
            self._sources.append(sources)
            return are_known(sources)
        if sources != self._sources[place]:
            return False
        if unit < FIRST:
            if unit == FIRST - 1 and place == 0:
                self._counts = call.reference_counts(sources)
            return True
        if number == FIRST * self.period and not self._third_repeats_second():
            return False
        if self._before is not self._calls[-1]:  # inside the last unit
            return True
        return call.reference_counts(sources) == self._counts and self._left == self.recorder.position[:2]

    def _third_repeats_second(self) -> bool:
        seconds, thirds = self._calls[-2 * self.period : -self.period], self._calls[-self.period :]
        for place, (second, third) in enumerate(zip(seconds, thirds, strict=True)):
            if third.outputs != second.outputs or third.returned_spec != second.returned_spec:
                return False
            if not third.hands_on(self._sources[place]):
                return False
        if self._drawn != _random_states():  # a block may be dropped at random
            return False
        _, begin, end = self._entered  # of the second unit
        return self._done(begin, end) == self._done(end, self.recorder.position)

    def _done(self, start: Position, stop: Position) -> tuple[list[str], list[int]]:
        """Names of the ops, and bytes of the storages, recorded between two positions."""
        names = [op.name for op in self.recorder.ops[start.ops : stop.ops]]
        return names, [storage.nbytes for storage in self.recorder.storages[start.storages : stop.storages]]


def _random_states() -> tuple[object, ...]:
    """Of the generators that Python code draws from; torch's does not move on fake tensors."""
    drawn: Any = numpy.random.get_state()
    return random.getstate(), drawn[1].tobytes(), drawn[2]
