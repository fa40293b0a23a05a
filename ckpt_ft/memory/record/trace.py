"""StepTrace: training steps as plain data, with every allocation and free in order, and its op, module and phase.

tracker.py makes it from fake tensors (a prediction) or from real CPU ones (a measurement). Peaks, breakdown, timeline,
reserved bytes and seconds are functions of the record; nothing else in this project computes memory. For a GPU, a
storage counts as the block of the caching allocator that holds it (allocator/); for "cpu", as the requested bytes.
"""

from __future__ import annotations

import json
import pickle
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, islice, starmap
from operator import attrgetter, sub
from pathlib import Path
from typing import Any

from ckpt_ft.errors import UserError
from ckpt_ft.export.holders import Holder, group_holders
from ckpt_ft.export.timeline import HOST_COLOURS
from ckpt_ft.files import write
from ckpt_ft.memory.allocator.replay import AllocatorHistory, Replay, allocator_history, replay
from ckpt_ft.memory.allocator.settings import expandable_segments
from ckpt_ft.memory.cost.schedule import Host, Parts, Span, schedule, step_seconds
from ckpt_ft.memory.gpus import GPU, calibrated, find_gpu
from ckpt_ft.spec.launch import Launch
from ckpt_ft.units import format_bytes

from .events import CATEGORIES, EMPTIED, PHASES, Op, Storage, columns_of


@dataclass(frozen=True, slots=True)
class AllocationLifetime:
    """One allocation of the measured step, alive at the moments `made` to `freed - 1`.

    Moment 0 is before the step's first event, moment k after its k-th. nbytes: as the device counts them. freed: None
    for an allocation that outlives the step.
    """

    storage: Storage
    nbytes: int
    made: int
    freed: int | None


@dataclass(frozen=True, repr=False)
class StepTrace:
    """Training steps, recorded. Figures are those of the measured step: from the last "step" mark to the end.

    device: "cpu" or the name of a GPU.
    events: i >= 0 allocates storage i, ~i frees it; in order.
    marks: (number of events before it, name); the name is a phase that begins there, "step" where a call of the user's
        step begins, or "empty_cache" for a call of torch.cuda.empty_cache().
    notes: assumptions of the record, one sentence each, such as the case taken for a data-dependent op.
    gpu: the GPU it was traced for, if that GPU is not in the table of gpus.py.
    micro_batches: of the step; may exceed the number that was run. The others are then like the second one.
    launch: the distributed launch of the step; the trace is of its rank 0.
    alloc_conf: options of the caching allocator, as in PYTORCH_CUDA_ALLOC_CONF.
    source: "measured" on real tensors or "predicted" on fake ones.
    """

    device: str
    storages: Sequence[Storage]
    events: Sequence[int]
    ops: Sequence[Op] = field(default_factory=list)
    marks: Sequence[tuple[int, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    gpu: GPU | None = None
    micro_batches: int = 1
    launch: Launch | None = None
    alloc_conf: str = ""
    source: str = "measured"

    def __getstate__(self) -> dict[str, Any]:
        """The state for pickle, by columns: rows take five times as long, and plans send traces between processes."""
        return {**vars(self), "storages": columns_of(self.storages), "ops": columns_of(self.ops)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        kinds = {"storages": Storage, "ops": Op}
        rows = {name: list(starmap(kind, zip(*state[name], strict=True))) for name, kind in kinds.items()}
        vars(self).update({**state, **rows})

    def __repr__(self) -> str:
        return f"StepTrace({self.device}: {len(self.ops)} ops, peak allocated {format_bytes(self.peak_allocated)})"

    @cached_property
    def replay(self) -> Replay:
        """Bytes allocated and reserved after each event, as `device` counts them."""
        return self.replay_with([storage.nbytes for storage in self.storages])

    def replay_with(self, sizes: Sequence[int], capacity: int | None = None, until: int | None = None) -> Replay:
        """The replay with other sizes of the storages; `capacity` and `until` are those of allocator/replay.py."""
        if self.device != "cpu" or capacity is not None:
            expandable = expandable_segments(self.alloc_conf)
            return replay(sizes, self.events, expandable, capacity, self.emptied, self._streams, until)
        allocated = list(accumulate(sizes[i] if i >= 0 else -sizes[~i] for i in self.events))
        return Replay(allocated, list(accumulate(allocated, max)))

    def allocator_history(self) -> AllocatorHistory:
        """Addresses and segments of the caching allocator, event by event; for "cpu" too."""
        sizes = [storage.nbytes for storage in self.storages]
        expandable = expandable_segments(self.alloc_conf)
        return allocator_history(sizes, self.events, expandable, self.emptied, self._streams)

    @property
    def _streams(self) -> list[str]:
        return [storage.stream for storage in self.storages]

    def requested_with(self, sizes: Sequence[int]) -> int:
        """Peak of the requested bytes with storages of these sizes: a lower bound of the reserved bytes."""
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
    def peak_host(self) -> int:
        """Peak bytes in host memory during the measured step: offloaded tensors, weights and optimizer states."""
        return max(self._host_bytes[max(self.start - 1, 0) :], default=0)

    @property
    def at_host_peak(self) -> dict[str, int]:
        """Bytes of each category in host memory at its peak; they add up to `peak_host`."""
        return self._at_host_peak("category", CATEGORIES)

    @property
    def host_kinds(self) -> dict[str, int]:
        """Bytes at the peak of host memory that are pinned, pageable and managed; they add up to `peak_host`."""
        return self._at_host_peak("host_kind", HOST_COLOURS)

    def _at_host_peak(self, column: str, names: Iterable[str]) -> dict[str, int]:
        if not self.peak_host:
            return {}
        totals = {"": 0, **dict.fromkeys(names, 0)}
        for index, change in islice(self._changes(host=True), self.host_peak_at + 1):
            totals[getattr(self.storages[max(index, ~index)], column)] += change
        return {name: nbytes for name, nbytes in totals.items() if nbytes}

    @property
    def host_peak_at(self) -> int:
        """The first event that reaches the measured step's peak in host memory."""
        held = self._host_bytes
        return max(range(max(self.start - 1, 0), len(held)), key=held.__getitem__, default=-1)

    @cached_property
    def _host_bytes(self) -> list[int]:
        return list(accumulate(self.storages[i].host if i >= 0 else -self.storages[~i].host for i in self.events))

    @property
    def phase_marks(self) -> list[tuple[int, str]]:
        """(events so far, phase that begins there) of the measured step."""
        return [(at, name) for at, name in self.marks if at >= self.start and name in PHASES]

    @property
    def peaks(self) -> dict[str, int]:
        """Peak bytes of each phase of the measured step, resident memory included; 0 for a phase that did not run.

        Phases that `Tracker.enter` began follow those of every step.
        """
        marks = [(at, name) for at, name in self.marks if at >= self.start and name not in ("step", EMPTIED)]
        peaks = dict.fromkeys(PHASES, 0)
        ends = [at for at, _ in marks[1:]] + [len(self.events)]
        for (begin, phase), end in zip(marks, ends, strict=False):
            peaks[phase] = max(peaks.get(phase, 0), self.replay.peak_allocated(begin, end))
        return peaks

    @property
    def peak_at(self) -> int:
        """The first event that reaches the measured step's peak."""
        allocated = self.replay.allocated
        return max(range(max(self.start - 1, 0), len(allocated)), key=allocated.__getitem__, default=0)

    def _changes(self, host: bool = False) -> Iterator[tuple[int, int]]:
        """Each event with the allocated bytes that it adds; those in host memory if `host`."""
        held = self._host_bytes if host else self.replay.allocated
        return zip(self.events, map(sub, held, [0, *held]), strict=False)

    def live_at(self, event: int) -> list[tuple[Storage, int]]:
        """The storages alive after `event`, each with the bytes it takes on `device`."""
        alive: dict[int, int] = {}
        for index, change in islice(self._changes(), max(event + 1, 0)):
            if index >= 0:
                alive[index] = change
            else:
                del alive[~index]
        return [(self.storages[index], nbytes) for index, nbytes in alive.items() if not self.storages[index].host]

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
        held = (Holder(*key, sum(sizes), len(sizes)) for key, sizes in groups.items())
        return sorted(held, key=attrgetter("nbytes"), reverse=True)[:n]

    def grouped_holders(self, n: int = 10) -> list[Holder]:
        """The `n` largest holders of the peak, with a model's repeated layers merged, as "layers.*.mlp"."""
        return group_holders(self.holders(len(self.storages)))[:n]

    def module_activations(self) -> dict[str, int]:
        """Bytes of activations of each module that are live when the measured step's first backward begins."""
        begins = [at for at, name in self.phase_marks if name == "backward"]
        totals: dict[str, int] = defaultdict(int)
        for storage, nbytes in self.live_at(begins[0] - 1) if begins else []:
            if storage.category == "activations":
                totals[storage.module] += nbytes
        return dict(totals)

    def timeline(self) -> list[dict[str, int]]:
        """Bytes by category after each event of the measured step; the first row is before the step."""
        totals = dict.fromkeys(CATEGORIES, 0)
        rows = []
        for at, (index, change) in enumerate(self._changes()):
            totals[self.storages[index if index >= 0 else ~index].category] += change
            if at >= self.start - 1:
                rows.append(dict(totals))
        return rows

    def lifetimes(self, host: bool = False) -> list[AllocationLifetime]:
        """Every allocation on the device, or in `host` memory, that the measured step sees, in the order of making."""
        live: dict[int, AllocationLifetime] = {}  # by storage
        found: list[AllocationLifetime] = []
        for at, (index, change) in enumerate(self._changes(host), 1 - self.start):
            if index >= 0:
                live[index] = AllocationLifetime(self.storages[index], change, max(at, 0), None)
            else:
                made = live.pop(~index)
                if at > 0:
                    found.append(replace(made, freed=at))
        there = (one for one in [*found, *live.values()] if bool(one.storage.host) is host)
        return sorted(there, key=attrgetter("made"))

    def moment_times(self, spans: Iterable[Span]) -> list[float]:
        """Seconds from the step's begin to each moment: when, in the schedule `spans`, the op of its event starts."""
        own = [span for span in spans if span.op.stream == span.stream == ""]
        begins = [0, *(span.op.at for span in own)]
        starts = list(accumulate((span.start for span in own), max, initial=0.0))
        return [0.0] + [starts[bisect_right(begins, at) - 1] for at in range(self.start, len(self.events))]

    @property
    def _card(self) -> GPU:
        """The card that the step was traced for; raises UserError for a CPU that was not calibrated."""
        if self.device != "cpu":
            return self.gpu or find_gpu(self.device)
        card = calibrated("cpu")
        if card is None:
            raise UserError(
                "a trace for 'cpu' has no seconds: measure them by `ckpt-ft calibrate`, or trace for a GPU by name"
            )
        return card

    @property
    def timed(self) -> bool:
        """Whether seconds can be predicted: for a GPU, or for the CPU of this machine after `ckpt-ft calibrate`."""
        return self.device != "cpu" or calibrated("cpu") is not None

    @property
    def seconds(self) -> float:
        """Predicted seconds of the measured step; raises UserError for a CPU that was not calibrated."""
        return self.seconds_parts.total

    @cached_property
    def seconds_parts(self) -> Parts:
        """`seconds` split into computing and waiting, and what bounds the step."""
        return self.seconds_on(self._card)

    def seconds_on(self, gpu: GPU, host: Host | None = None) -> Parts:
        """The seconds on `gpu` with ops issued by `host`; None is the host that such a card usually has.

        Managed memory that does not fit on the card is copied to it and back in each step.
        """
        seconds = self._seconds_on(gpu, host)
        paged = self.host_kinds.get("managed", 0)
        if not paged:
            return seconds
        moved = min(paged, max(0, paged + self.peak_reserved + gpu.context - gpu.memory))
        moving = 2 * moved / gpu.host_bandwidth
        return seconds + Parts(copies=moving, copying=moving)

    def _seconds_on(self, gpu: GPU, host: Host | None) -> Parts:
        start = self.start
        ops = [op for op in self.ops if op.at >= start]
        forwards = [at for at, name in self.marks if name == "forward" and at >= start]
        if self.micro_batches <= len(forwards):
            return step_seconds(ops, gpu, host, self.launch)
        ends = [at for at, name in self.marks if name in ("forward", "optimizer") and at > forwards[1]]
        end = min(ends, default=len(self.events))
        fewer = [op for op in ops if not (forwards[1] <= op.at < end and op.phase != "optimizer")]
        recorded, without = (step_seconds(kept, gpu, host, self.launch) for kept in (ops, fewer))
        return recorded + (recorded + without * -1) * (self.micro_batches - len(forwards))

    def schedule(self) -> Iterator[Span]:
        """When each op of the measured step runs; raises UserError for a CPU that was not calibrated."""
        start = self.start
        return schedule((op for op in self.ops if op.at >= start), self._card, None, self.launch)

    def plot(self, path: str | Path) -> Path:
        """Draw `timeline()` as stacked areas to `path`: PNG, SVG or PDF by its suffix.

        Raises:
            UserError: matplotlib is not installed, or the suffix is another one.
        """
        from ckpt_ft.export.plots import draw_step
        from ckpt_ft.export.timeline import Timeline

        return draw_step(path, Timeline.from_trace(self), f"one training step on {self.device}")

    def to_html(self, path: str | Path, title: str = "", limit: int | None = None) -> Path:
        """Write a page that shows every allocation of the step to `path`: one file, to be opened in a browser.

        limit: bytes that may be reserved, drawn as a line; None for the memory that the card leaves.
        """
        from ckpt_ft.export.page import step_page

        usable = None if self.device == "cpu" else self._card.usable
        return step_page(self, title, usable if limit is None else limit).write(path)

    def _repr_html_(self) -> str:
        from ckpt_ft.export.notebook import step_html

        return step_html(self)

    def to_snapshot(self, path: str | Path) -> Path:
        """Write the step as a PyTorch memory snapshot (a pickle) to `path`, for pytorch.org/memory_viz."""
        from ckpt_ft.export.memory_viz import snapshot

        return write(path, lambda partial: partial.write_bytes(pickle.dumps(snapshot(self))))

    def to_perfetto(self, path: str | Path) -> Path:
        """Write the step as Chrome trace events (JSON) to `path`, for ui.perfetto.dev.

        Raises:
            UserError: for "cpu", whose speed is not modelled.
        """
        from ckpt_ft.export.perfetto import trace_events

        return write(path, json.dumps(trace_events(self), separators=(",", ":")))

    def to_json(self) -> str:
        """The whole record as compact JSON; `from_json` reads it."""
        from ckpt_ft.export.trace_json import dumps

        return dumps(self)

    @classmethod
    def from_json(cls, text: str) -> StepTrace:
        """The trace that `to_json` wrote."""
        from pydantic import TypeAdapter

        from ckpt_ft.export.trace_json import loads

        values = loads(text)
        values["storages"] = [Storage(*row) for row in values["storages"]]
        values["ops"] = [Op(*row) for row in values["ops"]]
        values["gpu"] = TypeAdapter(GPU).validate_python(values["gpu"]) if values["gpu"] else None
        values["launch"] = TypeAdapter(Launch).validate_python(values["launch"]) if values["launch"] else None
        return cls(**values)
