"""The search of a plan: which policies to trace, at which batch sizes, in which order.

1. The first policies: `none`, `full` and `pointwise`, each with and without `head`. They show whether the loss head
   holds the peak.
2. All other policies that suit the model, with `head` if it helps, and `offload` with the policy of the fewest bytes.
3. Splits: the first K blocks under `full`, the other blocks under nothing or `pointwise`. Bytes and seconds are
   interpolated linearly between the traced values of K. The best K is traced next, until it is one of those traced.
4. If nothing fits, or host memory is given, `swap:N` with the policy that needs the fewest bytes: the smallest N, and
   larger ones.
5. Candidates that will be shown are traced alone at their own batch sizes. If the trace differs from the estimate, the
   estimate is corrected by the ratio, and its best batch size is traced next, until it is one of those traced.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from ckpt_ft.checkpointing.blocks import Blocks, find_blocks
from ckpt_ft.checkpointing.swap import swappable
from ckpt_ft.checkpointing.towers import find_towers
from ckpt_ft.errors import UserError
from ckpt_ft.policy import LEAST_SWAPPED, Policy
from ckpt_ft.workloads.workload import Workload

from .budget import Candidate, better, frontier, seconds
from .scaled_traces import LOW, Estimates
from .tracing import trace_all

FIRST = ("none", "full", "pointwise")  # the two extremes, and the cheapest in between
_SAVE = ("save:attention", "save:attention+matmul", "save:matmul/2")
_SAVE_CONV = ("save:conv", "save:attention+matmul+conv")
_SCOPES = ("sqrt", "modules:attention", "modules:mlp")  # not every:N, because splits are finer
_FEW_STAGES = 4  # with more stages (a U-Net's) only the two halves are tried, not every cut
_RESTS = ("", "pointwise")  # policies of the blocks after the first K of a split


def blocks_of(model: nn.Module) -> Blocks:
    """The model's blocks; none if it has no repeated blocks."""
    try:
        return find_blocks(model)
    except UserError:
        return Blocks()


def other_policies(model: nn.Module) -> list[str]:
    """Every policy besides `FIRST` that could suit `model`, without head and offload."""
    blocks = blocks_of(model)
    if not blocks.blocks:
        return []
    inner = [module for block in blocks.blocks.values() for module in block.modules()]
    convolves = any(isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) for module in inner)
    found = [*_SAVE, *(_SAVE_CONV if convolves else ()), *_SCOPES]
    count = len(blocks.stages)
    if count:
        found.append("stages")
        cuts = range(1, count) if count <= _FEW_STAGES else (count // 2,)
        for cut in cuts:
            found += [f"stages:{'+'.join(map(str, part))}" for part in (range(1, cut + 1), range(cut + 1, count + 1))]
    found += ["modules:attention,pointwise", "modules:mlp,pointwise", *_by_tower(model, blocks)]
    return [str(Policy.parse(text)) for text in dict.fromkeys(found)]


def _by_tower(model: nn.Module, blocks: Blocks) -> list[str]:
    """Policies for single towers; none if only one tower keeps anything for backward."""
    towers = [
        tower.name
        for tower in find_towers(model, blocks.blocks)
        if tower.name == "language"  # the last one: it keeps activations even if its own weights are frozen
        or any(p.requires_grad for module in tower.modules.values() for p in module.parameters())
    ]
    terms = ("full@{}", "full,pointwise@{}") if len(towers) > 1 else ()
    return [term.format(tower) for tower in towers for term in terms]


def with_term(policy: str, term: str) -> str:
    """Returns `policy` with `term` ("head", "offload" or "swap:8"), in canonical form."""
    return str(Policy.parse(term if policy == "none" else f"{policy},{term}"))


def without_term(policy: str, term: str) -> str:
    """Returns `policy` without `term`, in canonical form."""
    return str(Policy.parse(",".join(part for part in policy.split(",") if part != term) or "none"))


class Split:
    """A family of policies `first:K` plus `rest`: K from 0 (all under `rest`) to the number of blocks (`full`)."""

    def __init__(self, estimates: Estimates, rest: tuple[str, ...], count: int) -> None:
        self.estimates, self.rest, self.count = estimates, rest, count
        self.nodes = [0, count]  # the values of K that were traced, in order

    def policy(self, first: int) -> str:
        """The policy with the first `first` blocks checkpointed and the others under `rest`."""
        if first == 0:
            terms: tuple[str, ...] = self.rest
        elif first >= self.count:
            terms = ("full", *(term for term in self.rest if term != "pointwise"))
        else:
            terms = (f"first:{first}", *self.rest)
        return str(Policy.parse(",".join(terms) or "none"))

    def next_policy(self) -> str | None:
        """The split to trace next; None if the best one by the present estimate was traced already."""
        first = self._best()
        if first is None or first in self.nodes:
            return None
        self.nodes = sorted([*self.nodes, first])
        return self.policy(first)

    def _best(self) -> int | None:
        """The best K at any batch size, if bytes and seconds are linear between the nodes."""
        lines = {node: _LinearInBatch.through(self.estimates, self.policy(node)) for node in self.nodes}
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
class _LinearInBatch:
    """Bytes reserved and seconds of a policy as linear functions of the batch size."""

    batch: int
    reserved: int
    seconds: float
    more_reserved: float  # per further sample
    more_seconds: float

    @classmethod
    def through(cls, estimates: Estimates, policy: str) -> _LinearInBatch:
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
    """The smallest K of `left` ... `right` that fits, if bytes are linear between the two; None if none fits."""
    if at_left <= limit:
        return left
    if at_right > limit or at_right >= at_left:
        return None
    return left + max(1, math.ceil((at_left - limit) / (at_left - at_right) * (right - left)))


_TIE = 0.01  # relative; predicted speeds this close cannot be told apart
_SHOWN = 5  # candidates that are traced alone to be shown


def search(estimates: Estimates, policies: list[str] | None = None, shown: int = _SHOWN) -> list[Candidate]:
    """At most `shown` candidates, the best and the frontier, best first, each traced; empty if nothing fits.

    Args:
        estimates: gets every trace and estimate of the search.
        policies: the policies to look at; None for all that suit the model.
    """
    if policies is not None:
        estimates.trace_candidates(policies)
    else:
        _explore(estimates)
    return _confirmed(estimates, shown)


def ends() -> list[str]:
    """The policies that a search traces first."""
    return [*FIRST, *(with_term(policy, "head") for policy in FIRST)]


def _explore(estimates: Estimates) -> None:
    trace = estimates.trace_candidates
    trace(ends())
    headed = ends()[len(FIRST) :]
    head = any(estimates.beats(headed[i], FIRST[i]) for i in range(len(headed)) if headed[i] in estimates.anchors)
    others = other_policies(estimates.tracer.workload.model)
    trace([with_term(policy, "head") for policy in others] if head else others)
    if head:  # head costs a little time: a leader with it may be faster without
        leaders = {candidate.policy for candidate in frontier(estimates.candidates())}
        trace(without_term(policy, "head") for policy in leaders)
    trace([with_term(estimates.smallest().policy, "offload")])
    _split(estimates, head)
    if estimates.room.host is not None or not estimates.candidates():
        _swap(estimates)


def blocks_to_swap(workload: Workload) -> tuple[int, int]:
    """How many blocks can keep their weights in host memory, and the mean bytes of a block's weights.

    (0, 1) if they are too few for `swap`, if the launch places the weights, or if the model is on a GPU, where a plan
    must not move the weights of a run.
    """
    sharded = workload.launch is not None and workload.launch.strategy != "ddp"
    if sharded or workload.compile or any(p.is_cuda for p in workload.model.parameters()):
        return 0, 1
    able = swappable(workload.model, blocks_of(workload.model).blocks).values()
    nbytes = sum(workload.model.get_parameter(name).nbytes for names in able for name in names)
    return (len(able), nbytes // len(able)) if len(able) >= LEAST_SWAPPED else (0, 1)


def fewest_swapped(estimates: Estimates, base: str) -> int:
    """The smallest N of `swap:N` with which `base` fits at the fixed batch, or at batch size 1; 0 if none does."""
    (count, each), limit = blocks_to_swap(estimates.tracer.workload), estimates.room.limit

    def reserved(blocks: int) -> int:
        policy = with_term(base, f"swap:{blocks}")
        estimates.trace_candidates([policy])
        return estimates.reserved(policy, estimates.batch or 1) if policy in estimates.anchors else 2**62

    if not count or (needed := reserved(count)) > limit:
        return 0
    blocks = max(count - (limit - needed) // each, LEAST_SWAPPED)
    while blocks < count and (needed := reserved(blocks)) > limit:
        blocks = min(blocks + math.ceil((needed - limit) / each), count)
    return blocks


def _swap(estimates: Estimates) -> None:
    """The policy of the fewest bytes, with the smallest N of swapped blocks that fits, with all, and in between."""
    base = without_term(estimates.smallest().policy, "offload")
    if fewest := fewest_swapped(estimates, base):
        half = (blocks_to_swap(estimates.tracer.workload)[0] + fewest) // 2
        estimates.trace_candidates([with_term(base, f"swap:{half}")])


def _split(estimates: Estimates, head: bool) -> None:
    count = len(blocks_of(estimates.tracer.workload.model).blocks)
    rests = [tuple(term for term in (rest, "head" if head else "") if term) for rest in _RESTS]
    families = [Split(estimates, rest, count) for rest in rests] if count > 1 else []
    for family in list(families):
        ends = [family.policy(end) for end in family.nodes]
        estimates.trace_candidates(ends)
        if not all(end in estimates.anchors for end in ends):
            families.remove(family)
    while families:
        wanted = {family: family.next_policy() for family in families}
        families = [family for family in families if wanted[family] is not None]
        estimates.trace_candidates(policy for policy in wanted.values() if policy is not None)


def _confirmed(estimates: Estimates, most: int) -> list[Candidate]:
    """The best candidates and the frontier, each traced alone until its best batch size is settled."""
    key = better(estimates.target)
    settled: set[str] = set()
    while True:
        candidates = sorted(estimates.candidates(), key=key, reverse=True)
        shown = list(dict.fromkeys([*candidates[:3], *frontier(candidates)]))[:most]
        open_candidates = [candidate for candidate in shown if candidate.policy not in settled]
        if not open_candidates:
            return pick_first(timed(estimates, shown), estimates.target)
        trace_final_batches([(estimates, candidate) for candidate in open_candidates])
        settled.update(candidate.policy for candidate in open_candidates)


def timed(estimates: Estimates, candidates: list[Candidate]) -> list[Candidate]:
    """Sorts `candidates`, best first; if rows differ in length, their seconds come from traced typical batches."""
    if estimates.tracer.workload.lengths is not None:
        keys = [(candidate.policy, candidate.batch) for candidate in candidates]
        for key, trace in zip(keys, estimates.tracer.trace_typical(keys), strict=True):
            estimates.typical_seconds[key] = seconds(trace)
    return sorted(
        (estimates.estimate(candidate.policy, candidate.batch) for candidate in candidates),
        key=better(estimates.target),
        reverse=True,
    )


def pick_first(candidates: list[Candidate], target: str) -> list[Candidate]:
    """For throughput, moves the candidate with the fewest bytes among those within 1 % of the fastest to the front."""
    if target != "throughput" or not candidates:
        return candidates
    fastest = max(candidate.samples_per_second for candidate in candidates)
    near = [candidate for candidate in candidates if candidate.samples_per_second >= (1 - _TIE) * fastest]
    pick = min(near, key=lambda candidate: candidate.reserved)
    return [pick, *(candidate for candidate in candidates if candidate is not pick)]


def trace_final_batches(estimated: Iterable[tuple[Estimates, Candidate]]) -> None:
    """Trace each policy alone, then at the batch size that follows from its trace, until that was traced already."""
    wanted = [(estimates, candidate.policy, candidate.batch) for estimates, candidate in estimated]
    while wanted:
        asked = [(tracer, (policy, batch)) for estimates, policy, batch in wanted for tracer in estimates.tracers]
        trace_all([(tracer, [key]) for tracer, key in asked], alone=True)
        for estimates, policy, batch in wanted:
            if estimates.room.fits(estimates.estimate(policy, batch)):
                estimates.tracer.fits.append(f"batch {batch} under {policy} fits; ")
        wanted = [
            (estimates, policy, following)
            for estimates, policy, batch in wanted
            if (following := estimates.following(policy, batch)) is not None
        ]
