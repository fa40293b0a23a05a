"""ZeRO-3 by the rules of DeepSpeed's source, on fake tensors: partitioned parameters, gradients and optimizer states.

The rules, with their places in deepspeed/runtime/zero (0.19.8):

- Every parameter is cut into as many equal parts as there are ranks, the last one padded (partition_parameters.py:
  _partition_param). The parts of trained parameters lie in one buffer. Groups of them, of `sub_group_size` elements,
  have an fp32 copy, also if the parts are in fp32 (stage3.py: _create_fp16_partitions_with_defragmentation,
  _create_fp32_partitions, which compares a device with a name).
- Every module gathers its own parameters before its forward and before its backward, and releases them after each
  (parameter_offload.py: _register_deepspeed_module). The first step records the order. From then on, the next
  parameters are gathered ahead, on a stream of their own, and parameters that are used again soon are kept
  (partitioned_param_coordinator.py: fetch_sub_module, release_sub_module). If a forward reads another module's
  parameter, as PEFT's does, that is gathered for both from then on (ZeROOrderedDict).
- Several parameters are gathered through one buffer, which lives until the last of them is requested, and are copied
  out of it. A single one stays in its buffer (partition_parameters.py: all_gather_coalesced).
- A bucket of `reduce_bucket_size` elements and a buffer for the gradients of all parts live from beginning to end
  (_setup_for_real_optimizer). Gradients are copied to the bucket. A full bucket is reduce-scattered, from a copy in
  the order of ranks, and added to the parts' gradients (__add_grad_to_ipg_bucket, __avg_scatter_grads,
  partition_grads). Under Ulysses all gradients of the bucket are first copied to fp32, unless
  `seq_parallel_communication_data_type` says otherwise.
- A linear layer saves its parameter, not the gathered copy (linear.py: LinearFunctionForZeroStage3).
- The step updates one group of parts at a time, with an fp32 copy of its gradients, and then gathers the persistent
  parameters (step).
- If the optimizer is offloaded, the gradients of all parts, the groups' fp32 copies and their gradients are in host
  memory. What is reduced is copied there, and what has been added up comes back to the device once more, from where
  it is copied in fp32 (partition_grads, _offload_grad_partition_at_boundary). If parameters are offloaded, so are the
  parts, and a gather begins with copies of them on the device (_all_gather_dtype); persistent frozen ones stay.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ckpt_ft.compat.autograd import graph_task
from ckpt_ft.compat.modules import parameters_of
from ckpt_ft.compat.patches import patched
from ckpt_ft.memory.record.recorder import Recorder
from ckpt_ft.spec.launch import Launch, ZeroOptions

from .group import all_gather, reduce_scatter
from .streams import Streams
from .zero import ZeroOptimizer, joined, reduce_dtype

# -- hooks around modules ---------------------------------------------------------------------------------------------


def _deepspeeds(hook: Any) -> Any:
    """Mark a hook as DeepSpeed's, for code that checks which library a hook belongs to."""
    hook.stands_for = "deepspeed"
    return hook


class ModuleHooks:
    """Hooks around one module's forward and backward (deepspeed/runtime/zero/parameter_offload.py).

    They tell `fetcher` when the module's parameters are needed, and when no longer. An identity on each tensor of its
    input and output has its own backward. That of the first output begins the module's backward; that of the last
    input ends it. If no input needs a gradient, no end is seen.

    Attributes:
        recomputed: frozen parameters that were gathered for a forward that a checkpoint re-ran within its backward.
    """

    def __init__(self, module: nn.Module, shards: list[Shard], fetcher: Fetcher) -> None:
        self.shards, self.fetcher = shards, fetcher
        self.recomputed: set[Shard] = set()
        self.to_begin = 0  # output tensors whose gradient has not arrived yet
        self.to_end = 0  # tensors of its last input whose gradient is not computed yet
        module.register_forward_pre_hook(self._before_forward)
        module.register_forward_hook(self._after_forward)

    @_deepspeeds
    def _before_forward(self, module: nn.Module, args: Any) -> Any:
        if not _in_backward():
            self.fetcher.running.append(self)
        self.fetcher.arrive(self, forward=True)
        self.to_end = 0
        return _on_tensors(lambda x: _Input.apply(x, self), args)

    @_deepspeeds
    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not _in_backward():
            self.fetcher.running.pop()
        self.fetcher.leave(self, forward=True)
        return _on_tensors(lambda x: _Output.apply(x, self), output)


def _in_backward() -> bool:
    return graph_task() != -1


class _Output(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, around: ModuleHooks) -> Tensor:
        ctx.around = around
        around.to_begin += 1
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.around.to_begin:
            ctx.around.fetcher.arrive(ctx.around, forward=False)
            ctx.around.to_begin -= 1
        return gradient, None


class _Input(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, around: ModuleHooks) -> Tensor:
        ctx.around = around
        around.to_end += ctx.needs_input_grad[0]
        return given.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.around.to_end -= 1
        if not ctx.around.to_end:
            ctx.around.fetcher.leave(ctx.around, forward=False)
        return gradient, None


class ObservedParameters(dict[str, Any]):
    """A module's own parameters; `look` is called for each parameter read by name."""

    def __init__(self, parameters: dict[str, Any], look: Callable[[Any], None]) -> None:
        super().__init__(parameters)
        self.look = look

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        self.look(parameter)
        return parameter


def _on_tensors(function: Any, value: Any) -> Any:
    """Returns `value` with `function` applied to each tensor in it (apply_to_tensors_only)."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_on_tensors(function, item) for item in value)
    if isinstance(value, dict):
        for key in value:
            value[key] = _on_tensors(function, value[key])
    return value


# -- partitioned parameters -------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Shard:
    """A partitioned parameter.

    Attributes:
        number: its index in the model.
        part: this rank's part, in host memory if `on_host`.
        persistent: whether it is too small to be released.
        gathered: whether the whole parameter is there.
        users: modules that currently run with it.
    """

    parameter: nn.Parameter
    number: int
    part: Tensor
    persistent: bool
    shape: torch.Size
    all_gather: AllGather | None = None
    gathered: bool = False
    users: set[Any] = field(default_factory=set)
    on_host: bool = False

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def free(self) -> None:
        self.parameter.data = torch.empty(0, dtype=self.part.dtype)
        self.gathered = False


class AllGather:
    """An all-gather of parameters of one dtype through one buffer; it is in progress until `complete`."""

    def __init__(self, shards: list[Shard], group: dist.ProcessGroup, recorder: Recorder) -> None:
        self.shards, self.done = shards, False
        for shard in shards:
            shard.all_gather = self
        size = sum(shard.part.numel() for shard in shards)
        self.buffer = torch.empty(size * group.size(), dtype=shards[0].part.dtype)
        parts = [recorder.on_device(shard.part) if shard.on_host else shard.part for shard in shards]
        part = parts[0]
        if len(shards) > 1:
            part = self.buffer.narrow(0, size * group.rank(), size)
            torch.cat(parts, out=part)
        all_gather(self.buffer, part, group, async_op=True)

    def complete(self) -> None:
        """Complete the gather: copy the parameters out of the buffer, unless there is only one."""
        if self.done:
            return
        self.done, at = True, 0
        for shard in self.shards:
            whole = self.buffer.narrow(0, at, shard.numel)
            shard.parameter.data = (torch.cat([whole]) if len(self.shards) > 1 else whole).view(shard.shape)
            shard.gathered, at = True, at + shard.numel


# -- when parameters are gathered and released ------------------------------------------------------------------------


_NEVER = -(10**10)


class Fetcher:
    """Gathers `shards` for the modules of a model through hooks."""

    def __init__(
        self, model: nn.Module, shards: dict[int, Shard], options: ZeroOptions, group: dist.ProcessGroup,
        streams: Streams, recorder: Recorder,
    ) -> None:  # fmt: skip
        self.shards, self.options, self.group, self._streams = list(shards.values()), options, group, streams
        self.recorder = recorder
        self._stream = streams.Stream() if options.overlap_comm else streams.current_stream()
        self._order: list[ModuleHooks] = []  # modules in the order in which they gather
        self._records = self._knows = False  # whether this step records the order; whether the order is known
        self._queue: deque[tuple[Shard, int]] = deque()  # shards left to gather in this step, each with its module
        self._step = self._live = 0  # number of modules so far, number of gathered elements
        self._last: defaultdict[Shard, int] = defaultdict(lambda: _NEVER)  # the last step in which it was gathered
        self._in_backward: dict[ModuleHooks, None] = {}
        self.running: list[ModuleHooks] = []  # modules whose forward is running
        model.register_forward_pre_hook(lambda module, args: self._begin())
        for module in model.modules():
            own = {id(p): shards[id(p)] for p in module.parameters(recurse=False)}
            ModuleHooks(module, sorted(own.values(), key=lambda shard: shard.number), self)
            module.__dict__["_parameters"] = ObservedParameters(
                parameters_of(module), lambda p: self._look(shards.get(id(p)))
            )
        model.register_forward_hook(lambda module, args, output: self.running.clear())

    def _look(self, shard: Shard | None) -> None:
        """A forward reads a parameter that is not gathered."""
        if self.running and shard is not None and not shard.gathered and shard.all_gather is None:
            module = self.running[-1]
            module.shards = sorted({*module.shards, shard}, key=lambda shard: shard.number)
            AllGather([shard], self.group, self.recorder)
            self._complete(shard)

    # -- steps ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _begin(self) -> None:
        """A forward of the whole model begins (reset_step)."""
        self._release_in_progress()
        if not self._knows:
            self._knows, self._records = self._records, not self._records
        self._queue = deque()
        if self._knows:
            self._queue.extend((shard, step) for step, module in enumerate(self._order) for shard in module.shards)
        self._last.clear()
        self._step = self._live = 0

    def end_backward(self) -> None:
        """Release the parameters of modules whose backward's end was not seen (release_backward_leftovers)."""
        while self._in_backward:
            module, _ = self._in_backward.popitem()
            for shard in {*module.shards, *module.recomputed}:
                shard.users.discard(module)
                if not shard.persistent:
                    self._release(shard)
            module.recomputed.clear()

    def release_all(self) -> None:
        """Release all parameters before the step (partition_all_parameters)."""
        for shard in self.shards:
            if shard.all_gather is not None:
                self._complete(shard)
            shard.users.clear()
            self._release(shard)

    def gather_persistent(self) -> None:
        """Gather persistent parameters after the step, each in a buffer of its own (_post_step)."""
        for shard in self.shards:
            if shard.persistent:
                AllGather([shard], self.group, self.recorder)
                self._complete(shard)

    def _forget(self) -> None:
        """Forget the order: this step's differs from the step before (_invalidate_trace)."""
        self._knows = False
        self._order = []
        self._queue.clear()
        self._last.clear()
        self._release_in_progress()

    def _release_in_progress(self) -> None:
        """Complete all-gathers whose parameters no module has asked for, and release these."""
        for shard in self.shards:
            if shard.all_gather is not None:
                self._complete(shard)
                self._release(shard)

    # -- a module ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def arrive(self, module: ModuleHooks, forward: bool) -> None:
        """Gather the parameters of `module`, and those of the next modules (fetch_sub_module)."""
        if self._knows and (self._step >= len(self._order) or self._order[self._step] is not module):
            self._forget()
        if self._records:
            self._order.append(module)
        if not forward:
            self._in_backward[module] = None
        self._gather(shard for shard in module.shards if not shard.gathered and shard.all_gather is None)
        runs_again = forward and _in_backward()
        for shard in module.shards:
            shard.users.add(module)
            if runs_again and self._in_backward and not shard.parameter.requires_grad:
                owner = next(reversed(self._in_backward))
                owner.recomputed.add(shard)
                shard.users.add(owner)
            if shard.all_gather is not None:
                self._complete(shard)
        self._streams.current_stream().wait_stream(self._stream)
        if self._knows:
            self._gather_ahead(module)
        self._step += 1

    def _gather_ahead(self, module: ModuleHooks) -> None:
        needed = sum(self._last[shard] < self._step for shard in module.shards)
        for _ in range(min(needed, len(self._queue))):
            shard, step = self._queue.popleft()
            self._last[shard] = step
        room = min(self.options.max_live_parameters - self._live, self.options.prefetch_bucket_size or 0)
        ahead: dict[Shard, None] = {}
        elements = 0
        while self._queue and elements < room:
            shard, step = self._queue.popleft()
            self._last[shard] = max(self._last[shard], step)
            if not shard.gathered and shard.all_gather is None and shard not in ahead:
                ahead[shard] = None
                elements += shard.numel
        self._gather(ahead)

    @torch.no_grad()
    def leave(self, module: ModuleHooks, forward: bool) -> None:
        """Release the parameters of `module`, unless they are used again soon (release_sub_module)."""
        shards = set(module.shards)
        gone = self._not_soon(module) if self._knows else set(shards)
        if not forward:
            gone |= {shard for shard in module.recomputed if not shard.persistent}
            shards |= module.recomputed
            module.recomputed.clear()
            self._in_backward.pop(module, None)
        for shard in shards:
            shard.users.discard(module)
            if shard in gone:
                self._release(shard)

    def _not_soon(self, module: ModuleHooks) -> set[Shard]:
        found = {s for s in module.shards if not s.persistent and self._last[s] <= self._step}
        passed = 0
        for following in self._order[self._step :] if found else ():
            if passed >= self.options.max_reuse_distance:
                break
            found.difference_update(following.shards)
            passed += sum(shard.numel for shard in following.shards)
        return found

    # -- parameters -------------------------------------------------------------------------------------------------

    def _gather(self, shards: Iterable[Shard]) -> None:
        kinds: defaultdict[torch.dtype, list[Shard]] = defaultdict(list)
        for shard in sorted(shards, key=lambda shard: shard.number):
            kinds[shard.part.dtype].append(shard)
            self._live += shard.numel
        with self._streams.stream(self._stream):
            for together in kinds.values():
                AllGather(together, self.group, self.recorder)

    def _complete(self, shard: Shard) -> None:
        assert shard.all_gather is not None
        with self._streams.stream(self._stream):
            shard.all_gather.complete()
        shard.all_gather = None

    def _release(self, shard: Shard) -> None:
        if shard.gathered and not shard.users:
            shard.free()
            self._live -= shard.numel


# -- gradients, and the step ------------------------------------------------------------------------------------------


class _Group:
    """Parts that are updated together: views of the buffer of all parts, and an fp32 copy."""

    def __init__(self, options: dict[str, Any], shards: list[Shard]) -> None:
        self.options, self.shards = options, shards
        self.weights = torch.empty(0)
        self.master = torch.empty(0)


class Zero3(ZeroOptimizer):
    """The model's optimizer under ZeRO-3; hooks on the parameters take each gradient when it is computed."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        launch: Launch,
        group: dist.ProcessGroup,
        streams: Streams,
        recorder: Recorder,
    ) -> None:
        super().__init__(optimizer, launch, group, streams, recorder)
        self._of = _shards(model, group.size(), launch.zero)
        self._groups = [g for options in optimizer.param_groups for g in self._split(options, launch.zero)]
        trained = [shard for group in self._groups for shard in group.shards]
        sizes = [shard.part.numel() for shard in trained]
        self._lay_out(trained, sizes)
        dtype = trained[0].part.dtype
        self.buckets = [torch.empty(launch.zero.reduce_bucket_size or 0, dtype=dtype)]
        self._gradients = torch.zeros(sum(sizes), dtype=dtype)
        self._gradient_of = dict(zip(trained, self._gradients.split(sizes), strict=True))
        self._reduce_dtype = reduce_dtype(launch, dtype)
        self._adds = False
        for shard in trained:
            shard.parameter.register_post_accumulate_grad_hook(self._ready)
        self.fetcher = Fetcher(model, self._of, launch.zero, group, streams, recorder)
        recorder.add_resident((shard.part for shard in self._of.values()), "parameters")
        recorder.add_resident((group.master for group in self._groups), "optimizer")
        recorder.add_resident(self.buckets, "communication")
        recorder.add_resident([self._gradients], "gradients")
        if self.offloads:
            self._offload()
        if launch.zero.offload_param:
            for shard in self._of.values():
                shard.on_host = not shard.persistent or shard.parameter.requires_grad
            recorder.put_on_host((shard.part for shard in self._of.values() if shard.on_host), "parameters")

    def _split(self, options: dict[str, Any], zero: ZeroOptions) -> Iterator[_Group]:
        together: list[Shard] = []
        for parameter in [p for p in options["params"] if p.requires_grad]:
            together.append(self._of[id(parameter)])
            if sum(shard.part.numel() for shard in together) >= zero.sub_group_size:
                yield _Group(options, together)
                together = []
        if together:
            yield _Group(options, together)

    def _lay_out(self, trained: list[Shard], sizes: list[int]) -> None:
        """Put the parts of trained parameters into one buffer, and make the groups' fp32 copies."""
        buffer = torch.cat([shard.part for shard in trained])
        for shard, view in zip(trained, buffer.split(sizes), strict=True):
            shard.part = view
        lengths = [sum(shard.part.numel() for shard in group.shards) for group in self._groups]
        for group, view in zip(self._groups, buffer.split(lengths), strict=True):
            group.weights = view
            group.master = view.to(torch.float32, copy=True).requires_grad_()

    def _offload(self) -> None:
        """Put the optimizer's weights and gradients into host memory."""
        self._places: dict[Shard, Tensor] = {}  # of each gradient in its group's
        for group in self._groups:
            gradient = group.master.grad = torch.zeros_like(group.master)
            sizes = [shard.part.numel() for shard in group.shards]
            self._places |= dict(zip(group.shards, gradient.split(sizes), strict=True))
            self.recorder.put_on_host([group.master], "optimizer")
            self.recorder.put_on_host([gradient], "gradients")
        self.recorder.put_on_host([self._gradients], "gradients")

    # -- backward ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _ready(self, parameter: Any) -> None:
        self._wait_for_the_end()
        self._take(parameter, self.stream)

    def _reduce_filled(self) -> None:
        """Reduce-scatter the bucket's gradients, and add them to those of the parts."""
        shards = sorted((self._of[id(p)] for p in self.filled), key=lambda shard: shard.number)
        ranks = self.group.size()
        with self.streams.stream(self.stream):
            gradients = [shard.parameter.grad.view(-1).to(self._reduce_dtype) for shard in shards]  # type: ignore[union-attr]
            sizes = [shard.part.numel() for shard in shards]
            flat = gradients[0]
            if len(shards) > 1 or flat.numel() % ranks:
                padding = sum(sizes) * ranks - sum(gradient.numel() for gradient in gradients)
                flat = torch.cat([*gradients, torch.empty(padding, dtype=flat.dtype)])
            flat.div_(ranks)
            own = flat.narrow(0, sum(sizes) * self.group.rank(), sum(sizes))
            reduce_scatter(own, flat, group=self.group, async_op=True)
            for shard, reduced in zip(shards, own.split(sizes), strict=True):
                total, reduced = self._gradient_of[shard], reduced.to(self._gradients.dtype)
                if self.offloads:
                    self._to_host(shard, total, reduced)
                else:
                    total.add_(reduced) if self._adds else total.copy_(reduced)
                shard.parameter.grad = None

    def _to_host(self, shard: Shard, total: Tensor, reduced: Tensor) -> None:
        """Add a reduced gradient to the host's `total`, on the device."""
        if self._adds:
            total.copy_(here := self.recorder.on_device(total).add_(reduced))
        else:
            here = self.recorder.on_device(total.copy_(reduced))
        if self.synchronises:
            here.to(torch.float64).norm()
            self._places[shard].copy_(here.to(torch.float32))

    @torch.no_grad()
    def _finish(self) -> None:
        """Called when backward has ended (independent_gradient_partition_epilogue, backward_epilogue)."""
        self._waiting = False
        if self.filled:
            self._reduce()
        self.streams.current_stream().wait_stream(self.stream)
        self._adds = True
        self.fetcher.end_backward()

    # -- the step ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> None:
        self.fetcher.release_all()
        self._adds = False
        norm: Any = 1.0 if self.offloads else self._norm()
        if self.offloads:
            self.recorder.await_device()
        for options in self.optimizer.param_groups:
            options["params"] = []
        for group in self._groups:
            if not self.offloads:
                gradients = [self._gradient_of[shard] for shard in group.shards]
                group.master.grad = joined(gradients).to(torch.float32)
            assert group.master.grad is not None
            group.master.grad.mul_(norm)
            group.options["params"] = [group.master]
            self.optimizer.step()
            group.options["params"] = []
            group.weights.copy_(group.master)
            if not self.offloads:
                group.master.grad = None
        self.fetcher.gather_persistent()

    def _norm(self) -> Tensor:
        if self._gradients.dtype == torch.float16:
            torch.isinf(self._gradients).any(), torch.isnan(self._gradients).any()
        norms = [gradient.to(torch.float64).norm() for gradient in self._gradient_of.values()]
        norm = torch.stack(norms).pow(2).sum()
        dist.all_reduce(norm, group=self.group)
        return norm.float()


def _shards(model: nn.Module, ranks: int, options: ZeroOptions) -> dict[int, Shard]:
    """Partition every parameter and release the whole ones; returns the shards by the parameters' ids."""
    shards: dict[int, Shard] = {}
    persistent = 0
    for number, parameter in enumerate(model.parameters()):
        size, shape = parameter.numel(), parameter.shape
        small = size <= (options.param_persistence_threshold or 0)
        small = small and size + persistent <= options.model_persistence_threshold
        persistent += size if small else 0
        part = torch.empty(-(-size // ranks), dtype=parameter.dtype)
        shards[id(parameter)] = shard = Shard(parameter, number, part, small, shape)
        # Policies know what DeepSpeed gathers by these attributes.
        parameter.ds_id, parameter.ds_active_sub_modules = number, shard.users  # type: ignore[attr-defined]
        shard.free()
    return shards


def linear_saves_parameters() -> AbstractContextManager[Any]:
    """Replaces torch.nn.functional.linear as DeepSpeed does."""
    return patched(linear=lambda x, weight, bias=None: _Linear.apply(x, weight, bias))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        if x.dim() == 2 and bias is not None:
            return torch.addmm(bias, x, weight.t())
        output = x.matmul(weight.t())
        return output if bias is None else output.add_(bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, bias = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        to_x, to_weight, to_bias = ctx.needs_input_grad
        return (
            gradient.matmul(weight) if to_x else None,
            rows.t().matmul(x.reshape(-1, x.shape[-1])) if to_weight else None,
            rows.sum(0) if bias is not None and to_bias else None,
        )
