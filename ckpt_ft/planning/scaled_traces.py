"""Estimates bytes and seconds of every policy at any batch size, from the traces that a search has made so far.

Two traces of one policy show how the sizes of its storages and ops grow with the batch; the order of events stays.
This holds for every policy, because policies change what is kept and what runs twice, but not sizes. Once a policy was
traced at a batch size that may be the best, that trace is resized instead. The estimates only steer the search: every
candidate that a plan shows has been traced at its own batch size.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple, TypeVar

from ckpt_ft.memory.record.events import Op, Storage
from ckpt_ft.memory.record.trace import StepTrace

from .budget import Candidate, MemoryBudget, better, largest_fitting
from .tracing import Key, Traced, Tracer

EXACT = 1e-3
_STAYS = ("parameters", "buffers", "gradients", "optimizer", "workspace")


class Anchor(NamedTuple):
    """A trace that is scaled. `ends`: the bytes of each storage at two batch sizes, None if they do not grow."""

    trace: StepTrace
    batch: int
    ends: Sequence[tuple[int, int] | None] = ()


Values = dict[Hashable, Any]  # values by key; None for a key that several records with other values have


def _learn(table: Values, keys: Sequence[Hashable], value: tuple[int, ...]) -> None:
    for key in keys:
        if table.setdefault(key, value) != value:
            table[key] = None


def _known(table: Values, keys: Sequence[Hashable]) -> Any:
    """The value of the first key that is known; `keys` are from the finest to the coarsest."""
    return next((table[key] for key in keys if key in table), None)


class Growth:
    """How traces grow from batch size `low` to `high`, and beyond them.

    Figures are linear in the batch. Bytes and flops that grow about as its square are quadratic: the scores or the
    mask of attention, if a sample is a piece of each sequence.
    """

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high
        self._storages: Values = {}
        self._ops: Values = {}
        # By the trace's list of records, which the same step on another card shares.
        self._sizes: dict[int, tuple[Sequence[Storage], list[tuple[int, int]]]] = {}
        self._costs: dict[int, tuple[Sequence[Op], list[tuple[int, ...]]]] = {}

    def learn(self, small: StepTrace, large: StepTrace) -> None:
        """Pair the records of one policy's traces at `low` and `high`, module by module and in order.

        If a module made more records for the larger batch (a loss in chunks), their size stays and their number grows.
        Records that only the warm-up made (the optimizer's state) keep their size, too.
        """
        self._sizes, self._costs = {}, {}
        for one, other in _paired(_measured(small), _measured(large), lambda s: (s.module, s.phase, s.op)):
            for before, after in zip(one, other if len(one) == len(other) else one, strict=True):
                _learn(self._storages, _storage_keys(before), (after.nbytes,))
        for storage in small.storages:
            if _known(self._storages, _storage_keys(storage)) is None and storage.category in _STAYS:
                _learn(self._storages, _storage_keys(storage), (storage.nbytes,))
        for ones, others in _paired(small.ops, large.ops, lambda o: (o.module, o.phase, o.name)):
            if len(ones) == len(others):
                for op, grown in zip(ones, others, strict=True):
                    _learn(self._ops, _op_keys(op), _figures(grown))
                continue
            more = self.high / self.low  # the chunks are as long as the batch, however many they are
            for op in ones:
                work = int(op.flops * more), int(op.nbytes * more), round(op.kernels * more)
                _learn(self._ops, _op_keys(op), (*work, *op.shape))

    def knows(self, trace: StepTrace) -> bool:
        """Whether the growth of all but 0.1 % of the bytes that `trace` (at `low`) allocates and moves is known.

        What the optimizer moves does not grow.
        """
        moving = [o for o in trace.ops if o.phase != "optimizer"]
        unknown = sum(s.nbytes for s in trace.storages if _known(self._storages, _storage_keys(s)) is None)
        unmoved = sum(o.nbytes for o in moving if _known(self._ops, _op_keys(o)) is None)
        return unknown <= EXACT * trace.peak_allocated and unmoved <= EXACT * sum(o.nbytes for o in moving)

    def scale(self, trace: StepTrace, batch: int) -> StepTrace:
        """Returns `trace` (at `low`) scaled to `batch`; records of unknown growth keep their size."""
        return replace(with_sizes(trace, self.sizes(Anchor(trace, self.low), batch)), ops=self.ops(trace, batch))

    def ops(self, trace: StepTrace, batch: int) -> list[Op]:
        """The ops of `trace`, scaled to `batch`."""
        scaled = []
        for o, dearer in zip(trace.ops, self._dearer(trace), strict=True):
            if not dearer:
                scaled.append(o)
                continue
            work, moved, *counts = zip(_figures(o), dearer, strict=True)
            flops, nbytes = self.at(batch, *work), self.at(batch, *moved)
            kernels, *shape = (self._on_a_line(batch, *count) for count in counts)
            here = o.dtype, o.phase, o.module, o.at
            scaled.append(Op(o.name, flops, nbytes, *here, kernels, o.stream, o.wire, tuple(shape), o.around, o.group))
        return scaled

    def sizes(self, anchor: Anchor, batch: int) -> list[int]:
        """The bytes of each storage of `anchor`, scaled to `batch`."""
        grown = anchor.ends or self._grown(anchor.trace)
        factors: dict[tuple[int, int] | None, float] = {None: 1.0}
        for ends in filter(None, set(grown)):
            factors[ends] = self.at(batch, *ends) / (self.at(anchor.batch, *ends) or 1)
        return [round(s.nbytes * factors[ends]) for s, ends in zip(anchor.trace.storages, grown, strict=True)]

    def at(self, batch: int, low: int, high: int) -> int:
        """A figure at `batch` whose values at the batch sizes `low` and `high` are given."""
        times = self.high / self.low
        if high <= low * times**1.5:
            return self._on_a_line(batch, low, high)
        square = (high - low * times) / (self.high * (self.high - self.low))
        return round(square * batch * batch + (low / self.low - square * self.low) * batch)

    def _on_a_line(self, batch: int, low: int, high: int) -> int:
        return max(0, round(low + (high - low) * (batch - self.low) / (self.high - self.low)))

    def like(self, first: StepTrace, trace: StepTrace, batch: int) -> Anchor:
        """The anchor `trace`, at any batch size, whose storages grow as those of the same policy at `low` do."""
        table: Values = {}
        grown = dict(zip(map(id, first.storages), self._grown(first), strict=True))
        for ones, others in _paired(_measured(first), _measured(trace), lambda s: (s.module, s.phase, s.op)):
            for one, other in zip(ones, others, strict=True) if len(ones) == len(others) else ():
                _learn(table, _storage_keys(other), grown[id(one)])
        return Anchor(trace, batch, [_known(table, _storage_keys(s)) for s in trace.storages])

    def _grown(self, trace: StepTrace) -> list[tuple[int, int]]:
        """For each storage of `trace` (at `low`) its bytes at `low` and `high`."""
        records = trace.storages
        if id(records) not in self._sizes:
            sizes = [(s.nbytes, (_known(self._storages, _storage_keys(s)) or (s.nbytes,))[0]) for s in records]
            self._sizes[id(records)] = records, sizes
        return self._sizes[id(records)][1]

    def _dearer(self, trace: StepTrace) -> list[tuple[int, ...]]:
        """For each op of `trace` (at `low`) its figures at `high`; () if they do not grow."""
        records = trace.ops
        if id(records) not in self._costs:
            grown = [(_figures(o), _known(self._ops, _op_keys(o)) or ()) for o in records]
            dearer = [at_high if len(at_high) == len(was) and at_high != was else () for was, at_high in grown]
            self._costs[id(records)] = records, dearer
        return self._costs[id(records)][1]


def with_sizes(trace: StepTrace, sizes: Sequence[int]) -> StepTrace:
    """Returns `trace` with storages of these sizes in bytes."""
    storages = [
        s if nbytes == s.nbytes else Storage(nbytes, s.category, s.op, s.module, s.phase, s.stream)
        for s, nbytes in zip(trace.storages, sizes, strict=True)
    ]
    return replace(trace, storages=storages)


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


@cache
def _of_any_block(module: str) -> str:
    """A module's name without the numbers of blocks, of which a model with fewer blocks does not have all."""
    return re.sub(r"\d+", "*", module)


def _storage_keys(s: Storage) -> tuple[Hashable, ...]:
    return (s.op, s.module, s.nbytes), (s.op, _of_any_block(s.module), s.nbytes, "*"), (s.op, s.nbytes)


def _figures(o: Op) -> tuple[int, ...]:
    """The figures of an op that grow with the batch."""
    return o.flops, o.nbytes, o.kernels, *o.shape


def _op_keys(o: Op) -> tuple[Hashable, ...]:
    """Keys include the shape: a weight's gradient has the flops and bytes of forward, but grows along another side."""
    figures = o.flops, o.nbytes, o.dtype, o.shape
    return (o.name, o.module, *figures), (o.name, _of_any_block(o.module), *figures, "*"), (o.name, *figures)


# Policies that a plan of a compiled step leaves out. Inductor fuses what `pointwise` rebuilds, the next two do nothing
# in a compiled region, each block with replaced modules is compiled by itself, and `swap` was not tried with it.
_IDLE_COMPILED = ("pointwise", "head", "offload", "modules:", "swap")
_SIZES_TRIED_ABOVE = 8  # batch sizes to look at above the first that does not fit
LOW, HIGH = 5, 7  # batch sizes of the traces that growth is learned from; odd, so that sizes rarely coincide


@dataclass
class Estimates:
    """The candidates of one plan.

    Attributes:
        batch: the only batch size to look at; None for all sizes up to `most`.
        tolerance: share of the largest batch that a search may miss, so that it ends after fewer traces.
        separate: whether each anchor has a session of its own, as final traces have, with the same reserved bytes. A
            search then also finds batch sizes that fit above one that does not.
        anchors: the trace of each policy at `batch`, or at `LOW`.
        rejected: policies that do not suit this model, each with the reason.
        scaled: candidates that were estimated from an anchor instead of traced.
        typical_seconds: seconds of a step on a typical batch, if the rows of the dataset differ in length.
        _latest: the trace of a policy at the batch size given to `following`, which is scaled in place of its anchor.
    """

    tracer: Tracer
    room: MemoryBudget
    target: str = "throughput"
    batch: int | None = None
    most: int = 1024
    tolerance: float = 0.0
    separate: bool = False
    growth: Growth = field(default_factory=lambda: Growth(LOW, HIGH))
    anchors: dict[str, StepTrace] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    scaled: dict[tuple[str, int], Candidate] = field(default_factory=dict)
    bests: dict[str, Candidate | None] = field(default_factory=dict)
    typical_seconds: dict[tuple[str, int], float] = field(default_factory=dict)
    _latest: dict[str, Anchor] = field(default_factory=dict, init=False)
    _peaks: dict[tuple[str, int, int], tuple[int, int]] = field(default_factory=dict)
    _floors: dict[tuple[str, int, int], int] = field(default_factory=dict)

    def trace_candidates(self, policies: Iterable[str]) -> None:
        """Trace the anchors of `policies`, and a second point of policies whose growth with the batch is unknown."""
        if self.tracer.workload.compile:
            policies = [policy for policy in policies if not any(term in policy for term in _IDLE_COMPILED)]
        fresh = [p for p in dict.fromkeys(policies) if p not in self.anchors and p not in self.rejected]
        at = self.batch or LOW
        for policy, trace in zip(fresh, self._trace([(policy, at) for policy in fresh]), strict=True):
            if isinstance(trace, str):
                self.rejected[policy] = trace
            else:
                self.anchors[policy] = trace
        unsure = [policy for policy in fresh if policy in self.anchors] if self.batch is None else []
        while unsure := [policy for policy in unsure if not self.growth.knows(self.anchors[policy])]:
            ends = unsure[:: max(len(unsure) - 1, 1)] if self.tracer.parallel else unsure[:1]  # the least similar ones
            unsure = [policy for policy in unsure if policy not in ends]
            smalls, larges = (self.tracers[0].all([(policy, at) for policy in ends]) for at in (LOW, HIGH))
            for small, large in zip(smalls, larges, strict=True):
                assert not isinstance(small, str), "its policy has an anchor"
                assert not isinstance(large, str), "it was traced at LOW"
                self.growth.learn(small, large)

    def _trace(self, wanted: list[Key]) -> list[Traced]:
        return self.tracer.all(wanted, self.separate)

    @property
    def tracers(self) -> list[Tracer]:
        """Those that trace the final batch sizes; the growth with the batch is learned from the first."""
        return [self.tracer]

    def estimate(self, policy: str, batch: int) -> Candidate:
        """The candidate of `policy` at `batch`: from its trace if there is one, else scaled from the anchor."""
        if isinstance(self.tracer.traced.get((policy, batch)), StepTrace):
            return self._traced(policy, batch)
        if (policy, batch) not in self.scaled:
            self.scaled[policy, batch] = replace(self._estimated(policy, batch), host=self._host(policy, batch))
        return self.scaled[policy, batch]

    def _traced(self, policy: str, batch: int) -> Candidate:
        return self._candidate(policy, batch, self.tracer.trace_of(policy, batch))

    def _estimated(self, policy: str, batch: int) -> Candidate:
        anchor = self.anchors[policy]
        scaled = replace(anchor, ops=self.growth.ops(anchor, batch))
        return self._candidate(policy, batch, scaled, self._scaled_peaks(policy, batch))

    def _candidate(self, policy: str, batch: int, trace: StepTrace, peaks: tuple[int, int] | None = None) -> Candidate:
        """The candidate of a trace: its bytes are those of the longest batch, its seconds those of a typical one."""
        workload = self.tracer.workload
        candidate = Candidate.of(policy, batch, trace, workload.accumulation, peaks)
        lengths = workload.lengths
        if lengths is None:
            return candidate
        by_tokens = candidate.seconds * lengths.padded(batch) / lengths.longest
        return replace(candidate, seconds=self.typical_seconds.get((policy, batch), by_tokens))

    def reserved(self, policy: str, batch: int) -> int:
        """Estimated bytes reserved."""
        if (policy, batch) in self.tracer.traced or (policy, batch) in self.scaled:
            return self.estimate(policy, batch).reserved
        return self.scaled_reserved(policy, batch)

    def scaled_reserved(self, policy: str, batch: int) -> int:
        """Bytes reserved, scaled even if `policy` was traced at `batch`."""
        return self._scaled_peaks(policy, batch)[1]

    def floor(self, policy: str, batch: int) -> int:
        """A lower bound of `scaled_reserved` that needs no replay."""
        trace = self._scaled(policy).trace
        key = policy, batch, id(trace.storages)
        if key not in self._floors:
            self._floors[key] = trace.requested_with(self._sizes(policy, batch))
        return self._floors[key]

    def _scaled_peaks(self, policy: str, batch: int) -> tuple[int, int]:
        """Peak bytes allocated and reserved, from one replay of the scaled trace."""
        trace = self._scaled(policy).trace
        key = policy, batch, id(trace.storages)
        if key not in self._peaks:
            replay = trace.replay_with(self._sizes(policy, batch))
            self._peaks[key] = replay.peak_allocated(trace.start), replay.peak_reserved()
        return self._peaks[key]

    def _scaled(self, policy: str) -> Anchor:
        """The latest trace of `policy`, or its first."""
        return self._latest.get(policy) or Anchor(self.anchors[policy], self.batch or LOW)

    def _sizes(self, policy: str, batch: int) -> list[int]:
        return self.growth.sizes(self._scaled(policy), batch)

    def _correct(self, policy: str, batch: int) -> None:
        """Scale the trace at `batch` from now on."""
        self._latest[policy] = self.growth.like(self.anchors[policy], self.tracer.trace_of(policy, batch), batch)

    def runs(self, policy: str, batch: int) -> bool:
        """Whether a step runs at all, if cached segments are returned to the device when it is full."""
        sizes = self._sizes(policy, batch)
        return self._scaled(policy).trace.replay_with(sizes, self.room.limit).oom_at is None

    def best(self, policy: str) -> Candidate | None:
        """The candidate of `policy` at the largest batch that fits, or at batch 1 for the target "memory"."""
        if policy not in self.bests:
            batch = self.batch or 1
            if self.batch is None and self.target != "memory":
                known = {LOW: self.reserved(policy, LOW)}
                batch = self._largest(policy, LOW, lambda n: self.reserved(policy, n), known)
            self._settle(policy, batch)
        return self.bests[policy]

    def _settle(self, policy: str, batch: int) -> None:
        candidate = self.estimate(policy, batch) if batch else None
        self.bests[policy] = candidate if candidate is not None and self.room.fits(candidate) else None

    def _largest(
        self, policy: str, near: int, reserved: Callable[[int], int], known: dict[int, int], tolerance: float = 0.0
    ) -> int:
        """The largest batch whose `reserved` bytes fit; `known` and `tolerance` are those of `largest_fitting`.

        The ratio of bytes reserved to `floor`, which needs no replay, is about the same at every batch: its value at
        `near` gives the first guess. A batch whose floor is over the limit is not replayed.
        """
        limit, share = self.room.limit, (known.get(near) or reserved(near)) / max(self.floor(policy, near), 1)
        most, host = self.most, self.room.host
        if host is not None:
            most = largest_fitting(lambda n: self._host(policy, n), host, most)
        guess = largest_fitting(lambda n: round(self.floor(policy, n) * share), limit, most)
        if guess and guess not in known:
            known[guess] = reserved(guess)

        def needs(batch: int) -> int:
            least = self.floor(policy, batch)
            return round(least * share) if least > limit else reserved(batch)

        found = largest_fitting(needs, limit, most, known, tolerance)
        # Reserved bytes fall once the largest tensors outgrow the segments that they fragment: try larger batches.
        top = largest_fitting(lambda n: self.floor(policy, n), limit, most) if self.separate else found
        step = max((top - found) // _SIZES_TRIED_ABOVE, 1)
        for batch in range(top, found, -step):
            if known[batch] <= limit if batch in known else not self._exceeds(policy, batch):
                return largest_fitting(needs, limit, min(batch + step, top), known, tolerance)
        return found

    def _exceeds(self, policy: str, batch: int) -> bool:
        """Whether the scaled trace reserves more than the limit; the replay ends where it does."""
        sizes, limit = self._sizes(policy, batch), self.room.limit
        return self._scaled(policy).trace.replay_with(sizes, until=limit).peak_reserved() > limit

    def _host(self, policy: str, batch: int) -> int:
        """Estimated bytes in host memory, where only activations grow."""
        trace, at, _ = self._scaled(policy)
        return max(trace.peak_host + trace.at_host_peak.get("activations", 0) * (batch - at) // at, 0)

    def following(self, policy: str, batch: int) -> int | None:
        """The batch size to trace after `batch`; None if the best batch of `policy` is known, which is then stored."""
        if self.batch is None and self.target != "memory":
            self._correct(policy, batch)
            self.scaled = {key: one for key, one in self.scaled.items() if key[0] != policy}
            batches = [at for name, at in self.tracer.traced if name == policy and at not in (LOW, HIGH)]
            made = {at: self.estimate(policy, at) for at in batches}
            known = {
                at: one.reserved if self.room.host_holds(one.host) else self.room.limit + 1 for at, one in made.items()
            }
            batch = self._largest(policy, batch, lambda n: self.scaled_reserved(policy, n), known, self.tolerance)
            if batch and (policy, batch) not in self.tracer.traced:
                fits = max((at for at in batches if known[at] <= self.room.limit), default=0)
                if batch > fits * (1 + self.tolerance):
                    return batch
                batch = fits
        self._settle(policy, batch)
        return None

    def candidates(self) -> list[Candidate]:
        """The best candidate of every policy that fits."""
        return [candidate for candidate in map(self.best, self.anchors) if candidate is not None]

    def beats(self, one: str, other: str) -> bool:
        """Whether policy `one` is better than `other` by the target, or needs fewer bytes if neither fits."""
        candidates = self.best(one), self.best(other)
        if candidates[0] is None or candidates[1] is None:
            at = self.batch or 1
            return candidates[1] is None and (
                candidates[0] is not None or self.reserved(one, at) < self.reserved(other, at)
            )
        return better(self.target)(candidates[0]) > better(self.target)(candidates[1])

    def smallest(self) -> Candidate:
        """The candidate with the fewest bytes at the fixed batch, or at batch size 1."""
        at = self.batch or 1
        return self.estimate(min(self.anchors, key=lambda policy: self.reserved(policy, at)), at)
