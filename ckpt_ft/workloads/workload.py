"""Workload: the description of a training step as one value, and the step that everything runs.

Estimates, plans, the search for the largest batch, the predictions in reports and our own training loops all run
`optimizer_step`. For another training loop, `Workload.of_loop` gives the same results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar
from unittest.mock import patch

import torch
from torch import nn

from ckpt_ft.compat.libraries import ATTENTION
from ckpt_ft.errors import UserError, one_line
from ckpt_ft.memory.distributed.ddp import outputs_copied
from ckpt_ft.memory.distributed.sequence_parallel import of_one_rank
from ckpt_ft.memory.distributed.wrap import clip_grad_norm_, without_synchronisation
from ckpt_ft.memory.fake.compiled.lowering import compiling
from ckpt_ft.memory.fake.step import trace_steps
from ckpt_ft.memory.gpus import GPU, HERE, gpu_of
from ckpt_ft.standins import liger

from .sample_sizes import Lengths

if TYPE_CHECKING:
    from transformers import Trainer

    from ckpt_ft.memory.record.trace import StepTrace
    from ckpt_ft.spec.launch import Launch


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MIXED_PRECISION = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


class _Alone:
    """The engine of a single process: what a training step needs of accelerate's Accelerator."""

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float) -> Any:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)


ALONE = _Alone()


class Ranks(_Alone):
    """The engine of one of several processes: only the last micro-batch synchronises gradients."""

    def __init__(self, micro_batches: int) -> None:
        self.left = micro_batches

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[Any]:
        self.left -= 1
        return without_synchronisation(models[0]) if self.left else contextlib.nullcontext()

    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float) -> Any:
        return clip_grad_norm_(parameters, max_norm)


def optimizer_step(
    model: nn.Module,
    optimizer: Any,
    micro_batches: Iterable[Any],
    compute_loss: Callable[[Any, Any], torch.Tensor],
    *,
    max_grad_norm: float = 0.0,
    parameters: Sequence[torch.Tensor] | None = None,
    engine: Any = ALONE,
) -> None:
    """One optimizer step in Trainer's order: forward and backward of each micro-batch, clipping, update, zero_grad.

    Args:
        compute_loss: (model, micro-batch) -> scalar; its other tensors are freed before backward.
        parameters: the parameters to clip; the model's by default.
        engine: an Accelerator; by default a single process.
    """
    for batch in micro_batches:
        with engine.accumulate(model):
            loss = compute_loss(model, batch)
            if hasattr(optimizer, "fused_backward"):  # LOMO updates the weights in backward
                optimizer.fused_backward(loss, optimizer.lr)
            else:
                engine.backward(loss)
            loss = loss.detach()  # as the Trainer, which holds the graph until the next phase
    update(model, optimizer, max_grad_norm, parameters, engine)


def update(
    model: nn.Module,
    optimizer: Any,
    max_grad_norm: float,
    parameters: Sequence[torch.Tensor] | None = None,
    engine: Any = ALONE,
) -> None:
    """The part of a step after the last backward: clipping, the optimizer's update, zero_grad."""
    if max_grad_norm:
        engine.clip_grad_norm_(model.parameters() if parameters is None else parameters, max_grad_norm)
    if optimizer is not None and not hasattr(optimizer, "fused_backward"):
        optimizer.step()
    model.zero_grad(set_to_none=True)


Batch = dict[str, Any]
Step = Callable[[nn.Module, Any], Any]  # (model, optimizer): one optimizer step
Forward = Callable[..., Any]  # the model, under autocast if there is one
Loss = Callable[[Forward, Batch], torch.Tensor]
_LENGTHS = (
    "batches differ in length, and the longest is predicted as compiled for itself; with dynamic=False, which "
    "`accelerate launch` sets without --dynamo_use_dynamic, torch.compile runs all but eight lengths eagerly"
)
# (samples, tokens of the longest row) -> one micro-batch; None tokens if all rows have one length
MakeBatch = Callable[[int, int | None], Batch]
Answer = TypeVar("Answer")
# Micro-batches of a step that a trace runs. The second one accumulates into existing gradients, as all later ones do.
# With several processes a third one runs, because only the last one synchronises.
RECORDED, RECORDED_LAUNCHED = 2, 3
_MOST = 2**40  # samples


@dataclass(frozen=True)
class Workload:
    """The model, data and settings of a training step.

    Attributes:
        model: the model with its adapters, on any device, "meta" included.
        make_batch: (samples, length) -> one micro-batch; length in tokens, None if all rows have one length.
        compute_loss: (model, micro-batch) -> scalar.
        make_optimizer: builds the optimizer of the model; None for a step without an optimizer.
        device: the device to predict for, as for `gpu_of`.
        autocast: the dtype of mixed precision; see `in_precision`.
        accumulation: micro-batches of a step.
        micro_batches: makes each of them, if they differ; a trace runs the first ones. Empty if all are alike.
        first: whether the first step of a run is traced, in which optimizer states are made, and not a later one.
        prefetched: whether all micro-batches are fetched before the first one runs, as Trainer does.
        max_grad_norm: the norm that gradients are clipped to; 0 for no clipping.
        auxiliary_models: models on the device that are not trained, such as the encoders of images and prompts.
        lengths: lengths of the rows if they differ: the longest sets the peak, typical batches the speed.
        loop: (samples, length) -> a whole optimizer step, which replaces loss, precision, accumulation and clipping.
        launch: the distributed launch; None for one process. All other attributes describe one process.
        phases: what runs between training steps, by name: (workload, samples) -> step. See `trace_phases`.
        compile: what torch.compile compiles: "whole", "regional" (each block), "" for nothing.
        alloc_conf: options of the caching allocator, as in PYTORCH_CUDA_ALLOC_CONF.
        liger: kernels of Liger that a Trainer puts into the model when it begins to train, on or off; None without.
        notes: assumptions about the model and the batches, one sentence each; traces repeat them.
        name, kind, shape: for messages: the model's name, its kind ("causal-lm"), the sizes of a sample.
    """

    model: nn.Module
    make_batch: MakeBatch
    compute_loss: Loss
    make_optimizer: Callable[[nn.Module], Any] | None = None
    device: str | GPU = ""
    autocast: torch.dtype | None = None
    accumulation: int = 1
    micro_batches: Sequence[Callable[[], Batch]] = ()
    first: bool = False
    prefetched: bool = True
    max_grad_norm: float = 0.0
    auxiliary_models: tuple[nn.Module, ...] = ()
    lengths: Lengths | None = None
    loop: Callable[[int, int | None], Step] | None = None
    launch: Launch | None = None
    phases: dict[str, Callable[[Workload, int], Step]] = field(default_factory=dict)
    compile: str = ""
    alloc_conf: str = ""
    liger: Mapping[str, bool] | None = None
    notes: tuple[str, ...] = ()
    name: str = ""
    kind: str = ""
    shape: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.device in ("", HERE):
            object.__setattr__(self, "device", gpu_of(self.device) or "cpu")

    @classmethod
    def of_loop(
        cls,
        model: nn.Module,
        step: Callable[..., Step],
        make_optimizer: Callable[[nn.Module], Any] | None = None,
        device: str | GPU = "",
        name: str = "",
        lengths: Lengths | None = None,
    ) -> Workload:
        """Creates the workload of your own training loop.

        Args:
            step: `step(samples)` returns one optimizer step on the largest batch of that many samples. With `lengths`,
                `step(samples, length)` returns one on a batch whose longest row has `length` tokens.
        """
        return cls(
            model,
            _unknown,
            _unknown,
            make_optimizer,
            device,
            lengths=lengths,
            loop=step if lengths else lambda samples, length: step(samples),
            name=name or type(model).__name__,
        )

    @classmethod
    def from_trainer(cls, trainer: Trainer, flag: str = "policy 'auto'") -> Workload:
        """Creates the workload of the step of a transformers Trainer, with its own loss, data and auxiliary models.

        Args:
            flag: the flag that needs the workload, for errors.

        Raises:
            UserError: the trainer makes its batches while it trains, its rows are streamed, or a setting of it is not
                modelled.
        """
        from .from_trainer import check_trainer, planned_step

        return cls(compile=check_trainer(trainer), **planned_step(trainer, flag))

    def step(self, samples: int, length: int | None = None) -> Step:
        """Returns one optimizer step on micro-batches of `samples`, the longest of them `length` tokens.

        length: None for the longest row.

        Raises:
            UserError: `samples` is less than 1 or absurdly large.
        """
        if not 1 <= samples <= _MOST:
            raise UserError(f"batch size {samples}: a batch has at least 1 sample, and no more than memory has bytes")
        if length is None and self.lengths is not None:
            length = self.lengths.longest
        if self.loop is not None:
            return self.loop(samples, length)

        def step(model: nn.Module, optimizer: Any) -> None:
            model.train()
            recorded = min(self._recorded, self.accumulation)
            make = self.micro_batches or [partial(self.make_batch, samples, length)] * self.accumulation
            fetched = [self._of_rank(batch()) for batch in (make if self.prefetched else [])]
            batches = fetched[:recorded] or (self._of_rank(batch()) for batch in make[:recorded])
            engine = Ranks(recorded) if self.launch else ALONE
            optimizer_step(model, optimizer, batches, self.loss_of, max_grad_norm=self.max_grad_norm, engine=engine)

        return step

    def _of_rank(self, batch: Batch) -> Batch:
        attention = getattr(getattr(self.model, "config", None), ATTENTION, None)
        return batch if self.launch is None else of_one_rank(batch, self.launch, attention)

    def typical_step(self, samples: int) -> Step:
        """The step on a batch of typical length."""
        return self.step(samples, None if self.lengths is None else self.lengths.padded(samples))

    def loss_of(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The loss of one micro-batch in the workload's precision."""
        forward: Forward = self.in_precision(model)
        if self.launch is not None and self.launch.find_unused_parameters:
            forward = outputs_copied(forward)
        return self.compute_loss(forward, batch)

    def trace(self, samples: int = 1) -> StepTrace:
        """The trace of `step(samples)` under the policy that is applied to the model."""
        return self.with_metadata(self.trace_of([self.step(samples)] * (1 if self.first else 2)))

    def trace_phases(self, samples: int = 1, before: int | None = None) -> dict[str, StepTrace]:
        """The trace of each phase beside a batch of `samples`, after one training step on it, or on `before`."""
        steps = {name: make(self, samples) for name, make in self.phases.items()}
        return {
            name: self.with_metadata(self.trace_of([self.step(before or samples)], phase=step))
            for name, step in steps.items()
        }

    def trace_of(self, steps: Sequence[Step], twice: bool = False, phase: Step | None = None) -> StepTrace:
        """The trace of `steps` under the workload's launch; the last step is the measured one.

        twice: whether the first two of `steps` are the same step. phase: what runs after them, and is measured then.

        Raises:
            UserError: a tensor has more bytes than can be counted, or the model's norms need a larger batch.
        """
        fused: AbstractContextManager[Any] = contextlib.nullcontext()
        if self.liger is not None:
            fused = liger.applied(self.model, self.liger)
        inside: AbstractContextManager[Any] = contextlib.nullcontext()
        if self._compiles_autocast:
            inside = patch.object(self.model, "forward", self._under_autocast(self.model.forward))
        try:
            with fused, inside, compiling(self.model, self.compile):
                return trace_steps(
                    self.model,
                    steps,
                    make_optimizer=self.make_optimizer,
                    device=self.device,
                    launch=self.launch,
                    alloc_conf=self.alloc_conf,
                    beside=self.auxiliary_models,
                    update=partial(update, max_grad_norm=self.max_grad_norm) if twice and self.loop is None else None,
                    phase=phase,
                )
        except (ValueError, RuntimeError) as error:  # by torch's messages
            said = one_line(error, 200)
            if "Expected more than 1" in said:  # for a norm's statistics
                raise UserError(f"a batch of 1: {said}; give at least 2, or a larger budget") from error
            if "overflow" in said:
                raise UserError(f"no memory holds such a batch ({said}); give a smaller one") from error
            raise

    def with_metadata(self, trace: StepTrace) -> StepTrace:
        """Returns `trace` with the number of micro-batches of the step and the notes of this workload."""
        steps = self.accumulation if self.accumulation > self._recorded else 1
        differ = self.compile and self.lengths is not None and len(self.lengths.tokens) > 1
        return replace(trace, micro_batches=steps, notes=[*self.notes, *([_LENGTHS] if differ else []), *trace.notes])

    @property
    def _recorded(self) -> int:
        return RECORDED_LAUNCHED if self.launch else RECORDED

    def in_precision(self, forward: Forward) -> Forward:
        """Returns `forward` under autocast with outputs in fp32, as accelerate wraps it (`ConvertOutputsToFp32`).

        It is unchanged if there is no autocast, if autocast is compiled with the model, and under DeepSpeed, which
        casts the model (accelerator.py, native_amp).
        """
        return forward if self._compiles_autocast else self._under_autocast(forward)

    @property
    def _compiles_autocast(self) -> bool:
        """Whether autocast is compiled with the model; under FSDP2 it comes afterwards (accelerator.py)."""
        return self.compile == "whole" and (self.launch is None or self.launch.strategy == "ddp")

    def _under_autocast(self, forward: Forward) -> Forward:
        dtype = self.autocast
        if dtype is None or (self.launch is not None and self.launch.stage):
            return forward
        from accelerate.utils import convert_to_fp32

        def run(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast("cpu" if self.device == "cpu" else "cuda", dtype):
                output = forward(*args, **kwargs)
            return convert_to_fp32(output)

        return run


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def has_batch_norm(model: nn.Module) -> bool:
    """Whether the model has BatchNorm with running statistics, which training on single samples spoils."""
    return any(isinstance(m, BATCH_NORMS) and m.track_running_stats for m in model.modules())


def or_loop(function: Callable[..., Answer]) -> Callable[..., Answer]:
    """Lets `function(workload, budget, ...)` also be called with the parts of your own training loop:

    function(model, step_for_batch, budget, device, make_optimizer=..., name=..., ...), see `Workload.of_loop`.
    """

    @wraps(function)
    def either(asked: Workload | nn.Module, *args: Any, **options: Any) -> Answer:
        if isinstance(asked, Workload):
            return function(asked, *args, **options)
        return of_loop(asked, *args, **options)

    def of_loop(
        model: nn.Module,
        step_for_batch: Callable[[int], Step],
        budget: str | int | None = None,
        device: str | GPU = "",
        *,
        make_optimizer: Callable[[nn.Module], Any] | None = None,
        name: str = "",
        **options: Any,
    ) -> Answer:
        return function(Workload.of_loop(model, step_for_batch, make_optimizer, device, name), budget, **options)

    return either


def _unknown(*args: Any) -> Any:
    raise UserError("this workload is a user-defined loop: it has no batch or loss outside of its step")
