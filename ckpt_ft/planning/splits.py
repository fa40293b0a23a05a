"""Splits: the first K blocks `full`, the rest as they are or `pointwise`, and which K to trace next."""

from __future__ import annotations

import math
from dataclasses import dataclass

from . import proposals
from .candidate import Candidate, better
from .estimates import LOW, Estimates


class Split:
    """A family of policies `first:K` plus `rest`: K from 0 (all under `rest`) to the number of blocks (`full`)."""

    def __init__(self, estimates: Estimates, rest: tuple[str, ...], count: int) -> None:
        self.estimates, self.rest, self.count = estimates, rest, count
        self.nodes = [0, count]  # the K that have been traced, in order

    def policy(self, first: int) -> str:
        return proposals.split(first, self.count, self.rest)

    def ends_are_known(self) -> bool:
        self.estimates.consider([self.policy(0), self.policy(self.count)])
        return all(self.policy(end) in self.estimates.anchors for end in self.nodes)

    def next_policy(self) -> str | None:
        """The split to trace next, None when the best one under the present estimate has been traced already."""
        first = self._best()
        if first is None or first in self.nodes:
            return None
        self.nodes = sorted([*self.nodes, first])
        return self.policy(first)

    def _best(self) -> int | None:
        """The K, at whichever batch size, that is best when bytes and seconds are linear between the nodes."""
        lines = {node: _Line.through(self.estimates, self.policy(node)) for node in self.nodes}
        found: list[tuple[tuple[float, ...], int]] = []
        key = better(self.estimates.target)
        batches = [self.estimates.batch] if self.estimates.batch else range(1, self.estimates.most + 1)
        for batch in batches:
            for left, right in zip(self.nodes, self.nodes[1:], strict=False):
                ends = lines[left].at(batch), lines[right].at(batch)
                first = _crossing(left, right, ends[0][0], ends[1][0], self.estimates.room.limit)
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
    def through(cls, estimates: Estimates, policy: str) -> _Line:
        if estimates.batch:
            candidate = estimates.estimate(policy, estimates.batch)
            return cls(estimates.batch, candidate.reserved, candidate.seconds, 0.0, 0.0)
        low, best = estimates.estimate(policy, LOW), estimates.best(policy)
        high = best if best is not None and best.batch > 2 * LOW else estimates.estimate(policy, 2 * LOW)
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
