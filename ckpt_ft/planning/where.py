"""Which cards a model trains on: every card with full fine-tuning, LoRA and QLoRA, each at the batch that is fastest.

A trace depends on the card only through the kernels that run there, so cards with the same kernels share their traces
(`same_kernels`), and reserved bytes and seconds are computed for each card. The policies are ranked by the traces of
one card, scaled to each batch; every row of one card was traced alone, so it is the answer of `estimate` for its
card, policy and batch. A method that does not fit one card is tried with its frozen weights in host memory, then
under FSDP2, then on one card with shorter sequences; figures of several cards may be extended (depth.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from ckpt_ft.errors import UserError
from ckpt_ft.memory.gpus import GPU
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.memory.rules.cuda import same_kernels
from ckpt_ft.policy import Policy
from ckpt_ft.spec.command import command_for
from ckpt_ft.spec.flags import fields_of
from ckpt_ft.spec.launch import Launch
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.units import format_bytes
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.workload import Workload

from .budget import Candidate, MemoryBudget, memory_budget
from .depth import Shallow, suits
from .launches import SHARDED, Extended
from .methods import METHODS, method_of, named_method
from .scaled_traces import HIGH, LOW, Anchor, Estimates, Growth
from .search import blocks_to_swap, search, with_term
from .tracing import Key, Report, Traced, Tracer, on_card, run_tasks, trace_policies

CARDS = (
    "rtx-3060", "t4", "rtx-4060-ti-16gb", "l4", "rtx-3090", "rtx-4090", "rtx-5090", "a100-40gb", "l40s", "a6000",
    "a100-80gb", "h100", "h200", "b200",
)  # fmt: skip
POLICIES = ("none", "pointwise,head", "full,head")
MOST_BATCH = 256
_TOLERANCE = 0.05  # share of the largest batch that a search under FSDP2 may miss


@dataclass(frozen=True)
class Place:
    """How a method trains on a card.

    Attributes:
        tokens: of a sequence; 0 if the model takes none.
        gpus: how many of these cards; 0 if the largest allowed number does not suffice.
        policy, batch, peak_reserved, seconds: those of the fastest step that fits, on each card; empty if none fits.
        speed: tokens a second, or samples if the model takes no sequences, on all cards together.
        needed: if nothing fits, the smallest memory of a single card that works.
        dollars_per_hour: of all cards together; None without a price.
        command: trains with this method, policy and batch.
        host: bytes in host memory that the step needs; 0 if none.
        shorter: tokens of the longest sequence that fits one card, if none of `tokens` fits; else 0.
        extended: the figures were extended from those of a model with fewer blocks.
    """

    card: str
    method: str
    tokens: int
    gpus: int = 0
    policy: str = ""
    batch: int = 0
    peak_reserved: int = 0
    seconds: float = 0.0
    speed: float = 0.0
    needed: int = 0
    dollars_per_hour: float | None = None
    command: str = ""
    extended: bool = False
    host: int = 0
    shorter: int = 0

    @property
    def dollars_per_million(self) -> float | None:
        """Dollars for a million tokens, or samples; None without a price or a step that fits."""
        if self.dollars_per_hour is None or not self.speed:
            return None
        return self.dollars_per_hour / 3600 / self.speed * 1e6


Tell = Callable[[Place | str], None]  # takes a place that was found, or a line of progress


@dataclass
class Places:
    """The answer: a row for each method, length and card, and the methods that the model refuses, with the reason."""

    rows: list[Place] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    unit: str = "tokens"
    most_gpus: int = 8


def best_of(places: Iterable[Place]) -> tuple[Place, str] | None:
    """The cheapest place that fits, or the fastest for each GPU where no price is known, and that in words."""
    fit = [place for place in places if place.gpus]
    if not fit:
        return None
    best = min(fit, key=lambda place: (place.dollars_per_million or float("inf"), -place.speed / place.gpus))
    why = "cheapest" if best.dollars_per_million else "fastest for each GPU" if best.gpus > 1 else "fastest"
    return best, f"{why} on {best.gpus} x {best.card}"


def where(
    spec: TrainingSpec,
    cards: Sequence[GPU],
    *,
    methods: Sequence[str] = tuple(METHODS),
    lengths: Sequence[int | None] = (None,),
    policies: Sequence[str] = POLICIES,
    most_gpus: int = 8,
    prices: dict[str, float] | None = None,
    jobs: int = 0,
    report: Report | None = None,
) -> Places:
    """Returns how `spec` trains on each card with each method, at each number of tokens of a sequence.

    Args:
        lengths: tokens of a sequence; None for the spec's own.
        policies: those to choose from, the one of the fewest bytes last; the fastest that fits is taken.
        most_gpus: of one kind of card, for a method that does not fit a single one.
        prices: dollars an hour of one card, by its name.

    Raises:
        UserError: an unknown method or model, or a spec that does not match the model.
    """
    methods = [*dict.fromkeys(map(named_method, methods))]
    # in bfloat16, cards before Ampere run another attention kernel, so their policies are ranked separately
    kinds: dict[bool, list[GPU]] = {}
    for card in cards:
        kinds.setdefault(card.arch >= (8, 0), []).append(card)
    tasks = [
        (method, length, partial(_on_cards, method, method_of(sized, method), same, policies, most_gpus))
        for length, sized in ((length, spec.edit(seq_length=length or spec.data.seq_length)) for length in lengths)
        for method in methods
        for same in kinds.values()
    ]
    report = report or (lambda line: None)
    found: dict[tuple[str, int | None, str], Place] = {}
    refused: dict[str, str] = {}
    reported: list[Place] = []
    total = len(lengths) * len(methods) * len(cards)

    def tell(said: Place | str) -> None:
        if isinstance(said, str):
            report(f"{len(reported)} of {total}: {said}")
            return
        reported.append(_priced(said, prices or {}))
        best = best_of(reported)
        report(f"{len(reported)} of {total}: " + (f"{best[0].method} {best[1]}" if best else "none fits"))

    for task, answer in run_tasks([run for *_, run in tasks], jobs, tell):
        method, length, _ = tasks[task]
        if isinstance(answer, str):
            refused[method] = answer
        else:
            found.update({(method, length, place.card): place for place in answer})
    unit = "tokens" if all(place.tokens for place in found.values()) else "samples"
    if not found:
        raise UserError("; ".join(dict.fromkeys(refused.values())))
    rows = [
        _priced(found[key], prices or {})
        for length in lengths
        for method in methods
        for card in cards
        if (key := (method, length, card.name)) in found
    ]
    return Places(rows, refused, unit, most_gpus)


def _priced(place: Place, prices: dict[str, float]) -> Place:
    price = prices.get(place.card)
    return place if price is None else replace(place, dollars_per_hour=price * max(place.gpus, 1))


def _on_cards(
    method: str, spec: TrainingSpec, cards: Sequence[GPU], policies: Sequence[str], most_gpus: int, tell: Tell
) -> list[Place] | str:
    """The places of one method on these cards, each reported at once; the reason if the model refuses the method."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            method_on = _Method(method, spec, cards, list(policies), tell)
            found = []
            for card in cards:
                found.append(method_on.place(card, most_gpus))
                tell(found[-1])
            return found
        except UserError as error:
            return str(error)


class _Method:
    """One method in one process and in several, on cards for which policies rank alike."""

    def __init__(self, method: str, spec: TrainingSpec, cards: Sequence[GPU], policies: list[str], tell: Tell) -> None:
        self.method, self.spec = method, spec
        self.workload = load(spec, cards[0])
        weights = sum(parameter.nbytes for parameter in self.workload.model.parameters())
        largest = max(cards, key=lambda card: self._room(card).limit)
        count = -(-weights // self._room(largest).limit)
        tell(f"{method} takes at least {count} x {largest.name}: its weights have {format_bytes(weights)}")
        moves = self.workload.launch is not None or any(Policy.parse(policy).swap for policy in policies)
        self.policies = policies if count == 1 or moves else policies[-1:]  # no policy makes such weights fit
        self.tokens = self.workload.shape.get("seq_length", 0)
        self.traces: dict[tuple[Any, int, int], list[Tracer]] = {}  # by kernels, number of cards and of models
        self.sharded_growth = Growth(LOW, HIGH)
        tracer = self._tracers(cards[0], 1)[0].tracer
        tracer.all((policy, batch) for batch in (LOW, HIGH) for policy in self.policies)  # a session for each batch
        self.first = Estimates(tracer, self._room(cards[0]), most=MOST_BATCH)
        self.first.trace_candidates(self.policies)
        if not self.first.anchors:  # the last one does not suit the model
            self.policies = policies
            self.first.trace_candidates(policies)
        if not self.first.anchors:
            raise UserError("; ".join(self.first.rejected.values()))

    def _room(self, card: GPU, launch: Launch | None = None) -> MemoryBudget:
        return memory_budget(None, card, None, launch, self.spec.host.host_memory)

    def place(self, card: GPU, most_gpus: int) -> Place:
        """The place on `card`."""
        room, (tracer,) = self._room(card), self._tracers(card, 1)
        estimates = replace(
            self.first, tracer=tracer, room=room, scaled={}, bests={}, typical_seconds={},
            anchors={policy: on_card(trace, card) for policy, trace in self.first.anchors.items()},
        )  # fmt: skip
        lean = min(self.first.anchors, key=lambda policy: self.first.reserved(policy, LOW))  # beside sharded weights
        found = search(estimates, self.policies, shown=1) if estimates.floor(lean, 1) <= room.limit else []
        blocks = 0 if found or Policy.parse(lean).swap else blocks_to_swap(self.workload)[0]
        if blocks:
            found = search(estimates, [with_term(lean, f"swap:{blocks}")], shown=1)
        if found:
            return self._found(card, 1, found[0])
        for gpus in (2**n for n in range(1, most_gpus.bit_length())):
            best = self._largest(card, gpus, lean)
            if best is not None:
                return self._found(card, gpus, best)
        for tokens in (self.tokens // 2**n for n in range(1, 4)) if self.tokens else ():
            (trace,) = trace_policies(tracer.workload, [lean], tracer.workload.step(1, tokens))
            if isinstance(trace, StepTrace) and room.holds(trace):
                return self._found(card, 1, Candidate.of(lean, 1, trace, self.spec.data.accumulation), tokens)
        one = Candidate.of(lean, 1, tracer.trace_of(lean, 1), self.spec.data.accumulation)
        return Place(card.name, self.method, self.tokens, needed=room.needs(one))

    def _largest(self, card: GPU, gpus: int, policy: str) -> Candidate | None:
        """The largest batch that fits each of several cards; None if no sample fits."""
        room, anchor = self._room(card, self._of(gpus).launch.launch), self.first.anchors[policy]
        sizes = zip(anchor.storages, self.first.growth.sizes(Anchor(anchor, LOW), 1), strict=True)
        share = [nbytes // gpus if storage.category in SHARDED else nbytes for storage, nbytes in sizes]
        if anchor.requested_with(share) > room.limit:
            return None
        *few, tracer = self._tracers(card, gpus, policy)
        more: dict[str, Any] = {"most": MOST_BATCH, "tolerance": _TOLERANCE, "growth": self.sharded_growth}
        shallow = self._several[1]
        if few and shallow is not None:
            estimates: Estimates = Extended(tracer, room, **more, few=few[0], shallow=shallow)
        else:
            estimates = Estimates(tracer, room, **more)
        return next(iter(search(estimates, [policy], shown=1)), None)

    def _of(self, gpus: int) -> TrainingSpec:
        """The spec on that many cards, under FSDP2 if there are several."""
        if gpus == 1:
            return self.spec
        storage = {"quant_storage": self.spec.precision.dtype} if self.spec.quantisation.load_in_4bit else {}
        return self.spec.edit(**fields_of({"launch": "fsdp2", "processes": gpus}), **storage)

    @cached_property
    def _several(self) -> tuple[Workload, Shallow | None]:
        """The model for several cards, and two models with fewer blocks; None if the model is not deep."""
        whole = load(self._of(2), self.workload.device)
        return whole, Shallow.of(whole)

    def _tracers(self, card: GPU, gpus: int, policy: str = "none") -> list[_CardTracer]:
        """Traces on that many such cards: of the whole model, or of the two shallow ones."""
        models: Sequence[Workload] = [self.workload]
        if gpus > 1:
            whole, shallow = self._several
            models = shallow.workloads if shallow is not None and suits(policy) else [whole]
        key = same_kernels(card), gpus, len(models)
        if key not in self.traces:
            launch = self._of(gpus).launch.launch
            self.traces[key] = [Tracer(replace(one, device=card, launch=launch)) for one in models]
        return [_CardTracer(tracer, card) for tracer in self.traces[key]]

    def _found(self, card: GPU, gpus: int, best: Candidate, tokens: int = 0) -> Place:
        """The place of a candidate; tokens: of its sequences, 0 for the asked ones."""
        spec = self._of(gpus).edit(policy=best.policy, batch_size=best.batch, device=card.name)
        speed = best.samples_per_second * gpus * (tokens or self.tokens or 1)
        figures = best.policy, best.batch, best.reserved, best.seconds, speed
        command = command_for(spec, self.workload.kind, tokens or self.tokens)
        extended = len(self._tracers(card, gpus, best.policy)) > 1
        return Place(
            card.name, self.method, self.tokens, gpus, *figures, command=command, extended=extended, host=best.host,
            shorter=tokens,
        )  # fmt: skip


class _CardTracer(Tracer):
    """The traces of another tracer, each made alone, with the bytes and seconds of `card`."""

    def __init__(self, tracer: Tracer, card: GPU) -> None:
        super().__init__(replace(tracer.workload, device=card))
        self.tracer, self.card = tracer, card

    def _missing(self, wanted: Iterable[Key], alone: bool) -> list[list[Key]]:
        return super()._missing(wanted, True)

    def session(self, keys: list[Key], typical: bool) -> list[Traced]:
        return [on_card(trace, self.card) for trace in self.tracer.all(keys, alone=True)]
