"""What a search knows: the traces made so far, and from them every policy's bytes and seconds at any batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from ckpt_ft.memory.record.trace import StepTrace

from .budget import MemoryBudget, largest_fitting
from .candidate import Candidate, better
from .scaling import Growth
from .tracing import Tracer

_SHOWN = 4  # of what does not fit
LOW, HIGH = 5, 7  # batch sizes of the traces that growth is learned from; odd, so that sizes rarely coincide


@dataclass
class Estimates:
    """Candidates of one plan. `batch` fixes the batch size; without it sizes up to `most` are looked at."""

    tracer: Tracer
    room: MemoryBudget
    target: str = "throughput"
    batch: int | None = None
    most: int = 1024
    growth: Growth = field(default_factory=lambda: Growth(LOW, HIGH))
    anchors: dict[str, StepTrace] = field(default_factory=dict)  # policy -> its trace at the fixed batch or at LOW
    rejected: dict[str, str] = field(default_factory=dict)  # policy -> why it is no candidate
    scaled: dict[tuple[str, int], Candidate] = field(default_factory=dict)  # from anchors, where nothing was traced
    bests: dict[str, Candidate | None] = field(default_factory=dict)
    typical_seconds: dict[tuple[str, int], float] = field(default_factory=dict)  # of a typical batch, if rows differ
    _peaks: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)  # by `_scaled_peaks`
    _floors: dict[tuple[str, int], int] = field(default_factory=dict)  # by `floor`

    def trace_candidates(self, policies: Iterable[str]) -> None:
        """Trace the anchors of `policies`, and of those that grow in unknown ways a second point."""
        fresh = [p for p in dict.fromkeys(policies) if p not in self.anchors and p not in self.rejected]
        at = self.batch or LOW
        extra: list[tuple[str, int]] = []
        if self.batch is None and self.tracer.parallel:  # traced beside the others, what must be learned costs no wait
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
        """Take what was traced for an anchor where `consider` was stopped before it could."""
        traced = {key: trace for key, trace in self.tracer.traced.items() if isinstance(trace, StepTrace)}
        for (policy, batch), trace in traced.items():
            if batch == (self.batch or LOW):
                self.anchors.setdefault(policy, trace)
        for policy, anchor in self.anchors.items():
            large = traced.get((policy, HIGH))
            if self.batch is None and large is not None and not self.growth.knows(anchor):
                self.growth.learn(anchor, large)

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
        if key not in self.scaled:
            scaled = replace(self.anchors[policy], ops=self.growth.ops(self.anchors[policy], batch))
            self.scaled[key] = self._candidate(policy, batch, scaled, self._scaled_peaks(policy, batch))
        return self.scaled[key]

    def over_budget(self) -> list[Candidate]:
        """Of each policy that was traced and found to hold more than the room, the smallest step that does."""
        over: dict[str, Candidate] = {}
        for (policy, batch), trace in sorted(self.tracer.traced.items()):
            if isinstance(trace, StepTrace) and trace.peak_reserved > self.room.limit:
                over.setdefault(policy, self.estimate(policy, batch))
        return sorted(over.values(), key=lambda candidate: candidate.reserved)[:_SHOWN]

    def _candidate(self, policy: str, batch: int, trace: StepTrace, peaks: tuple[int, int] | None = None) -> Candidate:
        """The candidate of a trace, which is of the longest batch; the seconds are a usual one's."""
        workload = self.tracer.workload
        candidate = Candidate.of(policy, batch, trace, workload.accumulation, peaks)
        lengths = workload.lengths
        if lengths is None:
            return candidate
        by_tokens = candidate.seconds * lengths.padded(batch) / lengths.longest
        return replace(candidate, seconds=self.typical_seconds.get((policy, batch), by_tokens))

    def reserved(self, policy: str, batch: int) -> int:
        """Bytes reserved, estimated."""
        if (policy, batch) in self.tracer.traced or (policy, batch) in self.scaled:
            return self.estimate(policy, batch).reserved
        return self.scaled_reserved(policy, batch)

    def scaled_reserved(self, policy: str, batch: int) -> int:
        """Bytes reserved, scaled from the anchor whether `policy` was traced at `batch` or not."""
        return self._scaled_peaks(policy, batch)[1]

    def floor(self, policy: str, batch: int) -> int:
        """Bytes below which `scaled_reserved` cannot be, without a replay."""
        key = (policy, batch)
        if key not in self._floors:
            anchor = self.anchors[policy]
            self._floors[key] = anchor.requested_with(self.growth.sizes(anchor, batch))
        return self._floors[key]

    def _scaled_peaks(self, policy: str, batch: int) -> tuple[int, int]:
        """Bytes allocated and reserved: a replay serves the search for a batch size and the candidate found."""
        key = (policy, batch)
        if key not in self._peaks:
            anchor = self.anchors[policy]
            replay = anchor.replay_with(self.growth.sizes(anchor, batch))
            self._peaks[key] = replay.peak_allocated(anchor.start), replay.peak_reserved()
        return self._peaks[key]

    def retries(self, policy: str, batch: int) -> int | None:
        """How often a step gives cached segments back to stay within the room; None where it runs out even so."""
        trace = self.anchors[policy]
        replay = trace.replay_with(self.growth.sizes(trace, batch), self.room.limit)
        return None if replay.oom_at is not None else sum(at >= trace.start for at in replay.retried)

    def best(self, policy: str) -> Candidate | None:
        """The largest batch of `policy` that fits, as a candidate; the smallest there is for the target "memory"."""
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
        """The largest batch whose `reserved` bytes fit, `known` for some of them.

        A floor costs no replay. What is reserved is about the same share of it at any batch as at `near`, which says
        where to look first; and where the floor is more than the room, there is no need to look.

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
        """The batch size to trace next, after `batch`; None where the best of `policy` is settled, and set."""
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
        """Batch sizes at which `policy` was traced on its own; those that it was estimated from are left out."""
        return [batch for name, batch in self.tracer.traced if name == policy and batch not in (LOW, HIGH)]

    def candidates(self) -> list[Candidate]:
        """The best of every policy that fits."""
        return [candidate for candidate in map(self.best, self.anchors) if candidate is not None]

    def beats(self, one: str, other: str) -> bool:
        """Whether `one` is better than `other` by the target, or needs less where neither fits."""
        candidates = self.best(one), self.best(other)
        if candidates[0] is None or candidates[1] is None:
            at = self.batch or 1
            return candidates[1] is None and (
                candidates[0] is not None or self.reserved(one, at) < self.reserved(other, at)
            )
        return better(self.target)(candidates[0]) > better(self.target)(candidates[1])

    def leanest(self) -> Candidate:
        """The policy of fewest bytes at the fixed batch, or at batch size 1."""
        at = self.batch or 1

        def least(policy: str) -> int:
            return self.reserved(policy, at) if (policy, at) in self.tracer.traced else self.floor(policy, at)

        found: dict[str, int] = {}
        for policy in sorted(self.anchors, key=least):
            if found and least(policy) > min(found.values()):
                break
            found[policy] = self.reserved(policy, at)
        return self.estimate(min(filter(found.__contains__, self.anchors), key=found.__getitem__), at)
