"""trace_step: runs a user's training step on fake tensors and records it. No GPU, no weights, no data.

Fake CPU tensors stand in for everything (torch/_subclasses/fake_tensor.py): shapes, dtypes and storages without bytes.
For a GPU the rules of rules/cuda.py are laid over them; for "cpu" the CPU's own kernels decide.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckpt_ft.errors import UserError
from ckpt_ft.memory.allocator.settings import AllocatorSettings
from ckpt_ft.memory.distributed.group import rank_of
from ckpt_ft.memory.distributed.launch import Launch
from ckpt_ft.memory.distributed.sharded import sharding_of
from ckpt_ft.memory.distributed.streams import Streams, streams_are_followed
from ckpt_ft.memory.distributed.wrap import initialize, share, surroundings, whole_again
from ckpt_ft.memory.gpus import GPU, gpu_of
from ckpt_ft.memory.record.opinfo import Work, is_asynchronous, tensors, wraps
from ckpt_ft.memory.record.passages import NotPeriodic
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.memory.record.tracker import Tracker
from ckpt_ft.memory.rules import cuda, fake_kernels
from ckpt_ft.standins.live import stood_in

from . import cpu_scratch
from .balanced import Balanced
from .fakes import CPU, Fakes, are_fakes
from .interrupts import Interrupts
from .memo import Memo, call_key
from .skipping import Skipping, Whole
from .surroundings import cache_of, faked_model, quiet, tensors_of_fakes, unnoticed
from .values import Values

aten = torch.ops.aten
Step = Callable[[nn.Module, Any], Any]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
_META = torch.device("meta")
_ALONE = threading.RLock()  # a trace changes what torch does in the whole process


def trace_step(
    model: nn.Module,
    step: Step,
    *,
    make_optimizer: MakeOptimizer | None = None,
    device: str | GPU = "t4",
    warmup_steps: int = 1,
    launch: Launch | None = None,
    alloc_conf: str = "",
) -> StepTrace:
    """Trace `step(model, optimizer)` as it would run on `device`, after `warmup_steps` calls of it.

    Args:
        model: as it stands, policy applied, on any device, "meta" included. Its weights are never read and never
            changed; dtypes, ties and requires_grad are kept.
        step: one optimizer step in the user's own words. What it keeps alive counts; real tensors that it closes over
            are taken as fake ones on the device, and the values of whole-number ones (masks, positions) decide as
            they would there.
        make_optimizer: builds the optimizer from the model; without it `step` gets None.
        device: a name in gpus.py, a GPU of one's own, or "cpu" (no rounding, no workspaces).
        warmup_steps: a first step allocates what later ones find: optimizer state, workspaces.
        launch: on how many processes it runs; the trace is then of one of them, and `make_optimizer` and `step` are
            given the model as its launch shares it. A model that is sharded already (`fully_shard`) stays so and
            needs none, nor does a step that shards it in `make_optimizer`, in a fake process group.
        alloc_conf: options of the caching allocator, as in PYTORCH_CUDA_ALLOC_CONF.

    One trace runs at a time; another thread's waits. While it runs the model holds fakes, and other threads find torch
    changed: train elsewhere. Ctrl-C takes effect at the step's next op, a second one at once; all is left as it was.

    Raises:
        UserError: unknown device, fewer than no steps of warm-up, or an op whose result depends on data in a way that
            no stated case covers.
    """
    if warmup_steps < 0:
        raise UserError(f"warmup_steps {warmup_steps}: give 0 or more")
    return _traced(model, [step] * (warmup_steps + 1), make_optimizer, device, launch, alloc_conf, None)


def trace_steps(
    model: nn.Module,
    steps: Sequence[Step],
    *,
    make_optimizer: MakeOptimizer | None = None,
    device: str | GPU = "t4",
    launch: Launch | None = None,
    alloc_conf: str = "",
) -> StepTrace:
    """As `trace_step`, of `steps` one after another, in a time that grows with the kinds of blocks, not their number.

    Blocks that are alike are traced as skipping.py says, and the record is that of all of them. Where that cannot be,
    or on several processes, every block runs; steps are then called once more, and must do the same again.
    """
    whole: Whole | None = None if launch or sharding_of(model) else set()
    while True:
        try:
            return _traced(model, steps, make_optimizer, device, launch, alloc_conf, whole)
        except NotPeriodic:  # `whole` has grown
            continue


def _traced(
    model: nn.Module,
    steps: Sequence[Step],
    make_optimizer: MakeOptimizer | None,
    device: str | GPU,
    launch: Launch | None,
    alloc_conf: str,
    whole: Whole | None,
) -> StepTrace:
    """whole: what is not to be skipped; it grows by what turns out not to be periodic. None for everything."""
    gpu = gpu_of(device)
    name = gpu.name if gpu else "cpu"
    AllocatorSettings.parse(alloc_conf)
    sharding = sharding_of(model)
    if sharding is not None:
        launch = sharding.within(launch)
    with _ALONE, Interrupts() as interrupts, ExitStack() as stack:
        stack.enter_context(stood_in(model))
        mesh = None
        if launch is not None and sharding is not None:
            mesh = stack.enter_context(rank_of(*sharding.shape, rank=launch.rank, names=sharding.names))
        elif launch is not None and launch.processes > 1:
            mesh = stack.enter_context(rank_of(launch.processes, rank=launch.rank))
        fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        fake_mode.cache_enabled = False  # memo.py is faster, and gives a slice of something larger its whole storage
        stack.enter_context(quiet())
        stack.enter_context(cuda.fakes_are_tensors())
        stack.enter_context(unnoticed())
        stack.enter_context(tensors_of_fakes())
        if gpu is not None:
            stack.enter_context(cuda.behave_like(sm(gpu)))
        stack.enter_context(fake_mode)
        stack.enter_context(whole_again(model))
        if sharding is not None:
            sharding.take_off()
        fakes = Fakes(fake_mode)
        stack.enter_context(faked_model(model, fakes))
        stack.enter_context(surroundings(launch if mesh is not None else None))
        streams = stack.enter_context(streams_are_followed())
        held = None
        if launch is not None and mesh is not None:
            held = share(model, launch, mesh) if sharding is None else sharding.put_on(mesh)
        gc.collect()
        tracker = streams.tracker = FakeTracker(fakes, model, gpu, interrupts, streams)
        tracker.add_resident(held or (), "communication")
        stack.callback(tracker.let_go)
        stack.enter_context(tracker)
        stack.enter_context(cache_of(tracker))
        if whole is not None:
            tracker.skipping = Skipping(model, tracker, fakes, whole)
            stack.enter_context(tracker.skipping.on())
        try:
            interrupts.passing = True
            optimizer: Any = make_optimizer(model) if make_optimizer else None
            meanwhile = held is None and any(map(is_traceable_wrapper_subclass, model.parameters()))
            if launch is not None and mesh is not None and launch.stage:
                optimizer, meanwhile = initialize(model, optimizer, launch, mesh, streams, tracker.add_resident), True
            if meanwhile:  # sharded
                gc.collect()
                tracker.restart()
                tracker.add_model(model)
            for step in steps:
                gc.collect()
                if tracker.skipping is not None:
                    tracker.skipping.records(partial(step, model, optimizer))
                else:
                    tracker.start_step()
                    step(model, optimizer)
            trace = tracker.trace(name, None if isinstance(device, str) else gpu)
            if tracker.skipping is not None:
                trace = tracker.skipping.unrolled(trace)
            return replace(trace, launch=launch, alloc_conf=alloc_conf)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise UserError(
                f"the step calls {error.func}, whose result depends on data that a trace does not have; "
                "compute it outside the step and close over it"
            ) from error
        finally:
            interrupts.passing = False


def sm(gpu: GPU) -> int:
    """Compute capability as one number: 75 for (7, 5)."""
    return 10 * gpu.arch[0] + gpu.arch[1]


class FakeTracker(Tracker):
    """A Tracker of fake tensors that stands between the step and FakeTensorMode.

    Real tensors are taken as fake ones; requests for another device are answered on the fake one; what depends on
    data is answered by values.py where it is known and by balanced.py where not. On a GPU, pinned memory and 0-dim
    tensors made from Python numbers (Adam's step counts) are the host's and left out.
    """

    source = "predicted"
    skipping: Skipping | None = None

    def __init__(
        self, fakes: Fakes, model: nn.Module, gpu: GPU | None, interrupts: Interrupts, streams: Streams
    ) -> None:
        super().__init__(model, after=cuda.after(sm(gpu)) if gpu else cpu_scratch.AFTER)
        self.fakes, self.fake_mode = fakes, fakes.mode
        self.gpu, self.interrupts, self.streams = gpu, interrupts, streams
        self.values = Values()
        self.balanced = Balanced(self, self.values)
        self.rules = {**fake_kernels.RULES, **self.balanced.answers, **(cuda.RULES if gpu else {})}
        self._memo = Memo(fakes, sm(gpu) if gpu else 0)
        self._fakes: dict[int, tuple[Tensor, Tensor]] = {}  # real tensors met in the step, by id

    def _begin(self, phase: str) -> None:
        super()._begin(phase)
        if phase == "backward" and self.skipping is not None:
            self.skipping.backward_begins()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device if type(args[0]) is FakeTensor else args[0].device
        if wraps(types):
            return NotImplemented  # what a DTensor does to its shard comes by here in its turn
        if self.interrupts.waiting:
            self.interrupts.deliver()
        kwargs = kwargs or {}
        if func is not aten.lift_fresh.default and not are_fakes(args):
            args = self._faked(args)
        device = kwargs.get("device")
        if device is not None and torch.device(device) not in (CPU, _META):
            kwargs = {**kwargs, "device": CPU}
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Work]:
        pinned = kwargs.pop("pin_memory", False)
        if func in self.balanced.answers:
            return super()._call(func, args, kwargs)
        key = call_key(func, args, kwargs)
        known = self._memo.get(key, args) if key is not None else None
        if known is None:
            known = super()._call(func, args, kwargs)
            if key is not None:
                self._memo.remember(key, func, args, *known)
        if func is aten.copy_.default and self.is_ignored(args[0]) != self.is_ignored(args[1]):
            known = known[0], Work(nbytes=args[0].nbytes)  # over the bus, by a copy engine
        out = known[0]
        self.values.follow(func, args, kwargs, out)
        self.balanced.observe(func, args, out)
        if self.gpu and func in cuda.ON_HOST:
            for index in cuda.ON_HOST[func](args):
                self.ignore(out[index])
        elif self.gpu and isinstance(out, Tensor) and (pinned or out.dim() == 0) and self._on_host(func, args, pinned):
            self.ignore(out)
        return known

    def _collective_stream(self, func: Any, args: tuple[Any, ...]) -> str:
        return self.streams.asynchronous() if is_asynchronous(func, args) else self.stream

    def _on_host(self, func: Any, args: tuple[Any, ...], pinned: bool) -> bool:
        if pinned or func is aten.lift_fresh.default:
            return True
        operands = list(tensors(args))
        return bool(operands) and all(self.is_ignored(operand) for operand in operands)

    def _faked(self, value: Any) -> Any:
        if isinstance(value, Tensor) and type(value) is not FakeTensor:
            known = self._fakes.get(id(value))
            if known is None:
                assert self.fake_mode is not None
                fake = self.fake_mode.from_tensor(value) if value.device == CPU else self.fakes.like(value)
                self.values.keep(fake, value)
                known = self._fakes[id(value)] = value, fake
            return known[1]
        if isinstance(value, (tuple, list)):
            return type(value)(self._faked(item) for item in value)
        return value

    def let_go(self) -> None:
        """Take fake gradients off the real tensors that the step closed over."""
        for real, _ in self._fakes.values():
            if type(real.grad) is FakeTensor:
                real.grad = None
        self._fakes.clear()
