"""A Trainer's step as a workload: on its data, to plan for; on what it saw, to predict what was measured."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import send_to_device
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import Trainer

from ckpt_ft.errors import UserError
from ckpt_ft.memory.distributed.fsdp2 import shard_again
from ckpt_ft.memory.gpus import current_gpu
from ckpt_ft.workloads.batches import own_loss
from ckpt_ft.workloads.sample_sizes import Lengths
from ckpt_ft.workloads.workload import MIXED_PRECISION, Batch, Forward, Loss, Workload

from .launched import precision_of
from .text.data import have_lengths, row_lengths

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from ckpt_ft.memory.gpus import GPU
    from ckpt_ft.memory.measure.largest_batch import LargestBatch

Collate = Callable[[list[Any]], dict[str, Any]]


def trainer_workload(
    model: nn.Module, args: TrainingArguments, rows: Any, collate: Collate, compute_loss: Loss = own_loss
) -> Workload:
    """What a Trainer with `args` will do with `model` on `rows`, on the device at hand.

    Args:
        rows: the training data, a map-style dataset of dicts; those of a `datasets.Dataset` with "input_ids", or
            with a DPOTrainer's preferences, have lengths.
        compute_loss: the trainer's, where it has one of its own.
    """
    grouped = getattr(args, "train_sampling_strategy", "") == "group_by_length"
    of_length, lengths = by_length(rows, grouped)
    config: Any = getattr(model, "config", None)
    if config is not None:
        config.use_cache = args.use_cache  # as the Trainer does when it is made

    def make_batch(samples: int, length: int | None) -> Batch:
        chosen = [rows[0]] * samples if length is None else of_length(samples, length)
        batch: Batch = send_to_device(collate(chosen), args.device)
        return batch

    return Workload(
        model,
        make_batch,
        compute_loss,
        make_optimizer=lambda model: _optimizer(args, model),
        device=current_gpu() or "cpu",
        autocast=MIXED_PRECISION[precision_of(args)],
        accumulation=args.gradient_accumulation_steps,
        max_grad_norm=args.max_grad_norm,
        lengths=lengths,
        name=type(model).__name__,
    )


def loss_of(trainer: Trainer) -> Callable[..., torch.Tensor]:
    """The loss that `trainer` computes, a subclass's own included; the trainer stays as it is."""

    def compute_loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        twin: Any = copy.copy(trainer)
        if hasattr(trainer, "_metrics"):  # TRL's trainers collect figures there
            twin._metrics = copy.deepcopy(trainer._metrics)
        loss: torch.Tensor = type(trainer).compute_loss(twin, *args, **kwargs)
        return loss

    return compute_loss


def has_own_loss(trainer: Trainer) -> bool:
    """Whether it computes more than the model's loss, as a DPOTrainer does with its reference model."""
    return type(trainer).compute_loss is not Trainer.compute_loss


def models_beside(trainer: Trainer) -> tuple[nn.Module, ...]:
    """The models that it has on the device beside the one it trains: TRL's references, and models that reward.

    Not those of which every process holds a part.
    """
    trained = {id(p) for p in trainer.model.parameters()}
    found: dict[nn.Module, None] = {}
    for held in vars(trainer).values():
        for module in held if isinstance(held, (list, tuple)) else [held]:
            weights = list(module.parameters()) if isinstance(module, nn.Module) else []
            here = bool(weights) and weights[0].device == trainer.args.device
            if here and not any(id(p) in trained or isinstance(p, DTensor) for p in weights):
                found[module] = None
    return tuple(found)


def require_batches(trainer: Trainer) -> None:
    """Raises UserError where batches are made while training, of what the model says to rows (TRL's GRPO, RLOO)."""
    if type(trainer)._prepare_inputs is not Trainer._prepare_inputs:
        kind = type(trainer).__name__
        raise UserError(
            f"a {kind} makes its batches while it trains, so none can be looked at beforehand (policy 'auto', "
            "--find_max_batch_size, --ac_check): give a policy; the report then says what it took, and predicted"
        )


def loss_of_model(model: Forward, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The model's own loss on what it was called with."""
    loss: torch.Tensor = model(*args, **kwargs).loss
    return loss


def measured_workload(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: LargestBatch,
    args: TrainingArguments,
    device: str | GPU,
    loss: Callable[..., torch.Tensor] = loss_of_model,
) -> Workload:
    """The step that a Trainer made on the largest batch that it saw; `model` carries its own autocast by then.

    Args:
        loss: called with the model and what `batch` has noted.
    """

    def compute_loss(model: Forward, batch: Batch) -> torch.Tensor:
        return loss(model, *batch["args"], **batch["kwargs"])

    def make_batch(samples: int, length: int | None) -> Batch:
        given, named = batch.again()
        return {"args": given, "kwargs": named}

    return Workload(
        model,
        make_batch,
        compute_loss,
        make_optimizer=twin_maker(model, optimizer),
        device=device,
        accumulation=args.gradient_accumulation_steps,
        max_grad_norm=args.max_grad_norm,
    )


def twin_maker(model: nn.Module, optimizer: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """model -> an optimizer over its parameters like `optimizer`, which is over those of the `model` given here."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
    shard_again(model)  # an evaluation leaves the root's weights gathered, which no optimizer knows
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [{**group, "params": [names[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
    kind: Any = type(optimizer)

    def make_twin(model: nn.Module) -> torch.optim.Optimizer:
        named = dict(model.named_parameters())
        twin: torch.optim.Optimizer = kind(
            [{**group, "params": [named[name] for name in group["params"]]} for group in groups]
        )
        return twin

    return make_twin


def _optimizer(args: TrainingArguments, model: nn.Module) -> Any:
    kind, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
    return kind([p for p in model.parameters() if p.requires_grad], **options)


def by_length(rows: Any, grouped: bool = False) -> tuple[Callable[[int, int], list[Any]], Lengths | None]:
    """(samples, length) -> rows of which the first is the one of that length; and the lengths there are.

    Where rows have images, it has most `pixels` of those as long, and beside the longest is the row with most of all.
    grouped: whether batches are of rows of like length.
    """
    if not have_lengths(rows):
        return lambda samples, length: [rows[0]] * samples, None
    lengths = row_lengths(rows)
    pixels = list(rows.with_format(None)["pixels"]) if "pixels" in rows.column_names else []
    order = sorted(range(len(lengths)), key=lambda row: (lengths[row], -pixels[row] if pixels else 0))

    def of_length(samples: int, length: int) -> list[Any]:
        first = min(bisect_left(order, length, key=lengths.__getitem__), len(order) - 1)
        beside = order[first // 2]  # as in most batches, the others are padded
        if pixels and lengths[order[first]] == lengths[order[-1]]:
            beside = pixels.index(max(pixels))
        return [rows[order[first]], *[rows[beside]] * (samples - 1)]

    return of_length, Lengths.of(lengths, grouped)
