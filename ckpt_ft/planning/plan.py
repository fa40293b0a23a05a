"""plan: from a memory budget to the fastest policy and batch size that fit.

Every candidate is a trace (memory/fake/) of the user's own step; what fits is decided by the bytes that the caching
allocator would reserve, plus the CUDA context, plus a margin.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ckpt_ft.errors import UserError
from ckpt_ft.memory.gpus import GPU, find_gpu
from ckpt_ft.policy import Policy
from ckpt_ft.units import format_bytes, format_number, parse_bytes
from ckpt_ft.workloads.lengths import Lengths, PaddedRows, Step

from .advice import Fix, advise
from .candidate import Room, Row, better, frontier
from .plan_file import check_versions, fingerprint, versions
from .proposals import blocks_of
from .search import Search
from .tracing import Report, Subject, Tracer, as_it_was

MARGIN = 0.02  # of the budget, on a GPU: for library handles, NCCL and kernels' scratch, which no trace sees


@dataclass(frozen=True)
class Plan:
    """What fits, best first.

    Attributes:
        rows: traced policies at their best batch size, by the target.
        room: budget, context and margin in bytes.
        fixes: what lowers the peak of `best` beside another policy, each with its predicted saving.
        data: how long the dataset's rows are, in words; "" for batches that are all alike.
        holders: the largest holders of the peak of `best`, as dicts of memory.trace.Holder.
        rejected: policies that are no candidates for this model, and why.
        model, device, target: what the plan is for; `fingerprint` is the model's.
        versions: what it was made with.
    """

    rows: list[Row]
    room: Room
    model: str
    device: str
    target: str
    fingerprint: str
    fixes: list[Fix] = field(default_factory=list)
    holders: list[dict[str, Any]] = field(default_factory=list)
    rejected: dict[str, str] = field(default_factory=dict)
    data: str = ""
    versions: dict[str, str] = field(default_factory=versions)

    @property
    def best(self) -> Row:
        """The pick."""
        return self.rows[0]

    @property
    def frontier(self) -> list[Row]:
        """The rows that none beats in both bytes reserved and samples a second."""
        return frontier(self.rows)

    @property
    def why(self) -> str:
        """One sentence on the pick."""
        best, room = self.best, self.room
        left = f"{format_bytes(room.limit - best.reserved)} of {format_bytes(room.budget)} left over"
        aims = {
            "throughput": "most samples a second of what fits",
            "memory": "fewest bytes",
            "effective_batch": "largest batch of what fits",
        }
        kept = f"context {format_bytes(room.context)} and margin {format_bytes(room.margin)} kept free"
        return f"{best.policy} at batch {best.batch}: {aims[self.target]}, {left} ({kept})"

    def to_json(self) -> str:
        """The plan as JSON; `from_json` takes it back, and a recipe's `--ac_policy plan.json`."""
        return json.dumps({**asdict(self), "best": {**asdict(self.best), "why": self.why}}, indent=2)

    @classmethod
    def from_json(cls, text: str, source: str = "plan") -> Plan:
        """The plan that `to_json` wrote.

        Raises:
            UserError: not a plan, or made with other versions than those at hand.
        """
        try:
            document = json.loads(text)
            check_versions(document["versions"], source)
            document.pop("best")
            rows = [Row(**row) for row in document.pop("rows")]
            fixes = [Fix(**fix) for fix in document.pop("fixes")]
            plan = cls(rows=rows, room=Room(**document.pop("room")), fixes=fixes, **document)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise UserError(f"{source}: not a plan; `ckpt-ft plan MODEL --output plan.json` writes one") from error
        if not plan.rows:
            raise UserError(f"{source}: a plan without rows; make it again")
        return plan

    def check_model(self, model: nn.Module, source: str = "plan") -> None:
        """Raises UserError where `model` is not the one that the plan was made for."""
        if fingerprint(model) != self.fingerprint:
            raise UserError(
                f"{source}: made for {self.model}, and this {type(model).__name__} has other weights (names, shapes "
                "or dtypes); make a plan for it, or use --ac_policy auto"
            )

    def table(self) -> str:
        """The rows as a Markdown table."""
        lines = [
            "| policy | batch | peak allocated | reserved | seconds | samples/s |",
            "|---|---:|---:|---:|---:|---:|",
        ]
        for row in self.rows:
            speed = f"{format_number(row.seconds)} | {format_number(row.samples_per_second)}"
            lines.append(
                f"| {row.policy} | {row.batch} | {format_bytes(row.peak)} | {format_bytes(row.reserved)} | {speed} |"
            )
        return "\n".join(lines)

    def plot(self, path: str | Path) -> Path:
        """Draw samples a second against bytes reserved to `path` (PNG, SVG or PDF by its suffix); needs matplotlib."""
        from .plotting import plot_plan

        return plot_plan(self, Path(path))


def plan(
    model: nn.Module,
    step_for_batch: Callable[[int], Step],
    budget: str | int | None = None,
    device: str | GPU = "a100-40gb",
    *,
    make_optimizer: Callable[[nn.Module], Any] | None = None,
    batch_size: int | None = None,
    max_batch_size: int = 1024,
    target: str = "throughput",
    margin: str | int | None = None,
    policies: list[str] | None = None,
    name: str = "",
    rows: PaddedRows | None = None,
    jobs: int = 1,
    report: Report | None = None,
) -> Plan:
    """The policies and batch sizes that fit a budget, best first.

    Args:
        model: as trace_step takes it; a policy that stands on it is put back afterwards.
        step_for_batch: batch size -> step(model, optimizer), one optimizer step at that micro-batch size; the worst
            there is.
        budget: memory that the process may take, "24GiB" or bytes; None for all of the device's.
        device: a name in gpus.py, a GPU, or "cpu" (whose seconds are nominal and only rank).
        batch_size: only this micro-batch size; None looks at all up to `max_batch_size`.
        target: "throughput" (of speeds within 1 % of the best, the one of fewest bytes), "memory" (fewest bytes, at
            batch size 1 unless given) or "effective_batch" (the largest batch).
        margin: kept free beside the CUDA context; None for 2 % of the budget on a GPU, nothing on "cpu".
        policies: candidates; None for all that suit the model.
        name: what the plan calls the model.
        rows: where batches differ in length: bytes are then those of `step_for_batch`, seconds those of usual batches.
        jobs: processes to trace on.
        report: told what is being traced.

    Raises:
        UserError: the budget is above the device, or below what any candidate needs (says the smallest that works).
    """
    better(target)
    gpu = None if device == "cpu" else find_gpu(device) if isinstance(device, str) else device
    room = make_room(budget, gpu, margin)
    subject = Subject(model, step_for_batch, make_optimizer, gpu or "cpu", rows)
    chosen = None if policies is None else [str(Policy.parse(policy)) for policy in policies]
    with as_it_was(model), Tracer(subject, jobs, report) as tracer:
        search = Search(tracer, room, target, batch_size, max_batch_size)
        found = search.run(chosen)
        if not found:
            raise UserError(_too_small(search, model))
        best = tracer.traced[found[0].policy, found[0].batch]
        assert not isinstance(best, str), "a row has a trace"
        holders = [asdict(holder) for holder in best.holders(8)]
        fixes = advise(tracer, found[0], best, batch_size is not None)
    return Plan(
        rows=found,
        room=room,
        model=name or type(model).__name__,
        device=gpu.name if gpu else "cpu",
        target=target,
        fingerprint=fingerprint(model),
        fixes=fixes,
        holders=holders,
        rejected=search.rejected,
        data="" if rows is None else _describe(rows.lengths, found[0].batch),
    )


def _describe(lengths: Lengths, batch: int) -> str:
    return (
        f"{lengths}: bytes are those of a batch with the longest, seconds those of a usual one, padded to "
        f"{lengths.padded(batch)} at batch {batch}"
    )


def make_room(budget: str | int | None, gpu: GPU | None, margin: str | int | None = None) -> Room:
    """The room under a budget on `gpu` (None: the CPU, where there is neither context nor margin unless given).

    Raises:
        UserError: no budget for the CPU, or more than the GPU has.
    """
    if gpu is None:
        if budget is None:
            raise UserError(
                "a plan for the CPU needs a budget, as in --budget 600MiB: its memory is shared with all else"
            )
        return Room(parse_bytes(budget), 0, parse_bytes(margin) if margin else 0)
    given = gpu.memory if budget is None else parse_bytes(budget)
    if given > gpu.memory:
        raise UserError(
            f"--budget {format_bytes(given)}: {gpu.name} has {format_bytes(gpu.memory)}; "
            "give at most that, or a larger device"
        )
    kept = round(MARGIN * given) if margin is None else parse_bytes(margin) if margin else 0
    return Room(given, gpu.context, kept)


def _too_small(search: Search, model: nn.Module) -> str:
    """What to say when nothing fits: by how much, and the smallest budget that would do."""
    room, at = search.room, search.batch or 1
    if not search.anchors:
        return f"no policy suits {type(model).__name__}: " + "; ".join(search.rejected.values())
    leanest = min(search.anchors, key=lambda policy: search.reserved(policy, at))
    search.tracer.trace(leanest, at)
    needed = room.needs(search.estimate(leanest, at))
    parameters = sum(p.numel() * p.element_size() for p in dict.fromkeys(model.parameters()))
    below = ""
    if parameters > room.budget:
        below = (
            f" (the parameters alone take {format_bytes(parameters)}, {format_bytes(parameters - room.budget)} more)"
        )
    blocks = "" if blocks_of(model).blocks else "; it has no repeated blocks to checkpoint"
    return (
        f"--budget {format_bytes(room.budget)}: no policy fits a batch of {at}{below}; the smallest budget that works "
        f"is {format_bytes(needed)}, under '{leanest}'{blocks}"
    )
