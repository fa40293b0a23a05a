"""The search over several launches of one workload: the best launch, policy and batch.

A trace of one process is cheaper than one under a launch, and a policy changes both in the same way. So policies are
explored in one process. What a launch changes is learned from one candidate, probably the best one, that is traced
under the launch as well; from two, as a line through both, if FSDP2 changes the precision. Every candidate that is
shown was traced under its own launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd

from torch import nn

from ckpt_ft.errors import UserError
from ckpt_ft.memory.distributed.sequence_parallel import check, experts_of
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.spec.launch import Launch
from ckpt_ft.workloads.workload import MIXED_PRECISION

from .budget import Candidate, MemoryBudget, better, limited_by_phases
from .depth import Shallow, suits
from .scaled_traces import LOW, Estimates, with_sizes
from .search import ends, pick_first, search, timed, trace_final_batches
from .tracing import Key, Traced, Tracer, trace_all

Room = Callable[[Launch | None], MemoryBudget]  # the budget of a process under a launch; None for a single process
_SHOWN = 3  # candidates of the best launch
LONG = 2**17  # tokens of a sequence from which on most launches do not fit; looking before takes longer than it saves
SHARDED = ("parameters", "gradients", "optimizer")


# Policies for sequences that several processes share: what such lengths need.
OF_LONG = ("full,head", "full,head,offload,tile:16")


def split_by_sharing(launches: Sequence[Launch]) -> tuple[list[Launch], list[Launch]]:
    """Splits launches into those whose processes have their own samples, and those that share sequences.

    The second are tried if the first do not fit, or for the longest sequence. If all share sequences, all are first.
    """
    own = [launch for launch in launches if launch.ranks_of_a_sample == 1]
    return own or list(launches), [launch for launch in launches if own and launch.ranks_of_a_sample > 1]


def with_experts(launches: Sequence[Launch], model: nn.Module) -> list[Launch]:
    """Adds FSDP2 with the model's experts on as many GPUs of a machine as divide their number, if transformers can."""
    plain = next((launch for launch in launches if launch.strategy == "fsdp2" and launch.ranks_of_a_sample == 1), None)
    if plain is None:
        return list(launches)
    divided = replace(plain, ep=gcd(experts_of(model), plain.processes // plain.machines))
    try:
        check(model, divided)
    except UserError:
        return list(launches)
    return [*launches, divided] if divided.ep > 1 else list(launches)


def search_shared(
    tracer: Tracer, launches: Sequence[Launch], room_of: Room, target: str, batch: int | None, most: int,
    tolerance: float = 0.0, policies: Sequence[str] = OF_LONG,
) -> tuple[list[tuple[Estimates, list[Candidate]]], dict[str, str]]:  # fmt: skip
    """The candidates under each of `launches`, which share sequences, and the launches that do not suit the model.

    By default few policies are tried, those that long sequences need; under a later launch, only the best so far. Of a
    later launch, only candidates whose estimate beats all earlier ones are traced at their batch and returned. The
    figures of a deep model are extended from those of shallow ones.
    """
    found: list[tuple[Estimates, list[Candidate]]] = []
    rejected, key = {}, better(target)
    for launch in launches:
        leader = max((one for _, each in found for one in each), key=key, default=None)
        try:
            beside, room = tracer.under(launch), room_of(launch)
            limits = room, target, batch, limited_by_phases(beside.workload, room, most, batch), tolerance
            estimates = Estimates(beside, *limits)
            if all(map(suits, policies)) and (shallow := Shallow.of(beside.workload)):
                few, more = map(tracer.of, shallow.workloads)
                estimates = Extended(more, *limits, few=few, shallow=shallow)
            estimates.trace_candidates([leader.policy] if leader else policies)
            likely = [one for one in estimates.candidates() if leader is None or key(one) > key(leader)]
            trace_final_batches([(estimates, best) for best in likely])
            settled = [best for one in likely if (best := estimates.best(one.policy)) is not None]
            found.append((estimates, sorted(settled, key=key, reverse=True)))
        except UserError as error:
            rejected[str(launch)] = str(error)
    return found, rejected


@dataclass
class Launched(Estimates):
    """Estimates under the tracer's launch, derived from the estimates `alone` of one process."""

    launch: Launch = field(kw_only=True)
    alone: Estimates = field(kw_only=True)
    lines: dict[str, tuple[float, float]] = field(default_factory=dict, kw_only=True)  # start and slope, by figure
    ratios: dict[str, float] = field(default_factory=dict, kw_only=True)  # traced bytes over those of the line

    @cached_property
    def points(self) -> list[tuple[str, int]]:
        """The candidates to trace under the launch: the likely best; one of few bytes if the precision changes."""
        likely = self._probable_best()
        found = [(likely.policy, likely.batch)]
        # FSDP2 may gather the weights in another precision than most of them are stored in.
        gathered = MIXED_PRECISION.get(self.launch.mixed_precision) if self.launch.strategy == "fsdp2" else None
        sizes = [(p.nbytes, p.dtype == gathered) for p in self.tracer.workload.model.parameters()]
        if gathered is not None and sum(n for n, alike in sizes if alike) < sum(n for n, _ in sizes) / 2:
            found.insert(0, (self.alone.smallest().policy, self.batch or LOW))
        return list(dict.fromkeys(found))

    def _probable_best(self) -> Candidate:
        """Returns the best candidate of one process with its budget raised by the bytes that other ranks hold."""
        trace = next(iter(self.alone.anchors.values()))
        held = sum(trace.at_peak[category] for category in SHARDED)
        away = 0 if self.launch.strategy == "ddp" else held - held // self.launch.processes
        if not self.launch.reshard_after_forward:
            away = max(away - trace.at_peak["parameters"], 0)
        roomy = replace(self.alone, room=replace(self.room, budget=self.room.budget + away), bests={})
        return max(roomy.candidates(), key=better(self.target), default=self.alone.smallest())

    def learn(self) -> None:
        """Learn what the launch changes from the traces of `points`."""
        pairs = []
        for policy, at in self.points:
            trace = self.tracer.trace_of(policy, at)
            pairs.append((self.alone.estimate(policy, at), self._candidate(policy, at, trace)))
        for figure in ("peak", "reserved", "seconds"):
            one, under = (getattr(each, figure) for each in pairs[0])
            other, beside = (getattr(each, figure) for each in pairs[-1])
            apart = abs(other - one) > 0.05 * one
            slope = (beside - under) / (other - one) if apart else 1.0  # a shift if they are too close or the same
            self.lines[figure] = under - slope * one, slope

    def _line(self, figure: str, value: float) -> float:
        """The figure under the launch, from that of one process."""
        start, slope = self.lines[figure]
        return start + slope * value

    def trace_candidates(self, policies: Iterable[str]) -> None:
        """Trace the anchors of `policies`, in one process."""
        self.alone.trace_candidates(policies)
        self.anchors, self.rejected = self.alone.anchors, self.alone.rejected

    def _estimated(self, policy: str, batch: int) -> Candidate:
        one = self.alone.estimate(policy, batch)
        peak, reserved = (round(self._line(name, getattr(one, name))) for name in ("peak", "reserved"))
        seconds = self._line("seconds", one.seconds)
        return replace(one, peak=peak, reserved=reserved, seconds=seconds, launch=self.launch)

    def scaled_reserved(self, policy: str, batch: int) -> int:
        return round(self.ratios.get(policy, 1.0) * self._line("reserved", self.alone.reserved(policy, batch)))

    def floor(self, policy: str, batch: int) -> int:
        return round(self.ratios.get(policy, 1.0) * self._line("reserved", self.alone.floor(policy, batch)))

    def _correct(self, policy: str, batch: int) -> None:
        traced = self.tracer.trace_of(policy, batch).peak_reserved
        self.ratios[policy] = self.ratios.get(policy, 1.0) * traced / self.scaled_reserved(policy, batch)


@dataclass
class Extended(Estimates):
    """Estimates of a deep model under a launch, extended from two models with fewer blocks (depth.py).

    The tracer's model is the deeper of the two, and that of `few` the other one.
    """

    few: Tracer = field(kw_only=True)
    shallow: Shallow = field(kw_only=True)

    def __post_init__(self) -> None:
        self.fewer = Estimates(self.few, self.room, batch=self.batch, growth=self.growth)

    @property
    def tracers(self) -> list[Tracer]:
        return [self.few, self.tracer]

    def trace_candidates(self, policies: Iterable[str]) -> None:
        super().trace_candidates(policies)
        self.fewer.trace_candidates(self.anchors)

    def _trace(self, wanted: list[Key]) -> list[Traced]:
        return trace_all([(tracer, wanted) for tracer in self.tracers], alone=True)[-1]

    def _both(self, policy: str, batch: int) -> list[StepTrace]:
        """The traces of both models."""
        return [tracer.trace_of(policy, batch) for tracer in self.tracers]

    def _traced(self, policy: str, batch: int) -> Candidate:
        return self.shallow.candidate(policy, batch, self._both(policy, batch))

    def _estimated(self, policy: str, batch: int) -> Candidate:
        return self.shallow.candidate(
            policy, batch, [self.growth.scale(trace, batch) for trace in self._both(policy, LOW)]
        )

    def _correct(self, policy: str, batch: int) -> None:
        super()._correct(policy, batch)
        self.fewer._correct(policy, batch)

    def scaled_reserved(self, policy: str, batch: int) -> int:
        both = ((one._scaled(policy).trace, one._sizes(policy, batch)) for one in (self.fewer, self))
        return self.shallow.peaks([with_sizes(*each) for each in both])[1]

    def floor(self, policy: str, batch: int) -> int:
        return int(self.shallow.extend(self.fewer.floor(policy, batch), super().floor(policy, batch)))

    def _host(self, policy: str, batch: int) -> int:
        return int(self.shallow.extend(self.fewer._host(policy, batch), super()._host(policy, batch)))

    def whole(self, tracer: Tracer, found: Sequence[Candidate]) -> tuple[Estimates, list[Candidate]]:
        """The first of the candidates `found` that fits by a trace of the whole model, at its batch or the next below.

        Extended bytes tend to be too high. Without candidates, the smallest batch of each policy is therefore traced,
        unless its allocated bytes alone are over the limit.
        """
        beside = tracer.under(self.tracer.workload.launch)
        estimates = Estimates(beside, self.room, self.target, self.batch, self.most, self.tolerance)
        least = self.batch or 1
        for policy in [] if found else self.anchors:
            self._both(policy, least)
        smallest = sorted(
            (self.estimate(policy, least) for policy in self.anchors), key=better(self.target), reverse=True
        )
        for one in found or [one for one in smallest if one.peak <= self.room.limit]:
            for batch in [one.batch] if self.batch else range(one.batch, 0, -1):
                beside.trace(one.policy, batch)
                if self.room.fits(traced := estimates.estimate(one.policy, batch)):
                    return estimates, [traced]
        return estimates, []


class Launches:
    """The search over several launches of a workload.

    Args:
        tracer: of the workload in one process.
        room_of: returns the memory budget of a process under a launch, or of a single process.

    Attributes:
        rejected: launches that do not suit the model, each with the reason.
    """

    def __init__(
        self, tracer: Tracer, launches: Sequence[Launch], room_of: Room, target: str, batch: int | None,
        most: int, tolerance: float = 0.0,
    ) -> None:  # fmt: skip
        self.more = target, batch, most, tolerance
        self.room_of, self.key = room_of, better(target)
        self.alone = Estimates(tracer, room_of(None), *self.more)
        self.under: list[Estimates] = []
        self.rejected: dict[str, str] = {}
        for launch in launches:
            try:
                self.under.append(self._under(launch))
            except UserError as error:  # a phase does not fit
                self.rejected[str(launch)] = str(error)
        if not self.under:
            raise UserError("; ".join(self.rejected.values()))
        self.first: list[str] = []  # policies that were traced first

    def _under(self, launch: Launch) -> Estimates:
        tracer, (target, batch, most, tolerance) = self.alone.tracer.under(launch), self.more
        room = self.room_of(launch)
        more = target, batch, limited_by_phases(tracer.workload, room, most, batch), tolerance
        # DeepSpeed changes the precision: estimates of one process do not apply
        if launch.stage or launch.ranks_of_a_sample > 1:
            return Estimates(tracer, room, *more)
        return Launched(tracer, room, *more, launch=launch, alone=self.alone)

    def never_fits(self) -> bool:
        """Whether the policy that needs the fewest bytes does not fit, even without all that is sharded."""
        trace = self.alone.tracer.trace(OF_LONG[-1], self.more[1] or 1)
        held = sum(trace.at_peak[category] for category in SHARDED) if isinstance(trace, StepTrace) else 0
        return isinstance(trace, StepTrace) and trace.peak_allocated - held > max(one.room.limit for one in self.under)

    def search(self, policies: list[str] | None = None) -> list[Candidate]:
        """Candidates, best first, each traced: several of the best launch, and the best one of every other launch.

        Raises:
            UserError: no launch suits the model.
        """
        first = self.first = ends() if policies is None else policies
        self.alone.trace_candidates(first)
        self._learn(first)
        found: list[Candidate] = []
        known = list(first)
        for estimates in sorted(self.under, key=self._rank, reverse=True):
            leader = max(found, key=self.key, default=None)
            best = None if leader is None else self._traced_best(estimates, known)
            if leader is None:
                found = search(estimates, policies, _SHOWN)
                known += [candidate.policy for candidate in found]
            elif best is not None:
                beats = self.key(best) > self.key(leader)
                found += search(estimates, policies, _SHOWN) if beats else timed(estimates, [best])
        return pick_first(sorted(found, key=self.key, reverse=True), self.more[0])

    def _traced_best(self, estimates: Estimates, known: list[str]) -> Candidate | None:
        """The best candidate of the `known` policies under another launch, traced there."""
        while (best := self._best(estimates, known)) and (best.policy, best.batch) not in estimates.tracer.traced:
            trace_final_batches([(estimates, best)])
        return best

    def _learn(self, first: list[str]) -> None:
        launched = [estimates for estimates in self.under if isinstance(estimates, Launched)]
        with suppress(UserError):  # the loop below finds out which launch it was
            trace_all([(estimates.tracer, estimates.points) for estimates in launched], alone=True)
        for estimates in list(self.under):
            try:
                if isinstance(estimates, Launched):
                    estimates.learn()
                estimates.trace_candidates(first)
            except UserError as error:
                self.rejected[str(estimates.tracer.workload.launch)] = str(error)
                self.under.remove(estimates)
        if not self.under:
            raise UserError("; ".join(self.rejected.values()))

    def _best(self, estimates: Estimates, policies: Iterable[str]) -> Candidate | None:
        known = [policy for policy in dict.fromkeys(policies) if policy in estimates.anchors]
        fitting = [best for best in map(estimates.best, known) if best is not None]
        return max(fitting, key=self.key, default=None)

    def _rank(self, estimates: Estimates) -> tuple[float, ...]:
        """A sort key of launches: by the best candidate that fits, or else by the fewest bytes."""
        best = self._best(estimates, self.first)
        if best is not None:
            return 1.0, *self.key(best)
        return 0.0, -estimates.smallest().reserved

    def of(self, launch: Launch | None) -> Estimates:
        """The estimates of a launch."""
        return next(estimates for estimates in self.under if estimates.tracer.workload.launch == launch)

    def smallest(self) -> Estimates:
        """The launch that needs the fewest bytes."""
        return min(self.under, key=lambda estimates: estimates.smallest().reserved)
