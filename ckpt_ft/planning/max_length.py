"""The longest sequence that fits a memory budget: predicted from traces under each of a few policies, or proved.

A search over lengths is a search over batch sizes in which a "sample" is a piece of every sequence, `GRANULARITY`
tokens long. So `by_length` turns a workload into one of pieces, and the estimates and real steps of
`find_max_batch_size` do the rest. The longest length has been traced at that length, on several GPUs of a deep model
with fewer blocks; those of other policies are scaled from shorter sequences.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ckpt_ft.checkpointing.applied_policy import suspended
from ckpt_ft.errors import UserError
from ckpt_ft.export.holders import Holder
from ckpt_ft.memory.gpus import gpu_of
from ckpt_ft.policy import Policy
from ckpt_ft.spec.launch import Launch
from ckpt_ft.spec.training_spec import MOST
from ckpt_ft.units import format_bytes
from ckpt_ft.validation import Bytes, Count
from ckpt_ft.workloads.workload import Step, Workload, or_loop

from .batch_size import Trial, find_max_batch_size
from .budget import Candidate, MemoryBudget, better, largest_fitting, limited_by_phases, memory_budget
from .depth import Shallow, suits
from .launches import OF_LONG, Extended, Launches, search_shared, split_by_sharing
from .scaled_traces import HIGH, Estimates
from .search import trace_final_batches
from .tracing import Report, Tracer

GRANULARITY = 256  # tokens
LADDER = ("none", "pointwise,head", "full", "full,head", "full,head,tile:16", "full,head,offload,tile:16")
OF_SEVERAL_GPUS = LADDER[3:]
_TARGET = "effective_batch"
_EXTENDED = "figures are extended from models with fewer blocks; `ckpt-ft estimate --launch` traces the whole model"
_TOLERANCE = 0.02  # reserved bytes do not grow evenly with the length: within it, a longer one may or may not fit


@dataclass(frozen=True)
class LongestSequence:
    """The longest sequence that fits under one policy, in tokens; tokens a second are those of one process.

    scaled: whether the figures are scaled from traces of shorter sequences.
    """

    policy: str
    length: Count
    peak_allocated: Bytes
    peak_reserved: Bytes
    seconds: float
    tokens_per_second: float
    launch: Launch | None = None
    scaled: bool = False

    @classmethod
    def of(cls, candidate: Candidate, granularity: int, batch_size: int, scaled: bool = False) -> LongestSequence:
        """The sequence of a candidate whose samples are pieces of `granularity` tokens."""
        length = candidate.batch * granularity
        return cls(
            candidate.policy, length, candidate.peak, candidate.reserved, candidate.seconds,
            batch_size * granularity * candidate.samples_per_second, candidate.launch, scaled,
        )  # fmt: skip


@dataclass(frozen=True)
class MaxLength:
    """The longest sequence that fits, 0 tokens if not even the shortest one does.

    Attributes:
        length: the proved length; the predicted one if no step was run.
        predicted: the longest sequence whose predicted bytes fit.
        batch_size: sequences of a micro-batch.
        ladder: the longest sequence of every policy that fits, the longest first.
        holders: what holds the peak of the first of them; empty if its figures are extended.
        rejected: policies and launches that do not suit the model, each with the reason.
        needed: if nothing fits, the smallest budget that works for `granularity` tokens; else 0.
        granularity: lengths are multiples of this number of tokens.
        notes: assumptions of the prediction, one sentence each.
        trials: the real steps in order; the batch size of a trial counts pieces of `granularity` tokens.
    """

    length: int
    predicted: int
    batch_size: int
    room: MemoryBudget
    ladder: list[LongestSequence] = field(default_factory=list)
    holders: list[Holder] = field(default_factory=list)
    rejected: dict[str, str] = field(default_factory=dict)
    needed: int = 0
    granularity: int = GRANULARITY
    notes: list[str] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)

    def __str__(self) -> str:
        found = f"longest sequence in {format_bytes(self.room.budget)}: predicted {self.predicted} tokens"
        if not self.trials:
            return found
        out = sum(not trial.fits for trial in self.trials)
        return f"{found}, proved {self.length} ({len(self.trials)} steps, {out} out of memory)"


@or_loop
def find_max_length(
    workload: Workload,
    budget: str | int | None = None,
    *,
    batch_size: int = 1,
    most: int = MOST,
    margin: str | float | None = None,
    report: Report | None = None,
) -> MaxLength:
    """The longest sequence whose training step fits under the model's policy: predicted, then proved by real steps.

    For a training loop of your own: `find_max_length(model, step_for_length, budget, make_optimizer=...)`, where
    `step_for_length(tokens)` returns `step(model, optimizer)`, one optimizer step on sequences of that many tokens.
    Weights, buffers, gradients and random state are restored afterwards.

    Args:
        workload: as for `find_max_batch_size`; its `make_batch(samples, length)` makes sequences of any length.
        batch_size: sequences of a micro-batch.
        most: tokens of the longest sequence to consider, such as the number of the model's learned positions.

    Raises:
        UserError: as `find_max_batch_size`.
    """
    pieces, most_pieces, granularity = by_length(workload, batch_size, most)
    found = find_max_batch_size(pieces, budget, max_batch_size=most_pieces, margin=margin, report=report)
    lengths = (found.batch * granularity, found.predicted * granularity)
    return MaxLength(*lengths, batch_size, found.room, granularity=granularity, trials=found.trials)


def predict_max_length(
    workload: Workload,
    policies: Sequence[str] = LADDER,
    budget: str | int | None = None,
    *,
    batch_size: int = 1,
    most: int = MOST,
    margin: str | float | None = None,
    jobs: int = 1,
    report: Report | None = None,
    launches: Sequence[Launch] = (),
    host_memory: int | None = None,
) -> MaxLength:
    """The longest sequence that fits the workload's device under the best of `policies`, predicted only.

    Args:
        workload: its model may be on meta; its `make_batch(samples, length)` makes sequences of any length.
        most: tokens of the longest sequence to consider.
        launches: launches to choose from, in place of the workload's own. A launch that needs more memory than another
            is left out (DDP beside FSDP2), and so are the first policies of `LADDER`, which never fit the longest
            sequence. If sequences fit that the GPUs share, launches in which each GPU has its own are not tried.
        host_memory: bytes of host memory that each process may take; None without a limit.

    Raises:
        UserError: a budget that the device does not have, or no policy that suits the model.
    """
    pieces, most_pieces, granularity = by_length(workload, batch_size, most)
    gpu = gpu_of(workload.device)

    def room_of(launch: Launch | None) -> MemoryBudget:
        return memory_budget(budget, gpu, margin, launch, host_memory)

    of_several = OF_SEVERAL_GPUS if tuple(policies) == LADDER else policies
    policies = [str(Policy.parse(policy)) for policy in policies]

    def say(line: str) -> None:
        if report is not None:
            report(re.sub(r"batch (\d+)", lambda at: f"{int(at[1]) * granularity:,} tokens", line))

    alone = replace(pieces, launch=None) if launches else pieces
    with suspended(alone.model), Tracer(alone, jobs, say) as tracer:
        if launches:
            own, sharing = split_by_sharing(
                [one for one in launches if one.reshard_after_forward and one.strategy != "ddp"] or launches
            )
            of_long = OF_LONG if of_several is OF_SEVERAL_GPUS else policies
            limits = _TARGET, None, most_pieces, _TOLERANCE
            shared, rejected = search_shared(tracer, sharing, room_of, *limits, of_long)
            candidates = sorted((one for _, each in shared for one in each), key=better(_TARGET), reverse=True)
            if candidates:  # longer than any sequence that fits a single GPU
                estimates = next(each for each, found in shared if candidates[0] in found)
            else:
                several = Launches(tracer, own, room_of, *limits)
                candidates = several.search([str(Policy.parse(policy)) for policy in of_several])
                estimates = several.of(candidates[0].launch) if candidates else several.smallest()
                rejected = {**rejected, **estimates.rejected, **several.rejected}
            whole = estimates
        else:
            room = room_of(workload.launch)
            most_pieces = limited_by_phases(pieces, room, most_pieces)
            estimates, whole = _estimates(tracer, room, most_pieces, policies)
            candidates, rejected = _proved(estimates, whole), dict(estimates.rejected)
        if not estimates.anchors:
            raise UserError("no policy suits the model: " + "; ".join(rejected.values()))
        if not candidates:
            smallest = estimates.smallest().policy
            whole.tracer.trace(smallest, 1)
            needed = estimates.room.needs(whole.estimate(smallest, 1))
            return MaxLength(
                0, 0, batch_size, estimates.room, rejected=rejected, needed=needed, granularity=granularity
            )
        best = whole.tracer.trace_of(candidates[0].policy, candidates[0].batch)
        traced = whole.tracer.traced
    ladder = [
        LongestSequence.of(one, granularity, batch_size, not launches and (one.policy, one.batch) not in traced)
        for one in candidates
    ]
    length = ladder[0].length
    holders, notes = ([], [_EXTENDED]) if isinstance(whole, Extended) else (best.grouped_holders(8), [])
    return MaxLength(
        length, length, batch_size, estimates.room, ladder, holders, rejected, 0, granularity, [*best.notes, *notes]
    )


def _estimates(tracer: Tracer, room: MemoryBudget, most: int, policies: Sequence[str]) -> tuple[Estimates, Estimates]:
    """Estimates of `policies`, and others that trace the whole model at the lengths that are found.

    The first come from copies with fewer blocks if the policies treat all blocks alike; else they are the second, too.
    """
    whole = estimates = Estimates(tracer, room, _TARGET, most=most, tolerance=_TOLERANCE, separate=True)
    alike = not tracer.workload.compile and all(map(suits, policies))
    if alike and (shallow := Shallow.of(tracer.workload, proved=True)):
        few, more = map(tracer.of, shallow.workloads)
        estimates = Extended(more, room, _TARGET, most=most, tolerance=_TOLERANCE, few=few, shallow=shallow)
        whole = replace(whole, growth=estimates.growth, anchors=estimates.anchors)
    estimates.trace_candidates(policies)
    return estimates, whole


def _proved(estimates: Estimates, whole: Estimates) -> list[Candidate]:
    """The candidate of every policy that fits, the longest first.

    Estimates from copies are on the safe side. `whole` therefore traces each policy whose allocated bytes alone would
    allow a sequence as long as the longest so far; the others keep their estimates.
    """
    limit, bests = whole.room.limit, {policy: estimates.best(policy) for policy in estimates.anchors}
    guesses = {policy: best.batch if best else 1 for policy, best in bests.items()}
    longest = 1
    for policy in sorted(guesses, key=guesses.__getitem__, reverse=True):
        if largest_fitting(partial(estimates.floor, policy), limit, whole.most) < longest:
            continue
        trace_final_batches([(whole, estimates.estimate(policy, guesses[policy]))])
        bests[policy] = best = whole.best(policy)
        longest = max(longest, best.batch if best else 0)
    return sorted(filter(None, bests.values()), key=better(_TARGET), reverse=True)


def by_length(workload: Workload, batch_size: int, most: int = MOST) -> tuple[Workload, int, int]:
    """Returns a workload whose samples are pieces of sequences, the largest number of pieces, and tokens of a piece.

    A step of n samples of the result is a step on `batch_size` sequences of n pieces each.
    """
    granularity = GRANULARITY if most >= HIGH * GRANULARITY else max(most // (HIGH + 1), 1)
    make_batch, loop, rows_differ = workload.make_batch, workload.loop, workload.lengths is not None

    def beside(phase: Callable[[Workload, int], Step], workload: Workload, pieces: int) -> Step:
        of_rows = replace(workload, make_batch=lambda samples, _: make_batch(samples, pieces * granularity))
        return phase(of_rows, batch_size)

    pieces = replace(
        workload,
        make_batch=lambda pieces, _: make_batch(batch_size, pieces * granularity),
        lengths=None,
        phases={name: partial(beside, phase) for name, phase in workload.phases.items()},
    )
    if loop is not None:
        step = loop  # a user's loop: its argument is a number of tokens unless rows of several lengths were described

        def of_pieces(pieces: int, _: int | None):  # type: ignore[no-untyped-def]
            tokens = pieces * granularity
            return step(batch_size, tokens) if rows_differ else step(tokens, None)

        pieces = replace(pieces, loop=of_pieces)
    return pieces, most // granularity, granularity
