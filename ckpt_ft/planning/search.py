"""The search of a plan: which policies to trace, at which batch sizes, in which order.

1. The ends: `none`, `full`, `pointwise`, each with and without `head`, say whether the head is what holds the peak.
2. Every other policy, and what of it pays: offload of the leanest.
3. Splits: the first K blocks `full`, the rest as they are or `pointwise`. Between the values of K traced so far bytes
   and seconds are taken to be linear; the best K under that is traced next, until it is one that has been.
4. What is to be shown is traced on its own at the batch size that it is shown for. Where that refutes the estimate,
   the estimate is corrected by as much and the batch size that follows is traced, until it is one that has been.
"""

from __future__ import annotations

from collections.abc import Iterable

from . import proposals
from .candidate import Candidate, better, frontier, seconds
from .estimates import Estimates
from .splits import Split
from .tracing import trace_all

_TIE = 0.01
_SHOWN = 5  # candidates beside the pick that are worth a trace each
_OFFLOADED, _SPLITS = 1, 4  # traces that these take, mostly


def search(estimates: Estimates, policies: list[str] | None = None, shown: int = _SHOWN) -> list[Candidate]:
    """Candidates of the frontier and next to it, best first, each traced; empty where nothing fits.

    What is found out on the way stays in `estimates`.

    policies: those to look at; None for all that suit the model.
    shown: at most so many candidates.
    """
    if policies is not None:
        estimates.consider(policies)
    else:
        estimates.tracer.expected = _about(estimates, shown)
        _explore(estimates)
    return _confirmed(estimates, shown)


def ends() -> list[str]:
    """The policies that a search begins with."""
    return [*proposals.FIRST, *(proposals.with_term(policy, "head") for policy in proposals.FIRST)]


def _about(estimates: Estimates, shown: int) -> int:
    """How many traces a search takes, about."""
    others = len(proposals.others(estimates.tracer.workload.model))
    grown = 3 if estimates.batch is None else 0  # second points: of the plain model, the head, offload
    return len(ends()) + others + grown + _OFFLOADED + _SPLITS * bool(others) + shown


def _explore(estimates: Estimates) -> None:
    estimates.consider(ends())
    headed = ends()[len(proposals.FIRST) :]
    head = any(
        estimates.beats(headed[i], proposals.FIRST[i]) for i in range(len(headed)) if headed[i] in estimates.anchors
    )
    others = proposals.others(estimates.tracer.workload.model)
    estimates.consider([proposals.with_term(policy, "head") for policy in others] if head else others)
    if head:  # the head costs a little time: what leads with it may lead without
        leaders = {candidate.policy for candidate in frontier(estimates.candidates())}
        estimates.consider(proposals.without_term(policy, "head") for policy in leaders)
    estimates.consider([proposals.with_term(estimates.leanest().policy, "offload")])
    _split(estimates, head)


def _split(estimates: Estimates, head: bool) -> None:
    count = len(proposals.blocks_of(estimates.tracer.workload.model).blocks)
    families = [Split(estimates, rest, count) for rest in proposals.splits(head)] if count > 1 else []
    families = [family for family in families if family.ends_are_known()]
    while families:
        wanted = {family: family.next_policy() for family in families}
        families = [family for family in families if wanted[family] is not None]
        estimates.consider(policy for policy in wanted.values() if policy is not None)


def _confirmed(estimates: Estimates, most: int) -> list[Candidate]:
    """The frontier and its neighbours, traced; estimates that a trace refutes are corrected on the way."""
    key = better(estimates.target)
    settled: set[str] = set()
    while True:
        candidates = sorted(estimates.candidates(), key=key, reverse=True)
        shown = list(dict.fromkeys([*candidates[:3], *frontier(candidates)]))[:most]
        open_candidates = [candidate for candidate in shown if candidate.policy not in settled]
        if not open_candidates:
            return pick_first(timed(estimates, shown), estimates.target)
        settle([(estimates, candidate) for candidate in open_candidates])
        settled.update(candidate.policy for candidate in open_candidates)


def so_far(estimates: Estimates, shown: int = _SHOWN) -> list[Candidate]:
    """What a search that was stopped would have shown next, best first: estimated where it was not traced."""
    estimates.take_in()
    key = better(estimates.target)
    known = [p for p, trace in estimates.anchors.items() if estimates.batch or estimates.growth.knows(trace)]
    candidates = sorted(filter(None, map(estimates.best, known)), key=key, reverse=True)
    return pick_first(list(dict.fromkeys([*candidates[:3], *frontier(candidates)]))[:shown], estimates.target)


def timed(estimates: Estimates, candidates: list[Candidate]) -> list[Candidate]:
    """`candidates`, best first; where batches differ in length, by traces of usual ones."""
    if estimates.tracer.workload.lengths is not None:
        keys = [(candidate.policy, candidate.batch) for candidate in candidates]
        for key, trace in zip(keys, estimates.tracer.usual(keys), strict=True):
            estimates.usual[key] = seconds(trace)
    return sorted(
        (estimates.estimate(candidate.policy, candidate.batch) for candidate in candidates),
        key=better(estimates.target),
        reverse=True,
    )


def pick_first(candidates: list[Candidate], target: str) -> list[Candidate]:
    """Of those within 1 % of the fastest, which no prediction can tell apart, the one of fewest bytes leads."""
    if target != "throughput" or not candidates:
        return candidates
    fastest = max(candidate.samples_per_second for candidate in candidates)
    near = [candidate for candidate in candidates if candidate.samples_per_second >= (1 - _TIE) * fastest]
    pick = min(near, key=lambda candidate: candidate.reserved)
    return [pick, *(candidate for candidate in candidates if candidate is not pick)]


def settle(estimated: Iterable[tuple[Estimates, Candidate]]) -> None:
    """Trace each of these policies alone, at the batch size that follows from its trace, until that is traced."""
    wanted = [(estimates, candidate.policy, candidate.batch) for estimates, candidate in estimated]
    while wanted:
        trace_all([(estimates.tracer, [(policy, batch)]) for estimates, policy, batch in wanted], alone=True)
        wanted = [
            (estimates, policy, following)
            for estimates, policy, batch in wanted
            if (following := estimates.following(policy, batch)) is not None
        ]
