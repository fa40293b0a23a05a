"""trace_step: runs a user's training step on fake tensors and records it. No GPU, no weights, no data.

Fake CPU tensors take the place of all tensors (torch/_subclasses/fake_tensor.py): they have shapes, dtypes and
storages, but no bytes. For a GPU the rules of rules/cuda.py are applied to them; for "cpu" the CPU's kernels decide.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ckpt_ft.compat.libraries import EXPERTS
from ckpt_ft.compat.tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    accumulated_hooks,
    gradient_hooks,
    is_traceable_wrapper_subclass,
)
from ckpt_ft.errors import UserError, one_line
from ckpt_ft.memory.allocator.settings import expandable_segments
from ckpt_ft.memory.distributed.ddp import BUCKET
from ckpt_ft.memory.distributed.fsdp2 import (
    Sharding,
    gathers_in_8_bits,
    host_copies,
    offloaded_parameters,
    sharding_of,
)
from ckpt_ft.memory.distributed.group import rank_of
from ckpt_ft.memory.distributed.streams import Streams, streams_are_followed
from ckpt_ft.memory.distributed.wrap import initialize, library_patches, separate_meshes, sharding_mesh, share
from ckpt_ft.memory.fake.compiled.lowering import FoundCompiled, compiled_steps, eager_steps, is_compiled, prepare
from ckpt_ft.memory.gpus import GPU, GPUS, gpu_of
from ckpt_ft.memory.record.in_place_gradients import counts_of_a_sum
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.memory.record.tracker import Tracker, swapped_weights
from ckpt_ft.memory.rules import cuda
from ckpt_ft.policy import STREAMS
from ckpt_ft.spec.launch import Launch
from ckpt_ft.standins import flash_attention, fused_head, liger, liger_kernels
from ckpt_ft.standins.float8 import refuse_block_scales
from ckpt_ft.standins.quantised_layers import refuse_compiled, swap_library_layers

from . import patches
from .dispatcher import FakeOps
from .faked_model import Fakes, faked_model, restored
from .replay_step import ReplayStep

Step = Callable[[nn.Module, Any], Any]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
_ALONE = threading.RLock()  # a trace changes torch's behaviour in the whole process


def trace_step(
    model: nn.Module,
    step: Step,
    *,
    make_optimizer: MakeOptimizer | None = None,
    device: str | GPU = "",
    warmup_steps: int = 1,
    launch: Launch | None = None,
    alloc_conf: str = "",
) -> StepTrace:
    """Trace `step(model, optimizer)` as it would run on `device`, after `warmup_steps` calls of it.

    Args:
        model: with its policy applied, on any device, "meta" included. Its weights are neither read nor changed;
            dtypes, ties and requires_grad are kept.
        step: one optimizer step. Everything that it keeps alive counts. Real tensors that it closes over are replaced
            by fake ones on the device; the values of integer tensors (masks, positions) decide as they would there.
        make_optimizer: builds the optimizer from the model; without it `step` is given None.
        device: as for `gpu_of`: a card, or "cpu" (no rounding, no workspaces); by default, as in the commands, the GPU
            of this machine, or else an A100 with 80 GB.
        warmup_steps: a first step allocates what later ones reuse: optimizer state, workspaces.
        launch: the processes that it runs on; the trace is then of one of them, and `make_optimizer` and `step` are
            given the model as that process holds it. A model that is already sharded by `fully_shard` stays sharded
            and needs no launch, nor does a step that shards it in `make_optimizer`, in a fake process group.
        alloc_conf: options of the caching allocator, as in PYTORCH_CUDA_ALLOC_CONF.

    One trace runs at a time; other threads wait for it. During a trace the model holds fake tensors and torch is
    patched for all threads: do not train in the same process meanwhile. Ctrl-C takes effect at the step's next op, a
    second Ctrl-C at once; model and torch are left as they were.

    Raises:
        UserError: unknown device, negative `warmup_steps`, or an op whose result depends on data that a trace does
            not have and for which there is no stated case.
    """
    if warmup_steps < 0:
        raise UserError(f"warmup_steps {warmup_steps}: give 0 or more")
    return _Trace(model, [step] * (warmup_steps + 1), make_optimizer, device, launch, alloc_conf).run()


def trace_steps(
    model: nn.Module,
    steps: Sequence[Step],
    *,
    make_optimizer: MakeOptimizer | None = None,
    device: str | GPU = "",
    launch: Launch | None = None,
    alloc_conf: str = "",
    beside: Sequence[nn.Module] = (),
    update: Step | None = None,
    phase: Step | None = None,
) -> StepTrace:
    """Trace `steps` one after another.

    Args:
        beside: models on the device that are not trained.
        update: the part of a step after its backward, if the first two steps are the same. The rest of the second
            step is then copied from the first (replay_step.py), unless a launch or `swap` makes steps differ.
        phase: runs after `steps` and is then the measured step.
    """
    differ = launch is not None and (launch.strategy != "fsdp2" or launch.by_transformers)
    if differ or any(swapped_weights(model)):
        update = None
    return _Trace(model, steps, make_optimizer, device, launch, alloc_conf, beside, update, phase).run()


# -- what surrounds the steps -----------------------------------------------------------------------------------------


@contextmanager
def process_group(launch: Launch | None, sharding: Sharding | None) -> Iterator[DeviceMesh | None]:
    """The mesh of one rank of a launch, without the other processes; None for a single process."""
    if launch is None or (sharding is None and launch.processes == 1 and not launch.stage):
        yield None
    elif sharding is None or launch.cp > 1:
        with rank_of(*launch.mesh.values(), rank=launch.rank, names=tuple(launch.mesh)) as mesh:
            yield mesh
    else:
        with rank_of(*sharding.shape, rank=launch.rank, names=sharding.names) as mesh:
            yield mesh


@contextmanager
def torch_like(gpu: GPU | None, compiled: bool = False) -> Iterator[Fakes]:
    """Makes torch create fake tensors, and treat them as `gpu` would; None for the CPU.

    compiled: leave out what would break the graphs of torch.compile, which traces into Python functions.
    """
    # FakeTensorMode gives a CUDA build without a card the device guard of one. A first backward after it would start a
    # thread for that card, and processes forked from this one could not run a backward.
    counts_of_a_sum()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False  # the memo is faster, and gives a slice of something larger its whole storage
    tensors = nullcontext() if compiled else patches.tensors_of_fakes()
    card = nullcontext() if gpu is None else cuda.behave_like(gpu.capability, compiled)
    infers = patches.inference_with_counters()
    with patches.quiet(), patches.unnoticed(), cuda.fakes_are_tensors(), infers, tensors, card, mode:
        yield Fakes(mode)


@contextmanager
def faked(model: nn.Module, beside: Sequence[nn.Module], fakes: Fakes, sharding: Sharding | None) -> Iterator[None]:
    """Fake tensors in place of the models' own, and `model` unsharded. Afterwards both are as they were."""
    held = nn.ModuleList([model, *beside])
    with restored(held):
        if sharding is not None:
            sharding.take_off()
        with faked_model(held, fakes):
            yield


@contextmanager
def launched(
    model: nn.Module, launch: Launch | None, mesh: DeviceMesh | None, sharding: Sharding | None
) -> Iterator[tuple[Streams, list[torch.Tensor] | None]]:
    """Wraps `model` as its launch does; yields its streams and communication's tensors, None if it is not wrapped."""
    with streams_are_followed() as streams, ExitStack() as stack:
        held = None
        if launch is not None and mesh is not None:
            if sharding is None:
                held = share(model, launch, mesh, stack)
            else:
                held = sharding.put_on(sharding_mesh(mesh, launch))
            stack.enter_context(library_patches(model, launch, mesh))
        yield streams, held


@dataclass
class _Trace:
    """A trace: the arguments of `trace_steps`, and whether torch.compile compiles anything in the step."""

    model: nn.Module
    steps: Sequence[Step]
    make_optimizer: MakeOptimizer | None
    device: str | GPU
    launch: Launch | None
    alloc_conf: str
    beside: Sequence[nn.Module] = ()
    update: Step | None = None
    phase: Step | None = None
    compiled: bool = False

    def run(self) -> StepTrace:
        self.compiled = is_compiled(self.model)
        try:
            return self._attempt()
        except FoundCompiled:
            self.compiled = True
        return self._attempt()

    def _attempt(self) -> StepTrace:
        gpu = gpu_of(self.device)
        expandable_segments(self.alloc_conf)
        model, launch, sharding = self.model, self.launch, sharding_of(self.model)
        if launch is not None and launch.strategy != "ddp" and any(swapped_weights(model)):
            raise UserError(f"launch '{launch}': it places the weights; policy 'swap' goes with one process or ddp")
        experts = getattr(getattr(model, "config", None), EXPERTS, None)
        if experts not in (None, "eager", "batched_mm", "grouped_mm"):
            raise UserError(f"experts_implementation {experts}: a kernel of the Hub is not predicted; give grouped_mm")
        refuse_block_scales(model)
        if self.compiled:
            if launch and not launch.compiles:
                raise UserError(f"launch '{launch}': a compiled step is predicted for one process, ddp or fsdp2")
            prepare()
        if sharding is not None:
            launch = sharding.within(launch)
        with (
            _ALONE,
            nullcontext() if self.compiled else eager_steps(),
            patches.Interrupts() as interrupts,
            swap_library_layers(model),
            flash_attention.for_live_models(),
            liger.for_live_models(),
            nullcontext() if gpu is None else fused_head.on_gpu(),
            nullcontext() if gpu is None else liger_kernels.on_card(gpu.sms, gpu.capability),
            process_group(launch, sharding) as mesh,
            torch_like(gpu, self.compiled) as fakes,
            faked(model, self.beside, fakes, sharding),
            launched(model, launch, mesh, sharding) as (streams, held),
        ):
            gc.collect(0)
            tracker = Tracker(
                dispatcher=partial(FakeOps, fakes=fakes, gpu=gpu, interrupts=interrupts, streams=streams)
            )
            streams.recorder = tracker.recorder
            if gpu is not None:
                setattr(fakes.mode, STREAMS, streams)
            tracker.add_model(model)
            tracker.recorder.add_resident(held or (), "communication")
            tracker.add_beside(self.beside)
            if self.compiled:
                refuse_compiled(model, launch is not None and launch.strategy == "fsdp2")
            bucket = BUCKET if launch is not None and launch.strategy == "ddp" else 0
            lowering = compiled_steps(model, tracker, fakes, gpu, bucket) if self.compiled else nullcontext()
            with lowering as describe, self._tracking(tracker, streams), interrupts.passing_on():
                optimizer: Any = self.make_optimizer(model) if self.make_optimizer else None
                if launch is not None and launch.by_transformers:
                    separate_meshes(optimizer)
                sharded = held is None and any(map(is_traceable_wrapper_subclass, model.parameters()))
                if launch is not None and mesh is not None and launch.stage:
                    optimizer = initialize(model, optimizer, launch, mesh, streams, tracker.recorder)
                    sharded = True
                if sharded:  # since the tracker met the model
                    gc.collect(0)
                    tracker.restart()
                    tracker.add_model(model)
                tracker.recorder.put_on_host(offloaded_parameters(model), "parameters", "pinned")
                self._record(tracker, fakes, optimizer)
                if describe is not None:
                    describe()
                trace = tracker.trace(gpu.name if gpu else "cpu", None if gpu in GPUS.values() else gpu)
                return replace(
                    trace, ops=flash_attention.renamed(trace.ops), launch=launch, alloc_conf=self.alloc_conf
                )

    @contextmanager
    def _tracking(self, tracker: Tracker, streams: Streams) -> Iterator[None]:
        """The tracker sees ops, and what the step asks of its device by Python functions."""
        ops = tracker.dispatcher
        assert isinstance(ops, FakeOps)
        recorder = tracker.recorder
        try:
            with (
                tracker, patches.device_calls(recorder), patches.triton_launches(recorder),
                patches.lists_of_fakes(recorder, ops.values), host_copies(recorder, streams),
                gathers_in_8_bits(recorder, ops.fakes),
            ):  # fmt: skip
                yield
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise UserError(
                f"the step calls {error.func}, whose result depends on data that a trace does not have; "
                "compute it outside the step and close over it"
            ) from error
        except RuntimeError as error:
            if self.launch is not None and self.launch.by_transformers:
                raise UserError(
                    f"launch '{self.launch}': something in this step does not take weights that are divided over "
                    f"GPUs, so it is not predicted: {one_line(error, 200)}"
                ) from error
            if "Couldn't swap" not in str(error):  # torch's words (torch/nn/modules/module.py, _apply)
                raise
            raise UserError(
                "the step moves or converts its modules by Module.to(), as diffusers' group offloading and layerwise "
                "casting do, which is not modelled; trace the model without them"
            ) from error
        finally:
            ops.forget_real_tensors()

    def _record(self, tracker: Tracker, fakes: Fakes, optimizer: Any) -> None:
        replay = None
        hooked = any(gradient_hooks(p) or accumulated_hooks(p) for p in self.model.parameters())
        if self.update is not None and not self.compiled and not hooked:  # a copied step computes no gradients
            replay = ReplayStep(self.model, tracker, fakes, partial(self.update, self.model, optimizer))
        for number, step in enumerate(self.steps if self.phase is None else [*self.steps, self.phase]):
            gc.collect(min(number, 1))  # what outlives a step is old after it: no later collection looks at its record
            if number != 1 or replay is None or not replay.replay():
                tracker.start_step()
                step(self.model, optimizer)
