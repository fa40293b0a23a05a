"""StepTrace: one record of training steps, every allocation and free in order, with its op, module and phase.

It is made by tracker.py, from fake tensors (a prediction) or real CPU ones (a measurement). Peak, breakdown, timeline,
reserved bytes and seconds are views of it: nothing in this project computes memory by a formula of its own. On a GPU a
storage counts as the caching allocator's block that holds it (allocator/), on "cpu" as the bytes that were asked
for.
"""

from __future__ import annotations

import json
import pickle
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, starmap
from pathlib import Path
from typing import Any

from ckpt_ft.errors import UserError
from ckpt_ft.files import write
from ckpt_ft.memory.allocator.replay import Replay, replay
from ckpt_ft.memory.allocator.settings import AllocatorSettings
from ckpt_ft.memory.gpus import GPU, find_gpu
from ckpt_ft.memory.record.views.perfetto import trace_events
from ckpt_ft.memory.record.views.snapshot import snapshot
from ckpt_ft.memory.record.views.step_view import STEP_TITLE, StepView
from ckpt_ft.page.document import Page, Section
from ckpt_ft.page.fragments import fragment, table_html
from ckpt_ft.spec.launch import Launch
from ckpt_ft.units import format_bytes

from .codec import dumps, loads
from .cost import Host, Parts, Span, schedule, step_seconds
from .events import CATEGORIES, EMPTIED, PHASES, Holder, Op, Storage, columns_of
from .holders import grouped, holders_table
from .timeline import Timeline


@dataclass
class StepTrace:
    """Training steps, recorded. Views answer for the measured step: from the last "step" mark to the end.

    events: i >= 0 allocates storage i, ~i frees it; in order.
    marks: (events so far, name); name is a phase that begins there, "step" where a call of the user's step begins, or
        "empty_cache" where it called torch.cuda.empty_cache().
    micro_batches: of the step, where it has more than were run; the second one stands for them too.
    launch: on how many processes it runs; this is rank 0 of them.
    alloc_conf: options of the caching allocator, as in PYTORCH_CUDA_ALLOC_CONF.
    notes: what the record assumes, one sentence each (the case taken for a data-dependent op, say).
    gpu: the GPU it was traced for where that is not one of gpus.py's names.
    source: "measured" on real tensors or "predicted" on fake ones.
    """

    device: str
    storages: list[Storage]
    events: list[int]
    ops: list[Op] = field(default_factory=list)
    marks: list[tuple[int, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    gpu: GPU | None = None
    micro_batches: int = 1
    launch: Launch | None = None
    alloc_conf: str = ""
    source: str = "measured"

    def __getstate__(self) -> dict[str, Any]:
        """For pickle, which takes five times as long over records one by one: a plan's traces are made elsewhere."""
        return {**vars(self), "storages": columns_of(self.storages), "ops": columns_of(self.ops)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.storages = list(starmap(Storage, zip(*state["storages"], strict=True)))
        self.ops = list(starmap(Op, zip(*state["ops"], strict=True)))

    @cached_property
    def replay(self) -> Replay:
        """Bytes allocated and reserved after each event, as `device` counts them."""
        return self.replay_with([storage.nbytes for storage in self.storages])

    def replay_with(self, sizes: Sequence[int], capacity: int | None = None) -> Replay:
        """The same with storages of these sizes.

        capacity: bytes that the allocator can reserve: it gives cached segments back, or runs out. None has no end.
        """
        if self.device != "cpu" or capacity is not None:
            settings = AllocatorSettings.parse(self.alloc_conf)
            streams = [storage.stream for storage in self.storages]
            return replay(sizes, self.events, settings, capacity, self.emptied, streams if any(streams) else ())
        allocated = list(accumulate(sizes[i] if i >= 0 else -sizes[~i] for i in self.events))
        return Replay(allocated, list(accumulate(allocated, max)))

    def requested_with(self, sizes: Sequence[int]) -> int:
        """The most bytes asked for at any moment with storages of these sizes: no fewer are ever reserved for them."""
        return max(accumulate(sizes[i] if i >= 0 else -sizes[~i] for i in self.events), default=0)

    @property
    def emptied(self) -> frozenset[int]:
        """The events before which the step called torch.cuda.empty_cache()."""
        return frozenset(at for at, name in self.marks if name == EMPTIED)

    @property
    def start(self) -> int:
        """The event at which the measured step begins."""
        return max((at for at, name in self.marks if name == "step"), default=0)

    @property
    def peak_allocated(self) -> int:
        """Bytes: torch.cuda.max_memory_allocated() of the measured step."""
        return self.replay.peak_allocated(self.start)

    @property
    def peak_reserved(self) -> int:
        """Bytes: torch.cuda.max_memory_reserved() of the process, warm-up included; on "cpu" its peak allocated."""
        return self.replay.peak_reserved()

    @property
    def phase_marks(self) -> list[tuple[int, str]]:
        """(events so far, phase that begins there) of the measured step."""
        return [(at, name) for at, name in self.marks if at >= self.start and name in PHASES]

    @property
    def peaks(self) -> dict[str, int]:
        """Peak bytes of each phase of the measured step, with what was resident; 0 for a phase not entered."""
        peaks, marks = dict.fromkeys(PHASES, 0), self.phase_marks
        ends = [at for at, _ in marks[1:]] + [len(self.events)]
        for (begin, phase), end in zip(marks, ends, strict=True):
            peaks[phase] = max(peaks[phase], self.replay.peak_allocated(begin, end))
        return peaks

    @property
    def peak_at(self) -> int:
        """The event that reaches the measured step's peak (the first, should several)."""
        allocated = self.replay.allocated
        return max(range(max(self.start - 1, 0), len(allocated)), key=allocated.__getitem__, default=0)

    def live_at(self, event: int) -> list[tuple[Storage, int]]:
        """The storages alive after `event`, each with the bytes it takes on `device`."""
        alive: dict[int, int] = {}
        before = 0
        for index, after in zip(self.events[: event + 1], self.replay.allocated, strict=False):
            if index >= 0:
                alive[index] = after - before
            else:
                del alive[~index]
            before = after
        return [(self.storages[index], nbytes) for index, nbytes in alive.items()]

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes of each category at the peak; they add up to `peak_allocated`."""
        totals = dict.fromkeys(CATEGORIES, 0)
        for storage, nbytes in self.live_at(self.peak_at):
            totals[storage.category] += nbytes
        return totals

    def holders(self, n: int = 10) -> list[Holder]:
        """The `n` largest groups of storages at the peak, one group per module, op and category."""
        groups: dict[tuple[str, str, str], list[int]] = defaultdict(list)
        for storage, nbytes in self.live_at(self.peak_at):
            groups[storage.module, storage.op, storage.category].append(nbytes)
        held = [Holder(*key, sum(sizes), len(sizes)) for key, sizes in groups.items()]
        return sorted(held, key=lambda holder: -holder.nbytes)[:n]

    def grouped_holders(self, n: int = 10) -> list[Holder]:
        """The `n` largest holders of the peak, with a model's repeated layers taken together, as "layers.*.mlp"."""
        return grouped(self.holders(len(self.storages)))[:n]

    def module_activations(self) -> dict[str, int]:
        """Bytes of activations that each module's forward left when the measured step's first backward begins."""
        begins = [at for at, name in self.marks if name == "backward" and at >= self.start]
        totals: dict[str, int] = defaultdict(int)
        for storage, nbytes in self.live_at(begins[0] - 1) if begins else []:
            if storage.category == "activations":
                totals[storage.module] += nbytes
        return dict(totals)

    def timeline(self) -> list[dict[str, int]]:
        """Bytes by category after each event of the measured step; the first row is what was resident."""
        totals = dict.fromkeys(CATEGORIES, 0)
        rows, before = [], 0
        for at, (index, after) in enumerate(zip(self.events, self.replay.allocated, strict=False)):
            storage = self.storages[index if index >= 0 else ~index]
            totals[storage.category] += after - before
            before = after
            if at >= self.start - 1:
                rows.append(dict(totals))
        return rows

    @property
    def _card(self) -> GPU:
        """What the step was traced for; raises UserError for "cpu"."""
        if self.device == "cpu":
            raise UserError("a trace for 'cpu' has no seconds: its speed is not modelled; trace for a GPU by name")
        return self.gpu or find_gpu(self.device)

    @property
    def seconds(self) -> float:
        """Predicted seconds of the measured step; raises UserError for "cpu", whose speed is not modelled."""
        return self.seconds_parts.total

    @cached_property
    def seconds_parts(self) -> Parts:
        """Where `seconds` go: what computes, what is waited for, and what bounds the step."""
        return self.seconds_on(self._card)

    def seconds_on(self, gpu: GPU, host: Host | None = None) -> Parts:
        """The same were its kernels run on `gpu`, issued by `host` (None: one that such a card usually has)."""
        start = self.start
        ops = [op for op in self.ops if op.at >= start]
        forwards = [at for at, name in self.marks if name == "forward" and at >= start]
        if self.micro_batches <= len(forwards):
            return step_seconds(ops, gpu, host, self.launch)
        ends = [*forwards[2:], *(at for at, name in self.marks if name == "optimizer" and at > forwards[1])]
        end = min(ends, default=len(self.events))
        fewer = [op for op in ops if not (forwards[1] <= op.at < end and op.phase != "optimizer")]
        recorded, without = (step_seconds(kept, gpu, host, self.launch) for kept in (ops, fewer))
        return recorded + (recorded + without * -1) * (self.micro_batches - len(forwards))

    def schedule(self) -> Iterator[Span]:
        """When each op of the measured step runs; raises UserError for "cpu", whose speed is not modelled."""
        return self.schedule_on(self._card)

    def schedule_on(self, gpu: GPU, host: Host | None = None) -> Iterator[Span]:
        """The same were its kernels run on `gpu`, issued by `host`."""
        start = self.start
        return schedule((op for op in self.ops if op.at >= start), gpu, host, self.launch)

    def plot(self, path: str | Path) -> Path:
        """Draw `timeline()` as stacked areas to `path`: PNG, SVG or PDF by its suffix.

        Raises:
            UserError: matplotlib is not installed, or the suffix is another.
        """
        return Timeline.from_trace(self).draw(path, f"one training step on {self.device}")

    def to_html(self, path: str | Path, title: str = "", limit: int | None = None) -> Path:
        """Write a page that shows the step, every allocation of it, to `path`: one file, to be opened in a browser.

        limit: bytes that may be reserved, drawn as a line; None for what the card leaves.
        """
        if limit is None and self.device != "cpu":
            limit = self._card.usable
        view = StepView.from_trace(self, title or f"a step on {self.device}", limit)
        return Page(view.name, f"{self.source}, {self.device}", [Section("step", STEP_TITLE, view)]).write(path)

    def _repr_html_(self) -> str:
        reserved = "" if self.device == "cpu" else f", {format_bytes(self.peak_reserved)} reserved"
        said = f"A step on {self.device}, {self.source}: peak {format_bytes(self.peak_allocated)} allocated{reserved}"
        held = table_html(holders_table(self.grouped_holders(6), self.peak_allocated))
        return fragment(said, Timeline.from_trace(self, 400).svg(), held)

    def to_snapshot(self, path: str | Path) -> Path:
        """Write the step as a memory snapshot of PyTorch, for pytorch.org/memory_viz, to `path` (a pickle)."""
        return write(path, lambda partial: partial.write_bytes(pickle.dumps(snapshot(self))))

    def to_perfetto(self, path: str | Path) -> Path:
        """Write the step as Chrome trace events, for ui.perfetto.dev, to `path` (JSON).

        Raises:
            UserError: for "cpu", whose speed is not modelled.
        """
        return write(path, json.dumps(trace_events(self), separators=(",", ":")))

    def to_json(self) -> str:
        """Everything recorded, as compact JSON: rows under "fields", texts listed once."""
        return dumps(self)

    @classmethod
    def from_json(cls, text: str) -> StepTrace:
        """The trace that `to_json` wrote."""
        return cls(**loads(text))
