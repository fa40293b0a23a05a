"""Results of the planner (estimates, plans, suggestions) and what they depend on; loading them needs no torch."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_ft.errors import UserError
from ckpt_ft.export.holders import Holder, holders_table
from ckpt_ft.export.notebook import fragment, paragraph, table_html
from ckpt_ft.files import cache_root
from ckpt_ft.memory.gpus import calibrated
from ckpt_ft.planning.budget import Candidate, MemoryBudget, better, frontier
from ckpt_ft.policy import Policy
from ckpt_ft.spec.launch import Launch
from ckpt_ft.tables import DASH, Table, markdown_table
from ckpt_ft.units import format_bytes, format_change, format_number
from ckpt_ft.validation import Bytes, Count, Seconds, read_json

if TYPE_CHECKING:
    from torch import nn


PACKAGES = ("torch", "transformers", "diffusers", "peft", "ckpt_ft")


def versions() -> dict[str, str]:
    """The installed versions of the packages that decide a step's memory, without local parts such as "+cpu"."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@lru_cache(maxsize=1)
def source_digest() -> str:
    """A digest of this package's code and tables: a change of either makes every cached result invalid."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.parent.rglob("*")):
        if path.suffix in (".py", ".csv", ".ini", ".json", ".js", ".css", ".html"):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def cache_path(kind: str, question: Mapping[str, Any]) -> Path:
    """The path in the cache of the result of a `kind`; `question` has everything that the result depends on."""
    libraries = {name: version for name, version in versions().items() if name != "ckpt_ft"}
    text = json.dumps(
        {"question": question, "versions": libraries, "code": source_digest()}, sort_keys=True, default=str
    )
    return cache_root() / kind / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


@dataclass(frozen=True)
class Fix:
    """A change, the reserved bytes that it saves the best candidate, and how much slower a sample is, as a share."""

    change: str
    saves: int
    slower: float


@dataclass(frozen=True)
class Suggestion:
    """A change under which the step fits.

    Attributes:
        change: the flags to add or replace, and those to leave out.
        slower: seconds per sample (per token if sequences are shorter) relative to the requested step, minus 1.
        edits: what changes in the spec: its fields by their names.
        command: the whole command that trains with the change; if no recipe trains the model, the estimate's.
    """

    change: str
    reserved: int
    slower: float
    edits: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    host: int = 0


@dataclass(frozen=True)
class Suggestions:
    """Suggestions that fit, the quickest first; if none fits, `needed` is the smallest budget of those tried."""

    ways: list[Suggestion]
    needed: int

    @property
    def table(self) -> Table:
        """What would fit."""
        on_host = any(way.host for way in self.ways)
        rows = [
            (way.change, format_bytes(way.reserved), *([format_bytes(way.host)] * on_host),
             format_change(way.slower, 0))
            for way in self.ways
        ]  # fmt: skip
        columns = ("with", "peak reserved", *(["host memory"] * on_host), "time a sample")
        return Table("Would fit", columns, rows)


@dataclass(frozen=True)
class Estimate:
    """The predicted memory and time of one training step.

    Attributes:
        launch: "" for one process.
        batch_size, accumulation: samples of a micro-batch, and micro-batches of the step.
        shape: sizes of a sample, `{"seq_length": 1024}`.
        peak_allocated, peak_reserved: bytes on each device.
        peaks: bytes allocated at the peak of each phase: of the step, and of what runs between steps.
        at_peak: bytes at the step's peak by category.
        holders: the largest holders of the peak, in descending order.
        peak_host: peak bytes in host memory of each process: offloaded tensors, without the process itself.
        at_host_peak, host_kinds: these bytes by category, and by kind: pinned, pageable, managed.
        seconds: time of the step; None for a CPU, whose speed is not modelled.
        bound: what limits the speed, as in `Candidate`.
        capacity, host_capacity: bytes that the process may use on the device, and in host memory; None for no limit.
        context: bytes of the CUDA context, with NCCL's buffers.
        notes: assumptions of the estimate, one sentence each.
        command: the command of the recipe that trains with these settings; "" if no recipe does.
    """

    model: str
    policy: str
    device: str
    batch_size: Count
    accumulation: Count
    shape: dict[str, int]
    peak_allocated: Bytes
    peak_reserved: Bytes
    peaks: dict[str, Bytes]
    at_peak: dict[str, Bytes]
    holders: list[Holder]
    seconds: Seconds | None
    seconds_parts: dict[str, float]
    bound: str
    capacity: Bytes | None
    context: Bytes
    notes: list[str]
    launch: str = ""
    answer: Suggestions | None = None
    command: str = ""
    peak_host: Bytes = 0
    at_host_peak: dict[str, Bytes] = field(default_factory=dict)
    host_kinds: dict[str, Bytes] = field(default_factory=dict)
    host_capacity: Bytes | None = None

    @property
    def host_headroom(self) -> int | None:
        """Bytes left of the host memory that each process may take; negative if the step does not fit there."""
        return None if self.host_capacity is None else self.host_capacity - self.peak_host

    @property
    def headroom(self) -> int | None:
        """Bytes left on the device; negative if the step does not fit, None without a capacity."""
        return None if self.capacity is None else self.capacity - self.context - self.peak_reserved

    @property
    def verdicts(self) -> list[str]:
        """Whether it fits, a sentence for the device and one for host memory; none without a capacity."""
        found = []
        on_card = self.headroom, self.capacity, "(reserved and context counted)"
        for spare, whole, where in (on_card, (self.host_headroom, self.host_capacity, "in host memory")):
            if spare is not None and whole is not None:
                said = "fits, {} to spare of {} {}" if spare >= 0 else "does not fit: needs {} more than {} {}"
                found.append(said.format(format_bytes(abs(spare)), format_bytes(whole), where))
        return found

    @classmethod
    def from_json(cls, text: bytes, source: str) -> Estimate:
        """Reads an estimate saved as JSON; raises UserError for other text."""
        return read_json(cls, text, source, "an estimate")


@dataclass(frozen=True)
class PlanRequest:
    """The request for a plan: the arguments of `plan` that are not part of the workload.

    Raises:
        UserError: an unknown target, a malformed policy or less than one sample.
    """

    budget: str | int | None = None
    batch_size: int | None = None
    max_batch_size: int = 1024
    target: str = "throughput"
    margin: str | float | None = None
    policies: list[str] | None = None
    launches: tuple[Launch, ...] = ()
    host_memory: int | None = None

    def __post_init__(self) -> None:
        better(self.target)
        for name, samples in (("batch_size", self.batch_size), ("max_batch_size", self.max_batch_size)):
            if samples is not None and samples < 1:
                raise UserError(f"{name} {samples}: a batch has at least 1 sample")
        self.chosen  # noqa: B018  malformed policies are refused before anything is traced

    @property
    def chosen(self) -> list[str] | None:
        return None if self.policies is None else [str(Policy.parse(policy)) for policy in self.policies]


@dataclass(frozen=True, repr=False)
class Plan:
    """The candidates that fit, best first.

    Attributes:
        candidates: traced policies at their best batch sizes, ranked by the target.
        architecture: the model's class.
        fixes: what less padding would save.
        holders: the largest holders of the peak of `best`.
        rejected: policies and launches that do not suit this model, each with the reason.
        kind, tokens: the kind of workload, such as "causal-lm", and the tokens of a sequence; 0 for none.
        data: the lengths of the dataset's rows in words; "" if all batches are alike.
        notes: assumptions of the traces, one sentence each.
    """

    candidates: list[Candidate]
    room: MemoryBudget
    model: str
    device: str
    target: str
    architecture: str
    fixes: list[Fix] = field(default_factory=list)
    holders: list[Holder] = field(default_factory=list)
    rejected: dict[str, str] = field(default_factory=dict)
    kind: str = ""
    tokens: int = 0
    data: str = ""
    notes: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=versions)

    def __repr__(self) -> str:
        return f"Plan({self.model} on {self.device}: {self.why})" if self.candidates else "Plan(no candidates)"

    @property
    def best(self) -> Candidate:
        """The pick."""
        return self.candidates[0]

    @property
    def frontier(self) -> list[Candidate]:
        """The Pareto frontier of the candidates in bytes reserved and samples a second."""
        return frontier(self.candidates)

    @property
    def why(self) -> str:
        """One sentence about the pick."""
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
        """The plan as JSON, for `from_json` and for a recipe's `--ac_policy plan.json`."""
        return json.dumps({**asdict(self), "best": {**asdict(self.best), "why": self.why}}, indent=2)

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "plan") -> Plan:
        """The plan that `to_json` wrote.

        Raises:
            UserError: the text is not a plan, or the plan was made with other versions than the installed ones.
        """
        plan = read_json(cls, text, source, "a plan; `ckpt-ft plan MODEL --output plan.json` writes one")
        here, made = versions(), plan.versions.items()
        changed = [f"{name} {old}, here {here.get(name, 'none')}" for name, old in made if here.get(name) != old]
        if changed:
            raise UserError(f"{source}: made with {'; '.join(changed)}: what fits may have changed; make it again")
        if not plan.candidates:
            raise UserError(f"{source}: a plan without candidates; make it again")
        better(plan.target)
        for candidate in plan.candidates:
            Policy.parse(candidate.policy)
        return plan

    def check_model(self, model: nn.Module, source: str = "plan") -> None:
        """Raises UserError if the plan was made for a model of another class."""
        from ckpt_ft.workloads.adapters import without_adapters  # imports torch

        ours = type(without_adapters(model)).__name__
        if ours != self.architecture:
            raise UserError(
                f"{source}: made for {self.model}, a {self.architecture}, and this is a {ours}; make a plan for it, "
                "or let 'auto' make one"
            )

    @property
    def speed(self) -> str:
        """The unit of the speeds, which are nominal on "cpu"."""
        return "nominal samples/s" if self.device == "cpu" and calibrated("cpu") is None else "samples/s"

    @property
    def candidates_table(self) -> Table:
        """The candidates as a table; the last column marks the pick and the frontier."""
        edge, shown = self.frontier, self.candidates
        rows: list[tuple[str, ...]] = [
            (
                candidate.policy,
                str(candidate.batch),
                format_bytes(candidate.peak),
                format_bytes(candidate.reserved),
                format_number(candidate.seconds),
                format_number(candidate.samples_per_second),
                candidate.bound or DASH,
                "pick" if candidate == self.best else "frontier" if candidate in edge else "",
            )
            for candidate in shown
        ]
        header = ["policy", "batch", "peak allocated", "reserved", "s/step", self.speed, "bound by", ""]
        if any(candidate.host for candidate in shown):
            header.insert(-1, "host memory")
            rows = [(*row[:-1], format_bytes(c.host), row[-1]) for c, row in zip(shown, rows, strict=True)]
        if any(candidate.launch for candidate in self.candidates):
            rows = [(c.launch.sharing if c.launch else "", *row) for c, row in zip(shown, rows, strict=True)]
            gpus = self.best.launch.processes if self.best.launch else 1
            title = f"{self.model} on {gpus} x {self.device}: bytes and samples of each GPU"
            return Table(title, ("launch", *header), rows, text=(0, 1, 7, len(header)))
        return Table(f"{self.model} on {self.device}", tuple(header), rows, text=(0, 6, len(header) - 1))

    def table(self) -> str:
        """The candidates as a Markdown table."""
        return markdown_table(self.candidates_table)

    def _repr_html_(self) -> str:
        held = table_html(holders_table(self.holders, self.best.peak))
        return fragment(f"Pick: {self.why}", table_html(self.candidates_table), held, *map(paragraph, self.notes))
