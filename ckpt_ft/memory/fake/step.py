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
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckpt_ft.errors import UserError
from ckpt_ft.memory.allocator.settings import AllocatorSettings
from ckpt_ft.memory.distributed.group import rank_of
from ckpt_ft.memory.distributed.sharded import sharding_of
from ckpt_ft.memory.distributed.streams import streams_are_followed
from ckpt_ft.memory.distributed.wrap import initialize, share, surroundings, whole_again
from ckpt_ft.memory.gpus import GPU, gpu_of
from ckpt_ft.memory.record.passages import NotPeriodic
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.memory.rules import cuda
from ckpt_ft.spec.launch import Launch
from ckpt_ft.standins import flash_attention
from ckpt_ft.standins.live import stood_in

from .again import Again
from .fake_tracker import FakeTracker, sm
from .fakes import Fakes
from .interrupts import Interrupts
from .skipping import Skipping, Whole
from .surroundings import device_calls, faked_model, lists_of_fakes, quiet, tensors_of_fakes, unnoticed

Step = Callable[[nn.Module, Any], Any]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
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
    beside: Sequence[nn.Module] = (),
    update: Step | None = None,
) -> StepTrace:
    """As `trace_step`, of `steps` one after another, in a time that grows with the kinds of blocks, not their number.

    Blocks that are alike are traced as skipping.py says, and the record is that of all of them. Where that cannot be,
    or on several processes, every block runs; steps are called once more, and must do the same. `beside` stays.

    update: where the first two steps are the same, what one does after its backward, so that again.py may leave the
        rest of the second out.
    """
    whole: Whole | None = None if launch or sharding_of(model) else set()
    while True:
        try:
            return _traced(model, steps, make_optimizer, device, launch, alloc_conf, whole, beside, update)
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
    beside: Sequence[nn.Module] = (),
    update: Step | None = None,
) -> StepTrace:
    """whole: what is not to be skipped; it grows by what turns out not to be periodic. None for everything."""
    gpu = gpu_of(device)
    AllocatorSettings.parse(alloc_conf)
    sharding = sharding_of(model)
    if sharding is not None:
        launch = sharding.within(launch)
    with _ALONE, Interrupts() as interrupts, ExitStack() as stack:
        stack.enter_context(stood_in(model))
        stack.enter_context(flash_attention.for_live_models())
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
        stack.enter_context(faked_model(nn.ModuleList([model, *beside]), fakes))
        stack.enter_context(surroundings(launch if mesh is not None else None))
        streams = stack.enter_context(streams_are_followed())
        held = None
        if launch is not None and mesh is not None:
            held = share(model, launch, mesh) if sharding is None else sharding.put_on(mesh)
        gc.collect()
        tracker = streams.tracker = FakeTracker(fakes, model, gpu, interrupts, streams)
        tracker.add_resident(held or (), "communication")
        tracker.add_beside(beside)
        stack.callback(tracker.let_go)
        stack.enter_context(tracker)
        stack.enter_context(device_calls(tracker))
        stack.enter_context(lists_of_fakes(tracker, tracker.values))
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
            if update is not None and tracker.skipping is not None:
                after = partial(update, model, optimizer)
                tracker.again = Again(model, tracker, fakes, after, tracker.skipping.repeated)
            for number, step in enumerate(steps):
                gc.collect()
                if number:
                    gc.freeze()  # as in `quiet`: the record of one step is not looked through in all that follow
                if number == 1 and tracker.again is not None:
                    again, tracker.again = tracker.again, None
                    if again.recorded():
                        continue
                if tracker.skipping is not None:
                    tracker.skipping.records(partial(step, model, optimizer), number)
                else:
                    tracker.start_step()
                    step(model, optimizer)
            trace = tracker.trace(gpu.name if gpu else "cpu", None if isinstance(device, str) else gpu)
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
