"""Which parameters ZeRO-3 gathers when, and when it lets go of them, by the rules of DeepSpeed's source.

Rules, with their places in deepspeed/runtime/zero (0.19.8): every module gathers its own parameters before its forward
and before its backward, and lets go of them after each (parameter_offload.py: _register_deepspeed_module). The first
step records in which order; from then on what comes next is gathered ahead, and what is used again soon is kept
(partitioned_param_coordinator.py: fetch_sub_module, release_sub_module). Gathering is on a stream of its own, of several
parameters through one buffer, which lives until the last of them is asked for (partition_parameters.py). Where a forward
looks at another module's parameter, it is that module's from then on too (ZeROOrderedDict); PEFT's does.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .streams import Streams
from .zero_options import ZeroOptions

_NEVER = -(10**10)


@dataclass(eq=False)
class Shard:
    """A parameter in parts, of which this rank has `part`; `number` is its place in the model.

    persistent: too small to be let go of. users: modules that are running on it.
    """

    parameter: nn.Parameter
    number: int
    part: Tensor
    persistent: bool
    shape: torch.Size
    flight: _Flight | None = None  # that it is being gathered by
    here: bool = False
    users: set[_Module] = field(default_factory=set)

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def free(self) -> None:
        """Let go of the whole parameter."""
        self.parameter.data = torch.empty(0, dtype=self.part.dtype)
        self.here = False


class _Flight:
    """Parameters of one dtype that are gathered together."""

    def __init__(self, shards: list[Shard], group: dist.ProcessGroup) -> None:
        self.shards, self.over = shards, False
        for shard in shards:
            shard.flight = self
        size = sum(shard.part.numel() for shard in shards)
        self.buffer = torch.empty(size * group.size(), dtype=shards[0].part.dtype)
        part = shards[0].part
        if len(shards) > 1:
            part = self.buffer.narrow(0, size * group.rank(), size)
            torch.cat([shard.part for shard in shards], out=part)
        group._allgather_base(self.buffer, part)

    def land(self) -> None:
        """All of its parameters are there: copied out of the buffer, unless it is one parameter's alone."""
        if self.over:
            return
        self.over, at = True, 0
        for shard in self.shards:
            whole = self.buffer.narrow(0, at, shard.numel)
            shard.parameter.data = (torch.cat([whole]) if len(self.shards) > 1 else whole).view(shard.shape)
            shard.here, at = True, at + shard.numel


@dataclass(eq=False)
class _Module:
    """A module's own parameters, and where its backward stands.

    recomputed: frozen parameters that were gathered for a forward that ran again within its backward.
    """

    shards: list[Shard]
    before: int = 0  # tensors of its output whose gradient has not come yet
    after: int = 0  # tensors of its input that no gradient has been made for yet
    recomputed: set[Shard] = field(default_factory=set)


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
        self._running: list[_Module] = []  # modules whose forward runs, while the whole model's does
        model.register_forward_pre_hook(lambda module, args: self._begin())
        for module in model.modules():
            own = {id(p): shards[id(p)] for p in module.parameters(recurse=False)}
            self._hook(module, _Module(sorted(own.values(), key=lambda shard: shard.number)))
            module.__dict__["_parameters"] = _Watched(module._parameters, lambda p: self._look(shards.get(id(p))))
        model.register_forward_hook(lambda module, args, output: self._running.clear())

    def _look(self, shard: Shard | None) -> None:
        """A forward looks at a parameter that is away."""
        if self._running and shard is not None and not shard.here and shard.flight is None:
            known = self._running[-1]
            known.shards = sorted({*known.shards, shard}, key=lambda shard: shard.number)
            _Flight([shard], self.group)
            self._land(shard)

    def _hook(self, module: nn.Module, known: _Module) -> None:
        def before_forward(module: nn.Module, args: Any) -> Any:
            if torch._C._current_graph_task_id() == -1:
                self._running.append(known)
            self._arrive(known, forward=True)
            known.after = 0
            return _on_tensors(lambda x: _AfterBackward.apply(x, self, known), args)

        def after_forward(module: nn.Module, args: Any, output: Any) -> Any:
            if torch._C._current_graph_task_id() == -1:
                self._running.pop()
            self._leave(known, forward=True)
            return _on_tensors(lambda x: _BeforeBackward.apply(x, self, known), output)

        module.register_forward_pre_hook(before_forward)
        module.register_forward_hook(after_forward)

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
                _Flight([shard], self.group)
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
    def _arrive(self, known: _Module, forward: bool) -> None:
        """Gather what `known` runs on, and what comes next (fetch_sub_module)."""
        if self._knows and (self._step >= len(self._order) or self._order[self._step] is not known):
            self._forget()
        if self._records:
            self._order.append(known)
        if not forward:
            self._in_backward[known] = None
        self._gather(shard for shard in known.shards if not shard.here and shard.flight is None)
        runs_again = forward and torch._C._current_graph_task_id() != -1
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
    def _leave(self, known: _Module, forward: bool) -> None:
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
                _Flight(together, self.group)

    def _land(self, shard: Shard) -> None:
        assert shard.flight is not None
        with self._streams.stream(self._stream):
            shard.flight.land()
        shard.flight = None

    def _release(self, shard: Shard) -> None:
        if shard.here and not shard.users:
            shard.free()
            self._live -= shard.numel

    # -- backward ---------------------------------------------------------------------------------------------------

    def before_backward(self, known: _Module) -> None:
        """A gradient of the module's output has come."""
        if known.before:
            self._arrive(known, forward=False)
            known.before -= 1

    def after_backward(self, known: _Module) -> None:
        """A gradient of the module's input is made."""
        known.after -= 1
        if not known.after:
            self._leave(known, forward=False)


class _Watched(dict[str, Any]):
    """A module's own parameters, and who is told when one is looked at by name."""

    def __init__(self, parameters: dict[str, Any], look: Callable[[Any], None]) -> None:
        super().__init__(parameters)
        self.look = look

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        self.look(parameter)
        return parameter


class _BeforeBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, fetcher: Fetcher, known: _Module) -> Tensor:
        ctx.asked = fetcher, known
        known.before += 1
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        fetcher, known = ctx.asked
        fetcher.before_backward(known)
        return gradient, None, None


class _AfterBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, fetcher: Fetcher, known: _Module) -> Tensor:
        ctx.asked = fetcher, known
        known.after += ctx.needs_input_grad[0]
        return given.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        fetcher, known = ctx.asked
        fetcher.after_backward(known)
        return gradient, None, None


def _on_tensors(function: Any, value: Any) -> Any:
    """`value` with `function` of each tensor in it (apply_to_tensors_only)."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_on_tensors(function, item) for item in value)
    if isinstance(value, dict):
        for key in value:
            value[key] = _on_tensors(function, value[key])
    return value
