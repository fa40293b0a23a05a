"""Estimates of bytes and seconds of every policy at any batch size, from the traces that a search has made so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from ckpt_ft.memory.record.trace import StepTrace

from .budget import MemoryBudget, largest_fitting
from .candidate import Candidate, better
from .scaling import Growth
from .tracing import Tracer

_SHOWN = 4  # number of listed candidates that do not fit
LOW, HIGH = 5, 7  # batch sizes of the traces that growth is learned from; odd, so that sizes rarely coincide


@dataclass
class Estimates:
    """The candidates of one plan.

    Attributes:
        batch: the only batch size to look at; None for all sizes up to `most`.
        anchors: the trace of each policy at `batch`, or at `LOW`.
        rejected: policies that do not suit this model, each with the reason.
        scaled: candidates that were estimated from an anchor instead of traced.
        bests: the best candidate of each policy; None if none fits.
        typical_seconds: seconds of a step on a typical batch, if the rows of the dataset differ in length.
    """

    tracer: Tracer
    room: MemoryBudget
    target: str = "throughput"
    batch: int | None = None
    most: int = 1024
    growth: Growth = field(default_factory=lambda: Growth(LOW, HIGH))
    anchors: dict[str, StepTrace] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    scaled: dict[tuple[str, int], Candidate] = field(default_factory=dict)
    bests: dict[str, Candidate | None] = field(default_factory=dict)
    typical_seconds: dict[tuple[str, int], float] = field(default_factory=dict)
    _peaks: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    _floors: dict[tuple[str, int], int] = field(default_factory=dict)

    def trace_candidates(self, policies: Iterable[str]) -> None:
        """Trace the anchors of `policies`, and a second point of policies whose growth with the batch is unknown."""
        fresh = [p for p in dict.fromkeys(policies) if p not in self.anchors and p not in self.rejected]
        at = self.batch or LOW
        extra: list[tuple[str, int]] = []
        if self.batch is None and self.tracer.parallel:  # in parallel these traces cost no waiting time
            extra = [(policy, HIGH) for policy in self._novel(fresh)]
        traced = self.tracer.all([(policy, at) for policy in fresh], extra=extra)
        for policy, trace in zip(fresh, traced, strict=True):
            if isinstance(trace, str):
                self.rejected[policy] = trace
            else:
                self.anchors[policy] = trace
        if self.batch is None:
            self._learn([policy for policy in fresh if policy in self.anchors])

    def absorb_cached_traces(self) -> None:
        """Use the traces that were made before `trace_candidates` was interrupted."""
        traced = {key: trace for key, trace in self.tracer.traced.items() if isinstance(trace, StepTrace)}
        for (policy, batch), trace in traced.items():
            if batch == (self.batch or LOW):
                self.anchors.setdefault(policy, trace)
        for policy, anchor in self.anchors.items():
            large = traced.get((policy, HIGH))
            if self.batch is None and large is not None and not self.growth.knows(anchor):
                self.growth.learn(anchor, large)

    def _novel(self, policies: list[str]) -> list[str]:
        """The shortest policy of each kind that no anchor has yet; kinds differ in `head` and `offload`."""
        kinds = {frozenset(policy.split(",")) & {"head", "offload"} for policy in self.anchors}
        plainest: dict[frozenset[str], str] = {}
        for policy in sorted(policies, key=len):
            plainest.setdefault(frozenset(policy.split(",")) & {"head", "offload"}, policy)
        return [policy for kind, policy in plainest.items() if kind not in kinds]

    def _learn(self, policies: list[str]) -> None:
        for policy in policies:  # in order, because a trace may make later ones unnecessary
            if not self.growth.knows(self.anchors[policy]):
                self._learn_from(policy)

    def _learn_from(self, policy: str) -> None:
        large = self.tracer.trace(policy, HIGH)
        assert not isinstance(large, str), "it was traced at LOW"
        self.growth.learn(self.anchors[policy], large)

    def estimate(self, policy: str, batch: int) -> Candidate:
        """The candidate of `policy` at `batch`: from its trace if there is one, else scaled from the anchor."""
        traced = self.tracer.traced.get((policy, batch))
        if isinstance(traced, StepTrace):
            return self._candidate(policy, batch, traced)
        key = (policy, batch)
        if key not in self.scaled:
            scaled = replace(self.anchors[policy], ops=self.growth.ops(self.anchors[policy], batch))
            self.scaled[key] = self._candidate(policy, batch, scaled, self._scaled_peaks(policy, batch))
        return self.scaled[key]

    def over_budget(self) -> list[Candidate]:
        """For each policy that was traced over budget, the smallest such step, sorted by bytes."""
        over: dict[str, Candidate] = {}
        for (policy, batch), trace in sorted(self.tracer.traced.items()):
            if isinstance(trace, StepTrace) and trace.peak_reserved > self.room.limit:
                over.setdefault(policy, self.estimate(policy, batch))
        return sorted(over.values(), key=lambda candidate: candidate.reserved)[:_SHOWN]

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
        """Bytes reserved, scaled from the anchor even if `policy` was traced at `batch`."""
        return self._scaled_peaks(policy, batch)[1]

    def floor(self, policy: str, batch: int) -> int:
        """A lower bound of `scaled_reserved` that needs no replay."""
        key = (policy, batch)
        if key not in self._floors:
            anchor = self.anchors[policy]
            self._floors[key] = anchor.requested_with(self.growth.sizes(anchor, batch))
        return self._floors[key]

    def _scaled_peaks(self, policy: str, batch: int) -> tuple[int, int]:
        """Peak bytes allocated and reserved, from one replay of the scaled anchor."""
        key = (policy, batch)
        if key not in self._peaks:
            anchor = self.anchors[policy]
            replay = anchor.replay_with(self.growth.sizes(anchor, batch))
            self._peaks[key] = replay.peak_allocated(anchor.start), replay.peak_reserved()
        return self._peaks[key]

    def retries(self, policy: str, batch: int) -> int | None:
        """How often a step returns cached segments to the device to fit; None if it runs out of memory even so."""
        trace = self.anchors[policy]
        replay = trace.replay_with(self.growth.sizes(trace, batch), self.room.limit)
        return None if replay.oom_at is not None else sum(at >= trace.start for at in replay.retried)

    def best(self, policy: str) -> Candidate | None:
        """The candidate of `policy` at the largest batch that fits, or at batch 1 for the target "memory"."""
        if policy not in self.bests:
            self.bests[policy] = self._best(policy)
        return self.bests[policy]

    def _best(self, policy: str) -> Candidate | None:
        batch = self.batch or 1
        if self.batch is None and self.target != "memory":
            batch = self._largest(policy, LOW, lambda n: self.reserved(policy, n), {LOW: self.reserved(policy, LOW)})
        candidate = self.estimate(policy, max(batch, 1))
        return candidate if self.room.fits(candidate) else None

    def _largest(
        self, policy: str, near: int, reserved: Callable[[int], int], known: dict[int, int], ratio: float = 1.0
    ) -> int:
        """The largest batch whose `reserved` bytes fit.

        `floor` needs no replay. The ratio of bytes reserved to the floor is about the same at every batch as at
        `near`: it gives the first guess. A batch whose floor is over the limit needs no replay at all.

        Args:
            known: values of `reserved` that are known already.
            ratio: of `reserved` to `scaled_reserved`.
        """
        limit, share = self.room.limit, reserved(near) / max(self.floor(policy, near), 1)
        guess = largest_fitting(lambda n: round(self.floor(policy, n) * share), limit, self.most)
        if guess and guess not in known:
            known[guess] = reserved(guess)

        def needs(batch: int) -> int:
            least = self.floor(policy, batch)
            return round(least * max(share, ratio)) if least * ratio > limit else reserved(batch)

        return largest_fitting(needs, limit, self.most, known)

    def following(self, policy: str, batch: int) -> int | None:
        """The batch size to trace after `batch`; None if the best batch of `policy` is known, which is then stored."""
        if self.batch is None and self.target != "memory":
            ratio = self.estimate(policy, batch).reserved / self.scaled_reserved(policy, batch)
            known = {at: self.estimate(policy, at).reserved for at in self._traced_batches(policy)}
            batch = self._largest(
                policy, batch, lambda n: round(self.scaled_reserved(policy, n) * ratio), known, ratio
            )
            if batch and (policy, batch) not in self.tracer.traced:
                return batch
        candidate = self.estimate(policy, max(batch, 1))
        self.bests[policy] = candidate if self.room.fits(candidate) else None
        return None

    def _traced_batches(self, policy: str) -> list[int]:
        """Batch sizes at which `policy` was traced, without the two that growth is learned from."""
        return [batch for name, batch in self.tracer.traced if name == policy and batch not in (LOW, HIGH)]

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

    def leanest(self) -> Candidate:
        """The candidate with the fewest bytes at the fixed batch, or at batch size 1."""
        at = self.batch or 1

        def least(policy: str) -> int:
            return self.reserved(policy, at) if (policy, at) in self.tracer.traced else self.floor(policy, at)

        found: dict[str, int] = {}
        for policy in sorted(self.anchors, key=least):
            if found and least(policy) > min(found.values()):
                break
            found[policy] = self.reserved(policy, at)
        return self.estimate(min(filter(found.__contains__, self.anchors), key=found.__getitem__), at)
