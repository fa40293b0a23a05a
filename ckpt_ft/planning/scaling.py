"""Scales a trace to another batch size: the order of events stays, and the sizes of storages and ops grow.

How much each storage and op grows with the batch is learned once, from two traces of one policy. It holds for every
policy, because policies change what is kept and what runs twice, but no sizes. These estimates only steer the search:
every candidate that a plan shows has been traced at its own batch size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from ckpt_ft.memory.record.events import Op, Storage
from ckpt_ft.memory.record.trace import StepTrace

Value = TypeVar("Value", bound=tuple[int, ...])
_AMBIGUOUS = None
EXACT = 1e-3
_STAYS = ("parameters", "buffers", "gradients", "optimizer", "workspace")


class _Table(Generic[Value]):
    """Values of records at the batch size `high`, by a fine key, or by a coarse key if the fine one is new."""

    def __init__(self) -> None:
        self._fine: dict[Hashable, Value | None] = {}
        self._coarse: dict[Hashable, Value | None] = {}

    def learn(self, fine: Hashable, coarse: Hashable, value: Value) -> None:
        for table, key in ((self._fine, fine), (self._coarse, coarse)):
            if table.setdefault(key, value) != value:
                table[key] = _AMBIGUOUS

    def get(self, fine: Hashable, coarse: Hashable) -> Value | None:
        return self._fine[fine] if fine in self._fine else self._coarse.get(coarse)


class Growth:
    """How traces grow from batch size `low` to `high`; linear between and beyond them."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high
        self._storages: _Table[tuple[int]] = _Table()
        self._ops: _Table[tuple[int, ...]] = _Table()
        self._learned = 0  # how often `learn` was called: cached sizes of before are stale
        self._sizes: dict[int, tuple[int, StepTrace, list[tuple[int, int]]]] = {}
        self._costs: dict[int, tuple[int, StepTrace, list[tuple[int, ...]]]] = {}

    def learn(self, small: StepTrace, large: StepTrace) -> None:
        """Pair the records of one policy's traces at `low` and `high`, module by module and in order.

        If a module made more records for the larger batch (a loss in chunks), their size stays and their number grows.
        Records that only the warm-up made (the optimizer's state) keep their size, too.
        """
        self._learned += 1
        for one, other in _paired(_measured(small), _measured(large), lambda s: (s.module, s.phase, s.op)):
            for before, after in zip(one, other if len(one) == len(other) else one, strict=True):
                self._storages.learn(*_storage_keys(before), (after.nbytes,))
        for storage in small.storages:
            if self._storages.get(*_storage_keys(storage)) is None and storage.category in _STAYS:
                self._storages.learn(*_storage_keys(storage), (storage.nbytes,))
        for ones, others in _paired(small.ops, large.ops, lambda o: (o.module, o.phase, o.name)):
            if len(ones) == len(others):
                for op, grown in zip(ones, others, strict=True):
                    self._ops.learn(*_op_keys(op), _figures(grown))
                continue
            more = len(others) / len(ones)
            for op in ones:
                grown = replace(
                    op, flops=int(op.flops * more), nbytes=int(op.nbytes * more), kernels=round(op.kernels * more)
                )
                self._ops.learn(*_op_keys(op), _figures(grown))

    def knows(self, trace: StepTrace) -> bool:
        """Whether the growth of all but 0.1 % of the bytes that `trace` (at `low`) allocates and moves is known."""
        unknown = sum(s.nbytes for s in trace.storages if self._storages.get(*_storage_keys(s)) is None)
        unmoved = sum(o.nbytes for o in trace.ops if self._ops.get(*_op_keys(o)) is None)
        return unknown <= EXACT * trace.peak_allocated and unmoved <= EXACT * sum(o.nbytes for o in trace.ops)

    def scale(self, trace: StepTrace, batch: int) -> StepTrace:
        """Returns `trace` (at `low`) scaled to `batch`; records of unknown growth keep their size."""
        storages = [
            s if nbytes == s.nbytes else Storage(nbytes, s.category, s.op, s.module, s.phase, s.stream)
            for s, nbytes in zip(trace.storages, self.sizes(trace, batch), strict=True)
        ]
        return replace(trace, storages=storages, ops=self.ops(trace, batch))

    def ops(self, trace: StepTrace, batch: int) -> list[Op]:
        """The ops of `trace`, scaled to `batch`."""
        share = (batch - self.low) / (self.high - self.low)
        scaled = []
        for o, more in zip(trace.ops, self._dearer(trace), strict=True):
            if not more:
                scaled.append(o)
                continue
            grew = [max(0, round(was + extra * share)) for was, extra in zip(_figures(o), more, strict=True)]
            flops, nbytes, kernels, *shape = grew
            here = o.dtype, o.phase, o.module, o.at
            scaled.append(Op(o.name, flops, nbytes, *here, kernels, o.stream, o.wire, tuple(shape), o.around))
        return scaled

    def sizes(self, trace: StepTrace, batch: int) -> list[int]:
        """The bytes of each storage of `trace`, scaled to `batch`."""
        share = (batch - self.low) / (self.high - self.low)
        grown = self._grown(trace)
        return [max(0, round(before + more * share)) if more else before for before, more in grown]

    def _grown(self, trace: StepTrace) -> list[tuple[int, int]]:
        """For each storage its bytes at `low`, and how many more it has at `high`."""
        known = self._sizes.get(id(trace))
        if known is None or known[0] != self._learned:
            sizes = [
                (s.nbytes, (self._storages.get(*_storage_keys(s)) or (s.nbytes,))[0] - s.nbytes)
                for s in trace.storages
            ]
            known = self._sizes[id(trace)] = self._learned, trace, sizes
        return known[2]

    def _dearer(self, trace: StepTrace) -> list[tuple[int, ...]]:
        """For each op how much its figures grow up to `high`; () if they do not."""
        known = self._costs.get(id(trace))
        if known is None or known[0] != self._learned:
            costs: list[tuple[int, ...]] = []
            for o in trace.ops:
                was, grown = _figures(o), self._ops.get(*_op_keys(o)) or ()
                if len(grown) != len(was) or grown == was:
                    costs.append(())
                else:
                    costs.append(tuple(after - before for before, after in zip(was, grown, strict=True)))
            known = self._costs[id(trace)] = self._learned, trace, costs
        return known[2]


Record = TypeVar("Record", Storage, Op)


def _paired(small: Sequence[Record], large: Sequence[Record], key) -> Iterable[tuple[list[Record], list[Record]]]:  # type: ignore[no-untyped-def]
    """Pairs of lists: the records of either trace that have the same key, in order."""
    groups: dict[Hashable, tuple[list[Record], list[Record]]] = defaultdict(lambda: ([], []))
    for side, records in enumerate((small, large)):
        for record in records:
            groups[key(record)][side].append(record)
    return [pair for pair in groups.values() if pair[0] and pair[1]]


def _measured(trace: StepTrace) -> list[Storage]:
    """The storages that the measured step allocates, and those that were resident before it."""
    made = {event for event in trace.events[trace.start :] if event >= 0}
    return [s for index, s in enumerate(trace.storages) if index in made or not s.op]


def _storage_keys(s: Storage) -> tuple[Hashable, Hashable]:
    return (s.op, s.module, s.nbytes), (s.op, s.nbytes)


def _figures(o: Op) -> tuple[int, ...]:
    """The figures of an op that grow with the batch."""
    return o.flops, o.nbytes, o.kernels, *o.shape


def _op_keys(o: Op) -> tuple[Hashable, Hashable]:
    """Keys include the shape: a weight's gradient has the flops and bytes of forward, but grows along another side."""
    figures = o.flops, o.nbytes, o.dtype, o.shape
    return (o.name, o.module, *figures), (o.name, *figures)
