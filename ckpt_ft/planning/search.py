"""The search of a plan: which policies to trace, at which batch sizes, in which order.

1. The ends: `none`, `full`, `pointwise`, each with and without `head`, say whether the head is what holds the peak.
2. Every other policy, and what of it pays: offload of the leanest.
3. Splits: the first K blocks `full`, the rest as they are or `pointwise`. Between the values of K traced so far bytes
   and seconds are taken to be linear; the best K under that is traced next, until it is one that has been.
4. What is to be shown is traced on its own at the batch size that it is shown for. Where that refutes the estimate,
   the estimate is corrected by as much and the batch size that follows is traced, until it is one that has been.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ckpt_ft.memory.record.trace import StepTrace

from . import proposals
from .candidate import Candidate, better, frontier, seconds
from .fitting import Room, largest_fitting
from .scaling import Growth
from .tracing import Tracer

LOW, HIGH = 5, 7  # batch sizes of the traces that growth is learned from; odd, so that sizes rarely coincide
_TIE = 0.01
_SHOWN = 5  # candidates beside the pick that are worth a trace each


@dataclass
class Search:
    """One search. `batch` fixes the batch size; without it sizes up to `most` are looked at."""

    tracer: Tracer
    room: Room
    target: str = "throughput"
    batch: int | None = None
    most: int = 1024
    growth: Growth = field(default_factory=lambda: Growth(LOW, HIGH))
    anchors: dict[str, StepTrace] = field(default_factory=dict)  # policy -> its trace at the fixed batch or at LOW
    rejected: dict[str, str] = field(default_factory=dict)  # policy -> why it is no candidate
    estimates: dict[tuple[str, int], Candidate] = field(default_factory=dict)
    bests: dict[str, Candidate | None] = field(default_factory=dict)
    usual: dict[tuple[str, int], float] = field(default_factory=dict)  # seconds of a usual batch, where rows differ

    def run(self, policies: list[str] | None = None) -> list[Candidate]:
        """Candidates of the frontier and next to it, best first, each traced; empty where nothing fits."""
        if policies is not None:
            self.consider(policies)
        else:
            self._explore()
        return self._confirmed()

    def _explore(self) -> None:
        headed = [proposals.with_term(policy, "head") for policy in proposals.FIRST]
        self.consider([*proposals.FIRST, *headed])
        head = any(self._beats(headed[i], proposals.FIRST[i]) for i in range(len(headed)) if headed[i] in self.anchors)
        others = proposals.others(self.tracer.workload.model)
        self.consider([proposals.with_term(policy, "head") for policy in others] if head else others)
        if head:  # the head costs a little time: what leads with it may lead without
            leaders = {candidate.policy for candidate in frontier(self._candidates())}
            self.consider(proposals.without_term(policy, "head") for policy in leaders)
        self.consider(proposals.with_term(candidate.policy, "offload") for candidate in self._leanest(1))
        self._split(head)

    # -- estimates --------------------------------------------------------------------------------------------------

    def consider(self, policies: Iterable[str]) -> None:
        """Trace the anchors of `policies`, and of those that grow in unknown ways a second point."""
        fresh = [p for p in dict.fromkeys(policies) if p not in self.anchors and p not in self.rejected]
        at = self.batch or LOW
        points = [(policy, at) for policy in fresh]
        if self.batch is None and self.tracer.parallel:  # traced beside the others, what must be learned costs no wait
            points += [(policy, HIGH) for policy in self._novel(fresh)]
        traced = self.tracer.all(points)
        for policy, trace in zip(fresh, traced, strict=False):
            if isinstance(trace, str):
                self.rejected[policy] = trace
            else:
                self.anchors[policy] = trace
        if self.batch is None:
            self._learn([policy for policy in fresh if policy in self.anchors])

    def _novel(self, policies: list[str]) -> list[str]:
        """Of `policies` the plainest that runs ops of its own: the model's, the head's, the copies of offload."""
        kinds = {frozenset(policy.split(",")) & {"head", "offload"} for policy in self.anchors}
        plainest: dict[frozenset[str], str] = {}
        for policy in sorted(policies, key=len):
            plainest.setdefault(frozenset(policy.split(",")) & {"head", "offload"}, policy)
        return [policy for kind, policy in plainest.items() if kind not in kinds]

    def _learn(self, policies: list[str]) -> None:
        for policy in policies:  # one after another: what one teaches, the next need not
            if not self.growth.knows(self.anchors[policy]):
                self._learn_from(policy)

    def _learn_from(self, policy: str) -> None:
        large = self.tracer.trace(policy, HIGH)
        assert not isinstance(large, str), "its trace at LOW was made"
        self.growth.learn(self.anchors[policy], large)

    def estimate(self, policy: str, batch: int) -> Candidate:
        """The candidate of `policy` at `batch`: traced if it was, else scaled from its anchor."""
        traced = self.tracer.traced.get((policy, batch))
        if isinstance(traced, StepTrace):
            return self._candidate(policy, batch, traced)
        key = (policy, batch)
        if key not in self.estimates:
            self.estimates[key] = self._candidate(policy, batch, self.growth.scale(self.anchors[policy], batch))
        return self.estimates[key]

    def _candidate(self, policy: str, batch: int, trace: StepTrace) -> Candidate:
        """The candidate of a trace, which is of the longest batch; the seconds are a usual one's."""
        workload = self.tracer.workload
        candidate = Candidate.of(policy, batch, trace, workload.accumulation)
        lengths = workload.lengths
        if lengths is None:
            return candidate
        by_tokens = candidate.seconds * lengths.padded(batch) / lengths.longest
        return replace(candidate, seconds=self.usual.get((policy, batch), by_tokens))

    def reserved(self, policy: str, batch: int) -> int:
        """Bytes reserved, estimated."""
        if (policy, batch) in self.tracer.traced or (policy, batch) in self.estimates:
            return self.estimate(policy, batch).reserved
        return self._scaled_reserved(policy, batch)

    def best(self, policy: str) -> Candidate | None:
        """The largest batch of `policy` that fits, as a candidate; the smallest there is for the target "memory"."""
        if policy not in self.bests:
            self.bests[policy] = self._best(policy)
        return self.bests[policy]

    def _best(self, policy: str) -> Candidate | None:
        batch = self.batch or 1
        if self.batch is None and self.target != "memory":
            known = {LOW: self.anchors[policy].peak_reserved}
            batch = largest_fitting(lambda n: self.reserved(policy, n), self.room.limit, self.most, known)
        candidate = self.estimate(policy, max(batch, 1))
        return candidate if self.room.fits(candidate) else None

    def _candidates(self) -> list[Candidate]:
        return [candidate for candidate in map(self.best, self.anchors) if candidate is not None]

    def _beats(self, one: str, other: str) -> bool:
        """Whether `one` is better than `other` by the target, or needs less where neither fits."""
        candidates = self.best(one), self.best(other)
        if candidates[0] is None or candidates[1] is None:
            at = self.batch or 1
            return candidates[1] is None and (
                candidates[0] is not None or self.reserved(one, at) < self.reserved(other, at)
            )
        return better(self.target)(candidates[0]) > better(self.target)(candidates[1])

    def _leanest(self, n: int) -> list[Candidate]:
        at = self.batch or 1
        lean = sorted(self.anchors, key=lambda policy: self.reserved(policy, at))
        return [self.estimate(policy, at) for policy in lean[:n]]

    # -- splits -----------------------------------------------------------------------------------------------------

    def _split(self, head: bool) -> None:
        count = len(proposals.blocks_of(self.tracer.workload.model).blocks)
        families = [Split(self, rest, count) for rest in proposals.splits(head)] if count > 1 else []
        families = [family for family in families if family.ends_are_known()]
        while families:
            wanted = {family: family.next_policy() for family in families}
            families = [family for family in families if wanted[family] is not None]
            self.consider(policy for policy in wanted.values() if policy is not None)

    # -- what is shown ----------------------------------------------------------------------------------------------

    def _confirmed(self) -> list[Candidate]:
        """The frontier and its neighbours, traced; estimates that a trace refutes are corrected on the way."""
        key = better(self.target)
        settled: set[str] = set()
        while True:
            candidates = sorted(self._candidates(), key=key, reverse=True)
            shown = list(dict.fromkeys([*candidates[:3], *frontier(candidates)]))[:_SHOWN]
            open_candidates = [candidate for candidate in shown if candidate.policy not in settled]
            if not open_candidates:
                return self._pick_first(self._timed(shown))
            self._settle(open_candidates)
            settled.update(candidate.policy for candidate in open_candidates)

    def _timed(self, candidates: list[Candidate]) -> list[Candidate]:
        """`candidates`, best first; where batches differ in length, by traces of usual ones."""
        if self.tracer.workload.lengths is not None:
            keys = [(candidate.policy, candidate.batch) for candidate in candidates]
            for key, trace in zip(keys, self.tracer.usual(keys), strict=True):
                self.usual[key] = seconds(trace)
        return sorted(
            (self.estimate(candidate.policy, candidate.batch) for candidate in candidates),
            key=better(self.target),
            reverse=True,
        )

    def _pick_first(self, candidates: list[Candidate]) -> list[Candidate]:
        """Of those within 1 % of the fastest, which no prediction can tell apart, the one of fewest bytes leads."""
        if self.target != "throughput" or not candidates:
            return candidates
        fastest = max(candidate.samples_per_second for candidate in candidates)
        near = [candidate for candidate in candidates if candidate.samples_per_second >= (1 - _TIE) * fastest]
        pick = min(near, key=lambda candidate: candidate.reserved)
        return [pick, *(candidate for candidate in candidates if candidate is not pick)]

    def _settle(self, estimated: list[Candidate]) -> None:
        """Trace each of these policies alone, at the batch size that follows from its trace, until that is traced."""
        wanted = {candidate.policy: candidate.batch for candidate in estimated}
        while wanted:
            self.tracer.all(wanted.items(), alone=True)
            wanted = {
                policy: following
                for policy, batch in wanted.items()
                if (following := self._following(policy, batch)) is not None
            }

    def _following(self, policy: str, batch: int) -> int | None:
        """The batch size to trace next, after `batch`; None where the best of `policy` is settled, and set."""
        if self.batch is None and self.target != "memory":
            ratio = self.estimate(policy, batch).reserved / self._scaled_reserved(policy, batch)
            known = {at: self.estimate(policy, at).reserved for at in self._traced_batches(policy)}
            batch = largest_fitting(
                lambda n: round(self._scaled_reserved(policy, n) * ratio), self.room.limit, self.most, known
            )
            if batch and (policy, batch) not in self.tracer.traced:
                return batch
        candidate = self.estimate(policy, max(batch, 1))
        self.bests[policy] = candidate if self.room.fits(candidate) else None
        return None

    def _scaled_reserved(self, policy: str, batch: int) -> int:
        return self.growth.scale(self.anchors[policy], batch, ops=False).peak_reserved

    def _traced_batches(self, policy: str) -> list[int]:
        """Batch sizes at which `policy` was traced on its own; those that it was estimated from are left out."""
        return [batch for name, batch in self.tracer.traced if name == policy and batch not in (LOW, HIGH)]


class Split:
    """A family of policies `first:K` plus `rest`: K from 0 (all under `rest`) to the number of blocks (`full`)."""

    def __init__(self, search: Search, rest: tuple[str, ...], count: int) -> None:
        self.search, self.rest, self.count = search, rest, count
        self.nodes = [0, count]  # the K that have been traced, in order

    def policy(self, first: int) -> str:
        return proposals.split(first, self.count, self.rest)

    def ends_are_known(self) -> bool:
        self.search.consider([self.policy(0), self.policy(self.count)])
        return all(self.policy(end) in self.search.anchors for end in self.nodes)

    def next_policy(self) -> str | None:
        """The split to trace next, None when the best one under the present estimate has been traced already."""
        first = self._best()
        if first is None or first in self.nodes:
            return None
        self.nodes = sorted([*self.nodes, first])
        return self.policy(first)

    def _best(self) -> int | None:
        """The K, at whichever batch size, that is best when bytes and seconds are linear between the nodes."""
        lines = {node: _Line.through(self.search, self.policy(node)) for node in self.nodes}
        found: list[tuple[tuple[float, ...], int]] = []
        key = better(self.search.target)
        batches = [self.search.batch] if self.search.batch else range(1, self.search.most + 1)
        for batch in batches:
            for left, right in zip(self.nodes, self.nodes[1:], strict=False):
                ends = lines[left].at(batch), lines[right].at(batch)
                first = _crossing(left, right, ends[0][0], ends[1][0], self.search.room.limit)
                if first is not None:
                    share = (first - left) / (right - left)
                    reserved, seconds = (a + share * (b - a) for a, b in zip(*ends, strict=True))
                    found.append((key(Candidate("", batch, 0, int(reserved), seconds)), first))
        return max(found, key=lambda entry: (entry[0], -entry[1]))[1] if found else None


@dataclass(frozen=True)
class _Line:
    """Bytes reserved and seconds of a policy, linear in the batch size."""

    batch: int
    reserved: int
    seconds: float
    more_reserved: float  # for each further sample
    more_seconds: float

    @classmethod
    def through(cls, search: Search, policy: str) -> _Line:
        if search.batch:
            candidate = search.estimate(policy, search.batch)
            return cls(search.batch, candidate.reserved, candidate.seconds, 0.0, 0.0)
        low, best = search.estimate(policy, LOW), search.best(policy)
        high = best if best is not None and best.batch > 2 * LOW else search.estimate(policy, 2 * LOW)
        span = high.batch - LOW
        return cls(
            LOW, low.reserved, low.seconds, (high.reserved - low.reserved) / span, (high.seconds - low.seconds) / span
        )

    def at(self, batch: int) -> tuple[float, float]:
        more = batch - self.batch
        seconds = self.seconds + more * self.more_seconds
        return self.reserved + more * self.more_reserved, max(seconds, self.seconds * batch / self.batch / 10)


def _crossing(left: int, right: int, at_left: float, at_right: float, limit: int) -> int | None:
    """The smallest K of `left` ... `right` that fits when bytes go linearly from one end to the other."""
    if at_left <= limit:
        return left
    if at_right > limit or at_right >= at_left:
        return None
    return left + max(1, math.ceil((at_left - limit) / (at_left - at_right) * (right - left)))
