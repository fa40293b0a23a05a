"""Which parameters ZeRO-3 gathers when, and when it lets go of them, by the rules of DeepSpeed's source.

Rules, with their places in deepspeed/runtime/zero (0.19.8): every module gathers its own parameters before its forward
and before its backward, and lets go of them after each (parameter_offload.py: _register_deepspeed_module). The first
step records in which order; from then on what comes next is gathered ahead, on a stream of its own, and what is used
again soon is kept (partitioned_param_coordinator.py: fetch_sub_module, release_sub_module). Where a forward looks at
another module's parameter, as PEFT's does, it is gathered for both from then on (ZeROOrderedDict).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from ckpt_ft.spec.launch import ZeroOptions

from .module_hooks import Around, Watched
from .shards import Flight, Shard
from .streams import Streams

_NEVER = -(10**10)


@dataclass(eq=False)
class _Module:
    """A module, told what it does, and the parameters that it runs on.

    recomputed: frozen parameters that were gathered for a forward that ran again within its backward.
    """

    fetcher: Fetcher
    shards: list[Shard]
    recomputed: set[Shard] = field(default_factory=set)

    def before_forward(self) -> None:
        if not _in_backward():
            self.fetcher.running.append(self)
        self.fetcher.arrive(self, forward=True)

    def after_forward(self) -> None:
        if not _in_backward():
            self.fetcher.running.pop()
        self.fetcher.leave(self, forward=True)

    def before_backward(self) -> None:
        self.fetcher.arrive(self, forward=False)

    def after_backward(self) -> None:
        self.fetcher.leave(self, forward=False)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class Fetcher:
    """Hooks on the modules of a model that gather `shards` for them."""

    def __init__(
        self, model: nn.Module, shards: dict[int, Shard], options: ZeroOptions, group: dist.ProcessGroup,
        streams: Streams,
    ) -> None:  # fmt: skip
        self.shards, self.options, self.group, self._streams = list(shards.values()), options, group, streams
        self._stream = streams.Stream() if options.overlap_comm else streams.current_stream()
        self._order: list[_Module] = []  # in which modules fetched
        self._records = self._knows = False  # the order of this step, or that of every step
        self._queue: deque[tuple[Shard, int]] = deque()  # what is still to be gathered in this step, and for when
        self._step = self._live = 0  # modules so far, elements gathered so far
        self._last: defaultdict[Shard, int] = defaultdict(lambda: _NEVER)  # the last step that it was gathered for
        self._in_backward: dict[_Module, None] = {}
        self.running: list[_Module] = []  # modules whose forward runs, while the whole model's does
        model.register_forward_pre_hook(lambda module, args: self._begin())
        for module in model.modules():
            own = {id(p): shards[id(p)] for p in module.parameters(recurse=False)}
            Around(module, _Module(self, sorted(own.values(), key=lambda shard: shard.number)))
            module.__dict__["_parameters"] = Watched(module._parameters, lambda p: self._look(shards.get(id(p))))
        model.register_forward_hook(lambda module, args, output: self.running.clear())

    def _look(self, shard: Shard | None) -> None:
        """A forward looks at a parameter that is away."""
        if self.running and shard is not None and not shard.here and shard.flight is None:
            known = self.running[-1]
            known.shards = sorted({*known.shards, shard}, key=lambda shard: shard.number)
            Flight([shard], self.group)
            self._land(shard)

    # -- steps ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _begin(self) -> None:
        """A forward of the whole model begins (reset_step)."""
        self._land_all()
        if not self._knows:
            self._knows, self._records = self._records, not self._records
        self._queue = deque()
        if self._knows:
            self._queue.extend((shard, step) for step, known in enumerate(self._order) for shard in known.shards)
        self._last.clear()
        self._step = self._live = 0

    def end_backward(self) -> None:
        """Let go of what modules hold whose backward had no end to be seen (release_backward_leftovers)."""
        while self._in_backward:
            known, _ = self._in_backward.popitem()
            for shard in {*known.shards, *known.recomputed}:
                shard.users.discard(known)
                if not shard.persistent:
                    self._release(shard)
            known.recomputed.clear()

    def release_all(self) -> None:
        """Before the step (partition_all_parameters)."""
        for shard in self.shards:
            if shard.flight is not None:
                self._land(shard)
            shard.users.clear()
            self._release(shard)

    def gather_persistent(self) -> None:
        """After the step (_post_step): each in a buffer of its own."""
        for shard in self.shards:
            if shard.persistent:
                Flight([shard], self.group)
                self._land(shard)

    def _forget(self) -> None:
        """The order is another than in the step before (_invalidate_trace)."""
        self._knows = False
        self._order = []
        self._queue.clear()
        self._last.clear()
        self._land_all()

    def _land_all(self) -> None:
        for shard in self.shards:
            if shard.flight is not None:
                self._land(shard)
                self._release(shard)

    # -- a module ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def arrive(self, known: _Module, forward: bool) -> None:
        """Gather what `known` runs on, and what comes next (fetch_sub_module)."""
        if self._knows and (self._step >= len(self._order) or self._order[self._step] is not known):
            self._forget()
        if self._records:
            self._order.append(known)
        if not forward:
            self._in_backward[known] = None
        self._gather(shard for shard in known.shards if not shard.here and shard.flight is None)
        runs_again = forward and _in_backward()
        for shard in known.shards:
            shard.users.add(known)
            if runs_again and self._in_backward and not shard.parameter.requires_grad:
                owner = next(reversed(self._in_backward))
                owner.recomputed.add(shard)
                shard.users.add(owner)
            if shard.flight is not None:
                self._land(shard)
        self._streams.current_stream().wait_stream(self._stream)
        if self._knows:
            self._gather_ahead(known)
        self._step += 1

    def _gather_ahead(self, known: _Module) -> None:
        needed = sum(self._last[shard] < self._step for shard in known.shards)
        for _ in range(min(needed, len(self._queue))):
            shard, step = self._queue.popleft()
            self._last[shard] = step
        room = min(self.options.max_live_parameters - self._live, self.options.prefetch_bucket_size or 0)
        ahead: dict[Shard, None] = {}
        elements = 0
        while self._queue and elements < room:
            shard, step = self._queue.popleft()
            self._last[shard] = max(self._last[shard], step)
            if not shard.here and shard.flight is None and shard not in ahead:
                ahead[shard] = None
                elements += shard.numel
        self._gather(ahead)

    @torch.no_grad()
    def leave(self, known: _Module, forward: bool) -> None:
        """Let go of what `known` ran on, unless it is used again soon (release_sub_module)."""
        shards = set(known.shards)
        gone = self._not_soon(known) if self._knows else set(shards)
        if not forward:
            gone |= {shard for shard in known.recomputed if not shard.persistent}
            shards |= known.recomputed
            known.recomputed.clear()
            self._in_backward.pop(known, None)
        for shard in shards:
            shard.users.discard(known)
            if shard in gone:
                self._release(shard)

    def _not_soon(self, known: _Module) -> set[Shard]:
        found = {s for s in known.shards if not s.persistent and self._last[s] <= self._step}
        passed = 0
        for module in self._order[self._step :] if found else ():
            if passed >= self.options.max_reuse_distance:
                break
            found.difference_update(module.shards)
            passed += sum(shard.numel for shard in module.shards)
        return found

    # -- parameters -------------------------------------------------------------------------------------------------

    def _gather(self, shards: Iterable[Shard]) -> None:
        kinds: defaultdict[torch.dtype, list[Shard]] = defaultdict(list)
        for shard in sorted(shards, key=lambda shard: shard.number):
            kinds[shard.part.dtype].append(shard)
            self._live += shard.numel
        with self._streams.stream(self._stream):
            for together in kinds.values():
                Flight(together, self.group)

    def _land(self, shard: Shard) -> None:
        assert shard.flight is not None
        with self._streams.stream(self._stream):
            shard.flight.land()
        shard.flight = None

    def _release(self, shard: Shard) -> None:
        if shard.here and not shard.users:
            shard.free()
            self._live -= shard.numel
