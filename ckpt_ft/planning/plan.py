"""plan: from a memory budget to the fastest policy and batch size that fit.

Every candidate is a trace (memory/fake/) of the user's own step; what fits is decided by the bytes that the caching
allocator would reserve, plus the CUDA context, plus a margin.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from torch import nn

from ckpt_ft.checkpointing.standing import suspended
from ckpt_ft.errors import UserError
from ckpt_ft.memory.distributed.launch import Launch
from ckpt_ft.memory.gpus import gpu_of
from ckpt_ft.memory.record.events import Holder
from ckpt_ft.memory.record.holders import holders_table
from ckpt_ft.page.fragments import fragment, paragraph, table_html
from ckpt_ft.plots import draw_plan
from ckpt_ft.policy import Policy
from ckpt_ft.reading import read_json
from ckpt_ft.tables import DASH, Table, markdown_table
from ckpt_ft.units import format_bytes, format_number
from ckpt_ft.workloads.lengths import Lengths
from ckpt_ft.workloads.workload import Workload, or_loop

from .advice import Fix, advise
from .candidate import Candidate, better, frontier
from .estimates import Estimates
from .fitting import Room, make_room
from .launches import Launches
from .plan_file import check_versions, fingerprint, versions
from .question import Question
from .refusal import too_small
from .search import search
from .tracing import Report, Tracer

_FEW = 3  # candidates: with fewer, what did not fit is shown too


@dataclass(frozen=True)
class Plan:
    """What fits, best first.

    Attributes:
        candidates: traced policies at their best batch size, by the target.
        room: budget, context and margin in bytes.
        fixes: what lowers the peak of `best` beside another policy, each with its predicted saving.
        data: how long the dataset's rows are, in words; "" for batches that are all alike.
        notes: what the traces assume, one sentence each.
        holders: the largest holders of the peak of `best`.
        rejected: policies and launches that are no candidates for this model, and why.
        beyond: where few fit, what else was traced and holds more than the room, the smallest first.
        fewest: of several launches, what fits on the fewest GPUs, where these are fewer than the launches have.
        model, device, target: what the plan is for; `fingerprint` is the model's.
        versions: what it was made with.
    """

    candidates: list[Candidate]
    room: Room
    model: str
    device: str
    target: str
    fingerprint: str
    fixes: list[Fix] = field(default_factory=list)
    holders: list[Holder] = field(default_factory=list)
    rejected: dict[str, str] = field(default_factory=dict)
    data: str = ""
    notes: list[str] = field(default_factory=list)
    fewest: Candidate | None = None
    beyond: list[Candidate] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=versions)

    @property
    def best(self) -> Candidate:
        """The pick."""
        return self.candidates[0]

    @property
    def frontier(self) -> list[Candidate]:
        """The candidates that none beats in both bytes reserved and samples a second."""
        return frontier(self.candidates)

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
        launched = f"{best.launch}, " if best.launch else ""
        return f"{launched}{best.policy} at batch {best.batch}: {aims[self.target]}, {left} ({kept})"

    def to_json(self) -> str:
        """The plan as JSON; `from_json` takes it back, and a recipe's `--ac_policy plan.json`."""
        return json.dumps({**asdict(self), "best": {**asdict(self.best), "why": self.why}}, indent=2)

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "plan") -> Plan:
        """The plan that `to_json` wrote.

        Raises:
            UserError: not a plan, or made with other versions than those at hand.
        """
        plan = read_json(cls, text, source, "a plan; `ckpt-ft plan MODEL --output plan.json` writes one")
        check_versions(plan.versions, source)
        if not plan.candidates:
            raise UserError(f"{source}: a plan without candidates; make it again")
        better(plan.target)
        for candidate in plan.candidates:
            Policy.parse(candidate.policy)
        return plan

    def check_model(self, model: nn.Module, source: str = "plan") -> None:
        """Raises UserError where `model` is not the one that the plan was made for."""
        if fingerprint(model) != self.fingerprint:
            raise UserError(
                f"{source}: made for {self.model}, and this {type(model).__name__} has other weights (names, shapes "
                "or dtypes); make a plan for it, or let 'auto' make one"
            )

    @property
    def speed(self) -> str:
        """What its speeds are: those of "cpu" are nominal."""
        return "samples/s" if self.device != "cpu" else "nominal samples/s"

    @property
    def candidates_table(self) -> Table:
        """The candidates as a table; the last column marks the pick and the frontier."""
        edge, shown = self.frontier, [*self.candidates, *self.beyond]
        rows: list[tuple[str, ...]] = [
            (
                candidate.policy,
                str(candidate.batch),
                format_bytes(candidate.peak),
                format_bytes(candidate.reserved),
                format_number(candidate.seconds),
                format_number(candidate.samples_per_second),
                candidate.bound or DASH,
                self._mark(candidate, edge),
            )
            for candidate in shown
        ]
        header = ("policy", "batch", "peak allocated", "reserved", "s/step", self.speed, "bound by", "")
        if any(candidate.launch for candidate in self.candidates):
            rows = [(c.launch.sharing if c.launch else "", *row) for c, row in zip(shown, rows, strict=True)]
            gpus = self.best.launch.processes if self.best.launch else 1
            title = f"{self.model} on {gpus} x {self.device}: bytes and samples of each GPU"
            return Table(title, ("launch", *header), rows, text=(0, 1, 7, 8))
        return Table(f"{self.model} on {self.device}", header, rows, text=(0, 6, 7))

    def _mark(self, candidate: Candidate, edge: list[Candidate]) -> str:
        if candidate.reserved > self.room.limit:
            return "does not fit"
        return "pick" if candidate == self.best else "frontier" if candidate in edge else ""

    def table(self) -> str:
        """The candidates as a Markdown table."""
        return markdown_table(self.candidates_table)

    def _repr_html_(self) -> str:
        held = table_html(holders_table(self.holders, self.best.peak))
        return fragment(f"Pick: {self.why}", table_html(self.candidates_table), held, *map(paragraph, self.notes))

    def plot(self, path: str | Path) -> Path:
        """Draw samples a second against bytes reserved to `path`: PNG, SVG or PDF by its suffix.

        Raises:
            UserError: matplotlib is not installed, or the suffix is another.
        """
        title, speed = f"{self.model} on {self.device}", self.speed
        speed = speed if speed.startswith("nominal") else f"predicted {speed}"
        shown = [*self.candidates, *self.beyond]
        return draw_plan(path, shown, self.frontier, limit=self.room.limit, title=title, speed=speed)


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
) -> Plan:
    """The policies and batch sizes that fit a budget, best first.

    With a loop of one's own: `plan(model, step_for_batch, budget, device, make_optimizer=..., name=...)`, where
    `step_for_batch(samples)` is `step(model, optimizer)`, one optimizer step on the worst micro-batch of so many
    samples there is, and `device` a name in gpus.py, a GPU, or "cpu".

    Args:
        workload: what is trained and how; a policy that stands on its model is put back afterwards. The longest row
            decides the bytes, usual batches the seconds, which are nominal and only rank on "cpu".
        budget: memory that the process may take, "24GiB" or bytes; None for all of the device's.
        batch_size: only this micro-batch size; None looks at all up to `max_batch_size`.
        target: "throughput" (of speeds within 1 % of the best, the one of fewest bytes), "memory" (fewest bytes, at
            batch size 1 unless given) or "effective_batch" (the largest batch).
        margin: kept free beside the CUDA context, an amount or, as a float, a share of the budget;
            None for 2 % of the budget on a GPU, nothing on "cpu".
        policies: those to look at; None for all that suit the model.
        jobs: processes to trace on.
        report: told what is being traced.
        launches: to choose from, in place of the workload's own; all on as many GPUs (see `launches_on`).

    Raises:
        UserError: the budget is above the device, or below what any policy needs (says the smallest that works).
    """
    asked = Question(budget, batch_size, max_batch_size, target, margin, policies, tuple(launches))
    with searching(replace(workload, launch=None) if launches else workload, jobs, report) as tracer:
        return planned(tracer, asked)[0]


@contextmanager
def searching(workload: Workload, jobs: int, report: Report | None) -> Iterator[Tracer]:
    """A tracer of `workload`, whose model has no policy meanwhile."""
    with suspended(workload.model), Tracer(workload, jobs, report) as tracer:
        yield tracer


def planned(tracer: Tracer, asked: Question) -> tuple[Plan, Estimates]:
    """The plan, and what its search found out on the way.

    Raises:
        UserError: as `plan`.
    """
    workload = tracer.workload
    gpu = gpu_of(workload.device)
    room = make_room(asked.budget, gpu, asked.margin, asked.launches[0] if asked.launches else workload.launch)
    limits = asked.target, asked.batch_size, asked.max_batch_size
    fewest = None
    if asked.launches:
        several = Launches(tracer, asked.launches, (room, make_room(asked.budget, gpu, asked.margin)), *limits)
        found = several.search(asked.chosen)
        estimates = several.of(found[0].launch) if found else several.leanest()
        fewest = several.fewest(found[0]) if found else None
        rejected = {**estimates.rejected, **several.rejected}
    else:
        estimates = Estimates(tracer, room, *limits)
        found = search(estimates, asked.chosen)
        rejected = estimates.rejected
    if not found:
        raise UserError(too_small(estimates, workload.model))
    best = estimates.tracer.traced[found[0].policy, found[0].batch]
    assert not isinstance(best, str), "a candidate has a trace"
    made = Plan(
        candidates=found,
        room=room,
        model=workload.name or type(workload.model).__name__,
        device=gpu.name if gpu else "cpu",
        target=asked.target,
        fingerprint=fingerprint(workload.model),
        fixes=advise(estimates.tracer, found[0], best, asked.batch_size is not None),
        holders=best.grouped_holders(8),
        rejected=rejected,
        fewest=fewest,
        beyond=estimates.beyond() if len(found) < _FEW else [],
        notes=best.notes,
        data="" if workload.lengths is None else _describe(workload.lengths, found[0].batch),
    )
    return made, estimates


def _describe(lengths: Lengths, batch: int) -> str:
    return (
        f"{lengths}: bytes are those of a batch with the longest, seconds those of a usual one, padded to "
        f"{lengths.padded(batch)} at batch {batch}"
    )
