"""Traces blocks that are alike once: in a run of five and more, all but the first three and the last are skipped.

The repeated unit is one block or, if kinds of blocks alternate (Gemma 3: five with a window of attention, one
without), the shortest sequence of blocks that repeats. Blocks are of one kind if they are built and called alike
(block_equivalence.py). A skipped block returns its input, so that the last unit follows the third. When a backward
ends, skipped blocks get gradients like those of the third unit. When the step ends, record/splice.py inserts their ops
and events into the record. The head, clipping and the optimizer run over all parameters.

A block is skipped only if the model does nothing between its call and the preceding one, and keeps none of the blocks'
outputs, as the first three units show. If a later call differs (because layers are dropped at random, for example),
the trace starts again, and all blocks of that run are traced in that step.
"""

from __future__ import annotations

import random
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ckpt_ft.memory.distributed.fsdp2 import pass_over
from ckpt_ft.memory.record.recorder import Position
from ckpt_ft.memory.record.splice import FIRST, NotPeriodic, SkippedRun, Unit, splice
from ckpt_ft.memory.record.tracker import Tracker

from .block_equivalence import BlockComparison
from .faked_model import Fakes, tensors_held

Traced = set[tuple[int, str]]  # numbers of steps, and names of the runs that are traced whole in them
_FEWEST = 2  # blocks of a run that are skipped
_CALL_KINDS: weakref.WeakKeyDictionary[nn.Module, list[int]] = (
    weakref.WeakKeyDictionary()
)  # of lists, when last called
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_OBJECT = object()  # in place of one that is neither a tensor nor a plain value


class SkippedBlocks:
    """Skips blocks of `model` while `tracker` records its steps.

    traced: runs that are not to be skipped. It grows where units turn out not to repeat each other.
    """

    def __init__(self, model: nn.Module, tracker: Tracker, fakes: Fakes, traced: Traced) -> None:
        self.model, self.tracker, self.recorder, self.fakes = model, tracker, tracker.recorder, fakes
        self.traced = traced
        self._start = self.recorder.position
        self._lists = list(_block_lists(model))
        self._members = {id(block): (found, k) for found in self._lists for k, block in enumerate(found.blocks)}
        self._busy = False  # inside a block of a run: the lists in it are not shortened
        tracker.context.phase_listeners.append(self._phase_begins)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Look at every module that is called."""
        plain = nn.Module._call_impl  # to set `__call__` takes long where thousands of module classes are loaded

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            found = self._members.get(id(module))
            if found is None:
                return plain(module, *args, **kwargs)
            return self._call(*found, plain, module, args, kwargs)

        with patch.object(nn.Module, "_call_impl", call):
            yield

    def record(self, step: Callable[[], object], number: int) -> None:
        """Record step `number`.

        Raises:
            NotPeriodic: units turned out not to repeat each other. `traced` has grown by their runs.
        """
        self._start = self.recorder.position
        traced = {name for traced, name in self.traced if traced == number}
        for found in self._lists:
            found.begin(traced)
        self.tracker.start_step()
        try:
            step()
            splice(self.recorder, self._start, self._skipped())
            names = set()
        except NotPeriodic as error:
            names = error.names
        except Exception:  # an error of the step itself, or of skipping blocks; tracing all blocks shows which
            names = {run.name for run in self._skipped()}
            if not names:
                raise
        if names:
            self.traced |= {(number, name) for name in names}
            raise NotPeriodic("units differ", names)
        for run in self._skipped():
            self._add_residents(run)

    def _add_residents(self, run: _Run) -> None:
        """Give skipped units the tensors that the third unit has besides its parameters (PEFT's indices)."""
        third, *others = [list(run.modules(unit)) for unit in (FIRST - 1, *run.missing)]
        for number, module in enumerate(third):
            for place, tensor in tensors_held(module).items():
                for other in others:
                    self.recorder.add_resident_like(tensors_held(other[number])[place], tensor)

    def _skipped(self) -> list[_Run]:
        return [run for found in self._lists for run in found.runs if run.skipped]

    def _call(
        self, found: _BlockList, number: int, plain: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        in_backward = torch._C._current_graph_task_id() >= 0
        if self._busy and not in_backward:
            found.traced_whole = True
        call = found.call(number, args, kwargs, in_backward)
        run = found.run_of(number)
        busy = self._busy
        if run is not None and number == run.first + FIRST * run.period and not run.skipped and self._offloads():
            found.end_before_last(run)
            run = found.run_of(number)
        if run is not None and not run.traced_whole:
            if found.skips(run, number, self.recorder.position, in_backward):
                pass_over(module)
                return call.result_if_skipped(found.calls[-1 - run.period])
            self._busy = True
        try:
            out = plain(module, *args, **kwargs)
        finally:
            self._busy = busy
        call.returns(out)
        found.last_run, found.position_after = call, self.recorder.position
        return out

    def _offloads(self) -> bool:
        """Whether this step keeps tensors in host memory.

        The block before the last is then fetched earlier than the others, so a run ends one unit earlier.
        """
        return any(storage.host_kind for storage in self.recorder.storages[self._start.storages :])

    # -- gradients of skipped blocks --------------------------------------------------------------------------------

    def _phase_begins(self, phase: str) -> None:
        if phase == "backward":
            torch.autograd.Variable._execution_engine.queue_callback(self._give_gradients)

    def _give_gradients(self) -> None:
        for run in self._skipped():
            third, *others = [
                [parameter for module in run.modules(unit) for parameter in module.parameters(recurse=False)]
                for unit in (FIRST - 1, *run.missing)
            ]
            made: dict[int, list[Tensor]] = {}  # by the storage of the third unit's: FSDP2's lie in one
            for like, *missing in zip(third, *others, strict=True):
                if like.grad is None:
                    continue
                shard = local(like.grad)
                index = self.recorder.index_of(shard)
                if index is not None and (index < self._start.storages or index in run.gradients.keys() - made.keys()):
                    continue  # given when it was made
                if index is None or type(shard) is not FakeTensor or shard.layout is not torch.strided:
                    raise NotPeriodic(f"{run.name}: a gradient cannot be copied", [run.name])
                if index not in made:
                    nbytes = shard.untyped_storage().nbytes()
                    made[index] = [self.fakes.new((nbytes,), (1,), torch.uint8) for _ in missing]
                    run.gradients[index] = [self.recorder.follow_like(storage, index) for storage in made[index]]
                for parameter, storage in zip(missing, made[index], strict=True):
                    if parameter.grad is not None:
                        self.recorder.unfollow(local(parameter.grad))
                    parameter.grad = self._gradient(like.grad, storage)

    def _gradient(self, like: Tensor, storage: Tensor) -> Tensor:
        """A gradient like another, in the storage of another tensor."""
        shard = local(like)
        made = self.fakes.view(storage, shard.shape, shard.stride(), int(shard.storage_offset()), shard.dtype)
        return DTensor(made, like._spec, requires_grad=False) if isinstance(like, DTensor) else made


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def is_whole(gradient: Tensor) -> bool:
    """Whether it is a fake tensor that covers all of its storage."""
    if type(gradient) is not FakeTensor or gradient.layout is not torch.strided:
        return False
    return gradient.untyped_storage().nbytes() == gradient.numel() * gradient.itemsize


def repetitions(kinds: Sequence[object]) -> Iterator[tuple[range, int]]:
    """The parts of a list of blocks, of these kinds, in which the kinds repeat often enough.

    From each block on, the period with the largest share of skipped blocks is taken. Yields the numbers of a part's
    blocks, and how many blocks make a unit.
    """
    first = 0
    while first < len(kinds):
        found = []
        for period in range(1, (len(kinds) - first) // (FIRST + 2) + 1):
            end = first + period
            while end < len(kinds) and kinds[end] == kinds[end - period]:
                end += 1
            blocks = range(first, end - (end - first) % period)
            skipped = len(blocks) - (FIRST + 1) * period
            found.append((skipped / len(blocks), skipped, blocks, period))
        _, skipped, blocks, period = max(found, key=itemgetter(0), default=(0, 0, range(0), 0))
        if skipped < _FEWEST:
            first += 1
            continue
        yield blocks, period
        first = blocks.stop


class ShortenedRun(NamedTuple):
    """A run of blocks of which some were removed.

    Attributes:
        units: how many units the run had.
        left: the names of the blocks that are left.
        period: blocks of a unit.
    """

    units: int
    left: list[str]
    period: int

    def part_of(self, module: str, ends: int) -> object:
        """The unit that `module` is in, counted from the nearer end of the run; the module if it is outside.

        None for units that are not among the first or last `ends`.
        """
        for block, name in enumerate(self.left):
            if module == name or module.startswith(f"{name}."):
                unit, last = block // self.period, len(self.left) // self.period
                return unit if unit < ends else unit - last if unit >= last - ends else None
        return module


def shorten(model: nn.Module, units: int) -> ShortenedRun | None:
    """Remove blocks of the longest run that repeats until `units` units are left; None if it has no more."""
    runs = [(found, *each) for found in _block_lists(model) for each in repetitions(found.comparison.kinds())]
    found, blocks, period = max(runs, key=lambda run: len(run[1]), default=(None, range(0), 1))
    count, left = len(blocks) // period, slice(blocks.start, blocks.start + units * period)
    if found is None or count <= units or not isinstance(found.parent, (nn.ModuleList, nn.Sequential)):
        return None
    del found.parent[left.stop : blocks.stop]
    return ShortenedRun(count, found.names[left], period)


class _BlockList:
    """The numbered children of a module, `parent`, and the runs of blocks among them.

    Attributes:
        calls: the calls of the current traversal, which calls one block after another from number `first` on.
        last_run: the last of these calls in which the block ran.
        position_after: the length of the record when that block returned.
        traced_whole: a block of this list was called inside of another list's block: no block is skipped.
    """

    def __init__(self, parent: nn.Module, blocks: list[nn.Module], names: list[str], shared: set[int]) -> None:
        self.parent, self.blocks, self.names = parent, blocks, names
        unique = [any(id(p) in shared for p in block.parameters()) for block in blocks]
        self.comparison = BlockComparison(blocks, unique)
        self.begin(set())

    def begin(self, traced: set[str]) -> None:
        """Begin a step, in which all blocks of the runs named `traced` are traced."""
        self._traced, self.traced_whole = traced, False
        self.runs: list[_Run] = []
        self._run_of: list[_Run | None] = []
        self.calls: list[_Call] = []
        self.first = 0
        self.last_run: _Call | None = None
        self.position_after: Position | None = None

    def run_of(self, number: int) -> _Run | None:
        """The run that a block is in, if any. Policies and what is trained may have changed since the last step."""
        if self.traced_whole:
            return None
        if not self._run_of:
            self._run_of = [None] * len(self.blocks)
            called = _CALL_KINDS.get(self.parent, [0] * len(self.blocks))
            for blocks, period in repetitions(list(zip(self.comparison.kinds(), called, strict=True))):
                if self.names[blocks.start] not in self._traced:
                    numbers = slice(blocks.start, blocks.stop)
                    self.runs.append(_Run(blocks.start, self.blocks[numbers], self.names[numbers], period))
                    self._run_of[numbers] = [self.runs[-1]] * len(blocks)
        return self._run_of[number]

    def end_before_last(self, run: _Run) -> None:
        """Trace the last unit of `run` as if it were not part of the run; the whole run if it is too short."""
        if len(run.missing) <= 1:
            run.traced_whole = True
            return
        del run.units[-1], run.blocks[-run.period :]
        self._run_of[run.first + len(run.blocks) : run.first + len(run.blocks) + run.period] = [None] * run.period

    def call(self, number: int, args: Any, kwargs: Any, in_backward: bool) -> _Call:
        """Note that a block is called; a new traversal begins unless it follows the block called last."""
        if number != self.first + len(self.calls):
            self.first, self.calls, self.last_run = number, [], None
        call = _Call(args, kwargs, self.last_run)
        if not in_backward:
            call.kind = next((other.kind for other in reversed(self.calls) if call.is_called_like(other)), number)
        self.calls.append(call)
        if not in_backward and len(self.calls) == len(self.blocks):
            _CALL_KINDS[self.parent] = [call.kind for call in self.calls]
        return call

    def skips(self, run: _Run, number: int, position: Position, in_backward: bool) -> bool:
        """Whether block `number`, which is called, is skipped.

        Raises:
            NotPeriodic: it is not called like those before it, of which some were skipped.
        """
        unit = (number - run.first) // run.period
        if not self._follows(run, number - run.first, position):
            run.unlike_calls = self.calls
            if run.skipped and (unit in run.missing or not in_backward):
                raise NotPeriodic(f"{run.name}: a block is called otherwise", [run.name])
            run.traced_whole = run.traced_whole or not in_backward
            return False
        if unit not in run.missing or (in_backward and not run.skipped):
            return False
        run.skipped = True
        return True

    def _follows(self, run: _Run, at: int, position: Position) -> bool:
        """Whether the block last called, number `at` of its run, is called like the one a unit before, if any."""
        if self.first > run.first or run.unlike_calls is self.calls:
            return False
        if at == 0:
            run.random_states = _random_states()
        call, period = self.calls[-1], run.period
        if at < period:
            return True
        if not call.is_called_like(self.calls[-1 - period]):
            return False
        third, next_unit, last = (unit * period for unit in (FIRST - 1, FIRST, len(run.units) - 1))
        if at == third:
            run.counts = call.reference_counts()
        if at == next_unit:
            units = zip(self.calls[-1 - 2 * period :], self.calls[-1 - period : -1], strict=False)
            if not all(third.passes_results_on(second) for second, third in units):
                return False
            if run.random_states != _random_states():  # a block may be dropped at random
                return False
        if not next_unit <= at <= last:
            return True
        after = self.position_after
        return after is not None and after[:2] == position[:2] and call.reference_counts() == run.counts


def _block_lists(model: nn.Module) -> Iterator[_BlockList]:
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
            yield _BlockList(module, blocks, [names[id(block)] for block in blocks], shared)


class _Run(SkippedRun):
    """A run of blocks, in one step.

    Args:
        first: the number of its first block in the list.
        blocks, names: its blocks, as many as make whole units, in order.
        period: the number of blocks in a unit.

    Attributes:
        skipped: whether some of its blocks were skipped.
        traced_whole: whether all blocks are traced, because calls differed before any block was skipped.
        unlike_calls: the calls of the traversal in which calls differ, if it is the current one.
        random_states: those when the first block was called.
        counts: the numbers of references to the third unit's arguments.
    """

    def __init__(self, first: int, blocks: list[nn.Module], names: list[str], period: int) -> None:
        super().__init__([Unit(names[at : at + period]) for at in range(0, len(names), period)])
        self.first, self.blocks, self.period = first, blocks, period
        self.skipped = self.traced_whole = False
        self.unlike_calls: list[_Call] | None = None
        self.random_states: object = None
        self.counts: list[tuple[int, int, int]] = []

    def modules(self, unit: int) -> Iterator[nn.Module]:
        """The modules of all blocks of a unit."""
        for block in self.blocks[unit * self.period : (unit + 1) * self.period]:
            yield from block.modules()


class _Call:
    """A call of a block: its arguments and results. Tensors and KV caches are held weakly.

    Args:
        before: the call before it in its traversal.

    Attributes:
        from_before: for each argument, the number of the previous call's result that is passed on; None if none is.
        argument_of: for each result, the number of the argument that is returned; None if it is a new one.
    """

    kind = 0

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], before: _Call | None) -> None:
        given, self.spec = tree_flatten((args, kwargs))
        self.given = [_reference(leaf) for leaf in given]
        self.is_first = before is None
        results = [] if before is None else before.returned
        self.from_before = [_index(leaf, results) if _has_no_value(leaf) else None for leaf in given]

    def returns(self, out: Any) -> None:
        """Note the results."""
        leaves, self.returned_spec = tree_flatten(out)
        self.returned = [_reference(leaf) for leaf in leaves]
        self.argument_of = [_index(leaf, self.given) for leaf in leaves]

    def is_called_like(self, other: _Call) -> bool:
        """Whether each argument is the other's, or what a block before each returned."""
        return self.spec == other.spec and all(
            _same(one, there) or (at is not None and (other.is_first or at == other_at))
            for one, there, at, other_at in zip(
                self.given, other.given, self.from_before, other.from_before, strict=True
            )
        )

    @property
    def new(self) -> set[int]:
        """Which results are neither arguments nor plain values."""
        results = enumerate(zip(self.returned, self.argument_of, strict=True))
        return {at for at, (leaf, argument) in results if argument is None and not isinstance(leaf, _PLAIN)}

    def passes_results_on(self, before: _Call) -> bool:
        """Whether it returned what the call a unit before did, and each new result is the next block's argument."""
        returned = (self.argument_of, self.returned_spec) == (before.argument_of, before.returned_spec)
        return returned and self.new <= set(self.from_before)

    def reference_counts(self) -> list[tuple[int, int, int]]:
        """References to each argument that the block before made: to its Python object, C++ object, storage."""
        found = []
        for at, leaf in zip(self.from_before, self.given, strict=True):
            if at is not None:
                tensor = leaf()
                storage = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
                found.append((sys.getrefcount(tensor), tensor._use_count(), storage))
        return found

    def result_if_skipped(self, like: _Call) -> Any:
        """What the block returns if it is skipped: what `like` did, with arguments in place of new results."""
        self.returned, self.returned_spec, self.argument_of = like.returned, like.returned_spec, like.argument_of
        leaves = list(self.returned)
        for at, argument in enumerate(self.argument_of):
            if argument is not None or at in self.new:
                leaves[at] = self.given[self.from_before.index(at) if argument is None else argument]()
        return tree_unflatten(leaves, self.returned_spec)


def _reference(leaf: Any) -> Any:
    """Keeps no tensor alive; other objects might."""
    if isinstance(leaf, Tensor) or _is_cache(leaf):
        return weakref.ref(leaf)
    return leaf if isinstance(leaf, _PLAIN) else _OBJECT


def _is_cache(leaf: Any) -> bool:
    """Whether it is a KV cache of transformers: each block has its own place in it, and reads no other."""
    known = sys.modules.get("transformers.cache_utils")
    return known is not None and isinstance(leaf, known.Cache)


def _index(leaf: Any, references: list[Any]) -> int | None:
    """Which of the references is one to `leaf`."""
    if leaf is None:
        return None
    return next((at for at, one in enumerate(references) if isinstance(one, weakref.ref) and one() is leaf), None)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, weakref.ref):
        return isinstance(other, weakref.ref) and one() is other()
    return one is not _OBJECT and type(one) is type(other) and bool(one == other)


def _has_no_value(made: Any) -> bool:
    """Whether nothing can depend on the values of a block's results: none is known (values.py) or a count."""
    return isinstance(made, Tensor) and made.is_floating_point() and "_value" not in vars(made)


def _random_states() -> tuple[object, ...]:
    """Of the generators that Python code draws from; torch's does not move on fake tensors."""
    drawn: Any = numpy.random.get_state()
    return random.getstate(), drawn[1].tobytes(), drawn[2]
