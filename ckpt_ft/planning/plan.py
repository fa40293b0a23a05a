"""plan: finds the fastest policy and batch size that fit a memory budget.

A `PlanRequest` becomes a ranked `Plan` in four steps: a memory budget (budget.py), candidates (search.py) with their
traces (tracing.py) and estimates in between (scaled_traces.py), the ranked candidates that fit, and fixes for the
first of them (estimate.py). Every candidate is a trace of the user's own step. It fits if the bytes that the caching
allocator would reserve, the CUDA context and a margin are within the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckpt_ft.checkpointing.applied_policy import suspended
from ckpt_ft.errors import NothingFits
from ckpt_ft.memory.gpus import gpu_of
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.planning.estimate import less_padding, no_policy_fits
from ckpt_ft.planning.results import Plan, PlanRequest
from ckpt_ft.spec.launch import Launch
from ckpt_ft.workloads.adapters import without_adapters
from ckpt_ft.workloads.sample_sizes import Lengths
from ckpt_ft.workloads.workload import Workload, or_loop

from .budget import MemoryBudget, better, limited_by_phases, memory_budget
from .launches import LONG, OF_LONG, Extended, Launches, search_shared, split_by_sharing
from .scaled_traces import Estimates
from .search import search
from .tracing import Report, Tracer


@or_loop
def plan(
    workload: Workload,
    budget: str | int | None = None,
    *,
    batch_size: int | None = None,
    max_batch_size: int = 1024,
    target: str = "throughput",
    margin: str | float | None = None,
    policies: list[str] | None = None,
    jobs: int = 1,
    report: Report | None = None,
    launches: Sequence[Launch] = (),
    host_memory: int | None = None,
) -> Plan:
    """The policies and batch sizes that fit a budget, best first.

    For a training loop of your own: `plan(model, step_for_batch, budget, device, make_optimizer=..., name=...)`, where
    `step_for_batch(samples)` returns `step(model, optimizer)`, one optimizer step on the largest micro-batch with that
    many samples, and `device` is a name in gpus.py, a GPU, or "cpu".

    Args:
        workload: what is trained and how. A policy that is applied to its model is applied again afterwards. The
            longest row decides the bytes, typical batches the seconds; on "cpu" seconds are nominal and only rank.
        budget: bytes or "24GiB" for the process; None for all memory of the device.
        batch_size: the only micro-batch size to look at; None for all sizes up to `max_batch_size`.
        target: "throughput" (among speeds within 1 % of the best, the fewest bytes), "memory" (fewest bytes, at batch
            size 1 unless `batch_size` is given) or "effective_batch" (the largest batch).
        margin: memory to keep free besides the CUDA context: an amount, or a share of the budget as a float;
            None for 2 % of the budget on a GPU, and nothing on "cpu".
        policies: the policies to look at; None for all that suit the model.
        jobs: number of processes that trace; 0 for one per core.
        report: called with a line before each trace.
        launches: launches to choose from, in place of the workload's own; all on the same number of GPUs (see
            `launches_on`).
        host_memory: bytes of host memory that each process may take. With it, policies with `swap` are looked at, too;
            without it, only if nothing else fits.

    Raises:
        UserError: the budget is larger than the device, or smaller than any policy needs; the message has the
            smallest budget that works.
    """
    asked = PlanRequest(budget, batch_size, max_batch_size, target, margin, policies, tuple(launches), host_memory)
    return traced_plan(workload, asked, jobs, report)[0]


def traced_plan(
    workload: Workload, asked: PlanRequest, jobs: int = 1, report: Report | None = None
) -> tuple[Plan, StepTrace]:
    """The plan, and the trace of its first candidate; errors are those of `plan`."""
    workload = replace(workload, launch=None) if asked.launches else workload
    with suspended(workload.model), Tracer(workload, jobs, report) as tracer:
        return _planned(tracer, asked)


def _planned(tracer: Tracer, asked: PlanRequest) -> tuple[Plan, StepTrace]:
    workload = tracer.workload
    gpu = gpu_of(workload.device)

    def room_of(launch: Launch | None) -> MemoryBudget:
        return memory_budget(asked.budget, gpu, asked.margin, launch, asked.host_memory)

    limits = asked.target, asked.batch_size, asked.max_batch_size
    if asked.launches:
        launches, sharing = split_by_sharing(asked.launches)
        policies = asked.chosen or OF_LONG
        long = sharing and workload.shape.get("seq_length", 0) >= LONG
        several = Launches(tracer, launches, room_of, *limits)
        found = [] if long and several.never_fits() else several.search(asked.chosen)
        if found:
            estimates = several.of(found[0].launch)
        else:
            shared, refused = search_shared(tracer, sharing, room_of, *limits, policies=policies)
            several.rejected |= refused
            best_first = sorted(shared, key=lambda each: [better(asked.target)(one) for one in each[1]], reverse=True)
            for estimates, found in best_first:
                if isinstance(estimates, Extended):
                    estimates, found = estimates.whole(tracer, found)
                if found:
                    break
            else:
                nearest = [each for each, _ in shared if each.anchors]
                if not long or not nearest:
                    several.search(asked.chosen)
                    nearest.append(several.smallest())
                estimates = min(nearest, key=lambda each: each.smallest().reserved)
        rejected = {**estimates.rejected, **several.rejected}
    else:
        room = room_of(workload.launch)
        most = limited_by_phases(workload, room, asked.max_batch_size, asked.batch_size)
        estimates = Estimates(tracer, room, asked.target, asked.batch_size, most)
        found = search(estimates, asked.chosen)
        rejected = estimates.rejected
    if not found:
        raise NothingFits(no_policy_fits(estimates, workload.model))
    best = estimates.tracer.trace_of(found[0].policy, found[0].batch)
    workload = estimates.tracer.workload
    made = Plan(
        candidates=found,
        room=estimates.room,
        model=workload.name or type(workload.model).__name__,
        device=gpu.name if gpu else "cpu",
        target=asked.target,
        architecture=type(without_adapters(workload.model)).__name__,
        fixes=less_padding(workload, found[0]),
        holders=best.grouped_holders(8),
        rejected=rejected,
        notes=best.notes,
        kind=workload.kind,
        tokens=workload.shape.get("seq_length", 0),
        data="" if workload.lengths is None else _describe(workload.lengths, found[0].batch),
    )
    return made, best


def _describe(lengths: Lengths, batch: int) -> str:
    usual = f"padded to {lengths.padded(batch)} at batch {batch}"
    if lengths.by_length:
        usual = f"of {lengths.padded(batch)}"
    return f"{lengths}: bytes are those of a batch with the longest, seconds those of a usual one, {usual}"
