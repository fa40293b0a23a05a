"""Creates workloads from a live transformers Trainer, TRL's trainers included; the trainer is not modified.

A dry run of the script (host/dry.py) answers for scripts that are started by name. It cannot answer here: a notebook
has no script to start again, a process that has used its card cannot fork into a dry run, a plan asks for other batch
sizes than the script's, and a rank of a launch is traced with the launch's wrapping.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import partial
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import send_to_device
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.models.auto import modeling_auto

from ckpt_ft.compat.libraries import FROM_CONFIG, attention_of, prepare_inputs
from ckpt_ft.compat.patches import patched
from ckpt_ft.compat.tensors import tree_map
from ckpt_ft.errors import UserError
from ckpt_ft.memory.distributed.fsdp2 import shard_again
from ckpt_ft.memory.fake.faked_model import renew
from ckpt_ft.memory.gpus import current_gpu
from ckpt_ft.spec.launch import PRECISIONS
from ckpt_ft.spec.trainer import check_live

from .optimizers import make_optimizer
from .sample_sizes import rows_by_length

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments

    from ckpt_ft.memory.measure.profiler import LargestBatch, MemoryProfiler

    from .workload import Batch, Forward

TrainerLoss = Callable[..., torch.Tensor]  # as Trainer.compute_loss, without its `self`
_MANY = 100  # steps
_IGNORED = -100  # the label that a loss leaves out
_TORCHAO = {"AdamW8bit": "ao_adamw_8bit", "AdamW4bit": "ao_adamw_4bit", "AdamWFp8": "ao_adamw_fp8"}
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def planned_step(trainer: Trainer, flag: str, any_length: bool = False) -> dict[str, Any]:
    """Returns the fields of a Workload for the step that `trainer` will make on its training data, on its device.

    The loss is the trainer's own, with label smoothing, `compute_loss_func` and a subclass's `compute_loss`. The
    trainer's other models are on the device. Rows with "input_ids" or TRL's preferences have lengths; the longest row
    decides the peak. Random state, and with it the order of the data, does not change.

    Args:
        flag: the flag that needs the workload, for errors.
        any_length: whether batches repeat or cut the longest row to the number of tokens that is asked for.

    Raises:
        UserError: the trainer makes its batches while it trains, or its rows are streamed.
    """
    args: Any = trainer.args
    require_batches(trainer, flag)
    with torch.random.fork_rng(devices=[]):
        loader: Any = trainer.get_train_dataloader()
    rows, collate = rows_of(loader, flag), loader.collate_fn
    chosen, lengths = rows_by_length(rows, getattr(args, "train_sampling_strategy", "") == "group_by_length")
    if any_length:
        assert lengths is not None, "rows of text have lengths"
        (longest,), lengths = chosen(1, None), None

        def chosen(samples: int, length: int | None) -> list[Any]:
            assert length is not None
            return [{name: [*islice(cycle(values), length)] for name, values in longest.items()}] * samples

    sharing = trainer.accelerator.parallelism_config
    # under Ulysses a Trainer gathers the losses of all ranks, which a trace cannot, and weighs them
    loss: TrainerLoss = own_loss if sharing is not None and sharing.sp_enabled else loss_of(trainer)

    def make_batch(samples: int, length: int | None) -> Batch:
        batch: Batch = send_to_device(dict(collate(chosen(samples, length))), args.device)
        return batch

    def compute_loss(model: Forward, batch: Batch) -> torch.Tensor:
        if trainer.compute_loss_func is None or "labels" not in batch:
            return loss(model, dict(batch))
        return loss(model, dict(batch), num_items_in_batch=(batch["labels"] != _IGNORED).sum())

    def create_optimizer(model: nn.Module) -> Any:
        copied: Any = copy.copy(trainer)
        copied.model = model
        return _trained(copied.create_optimizer(), model, _MANY)

    model = without_shards(trainer.model)
    return {
        "model": model,
        "make_batch": make_batch,
        "compute_loss": compute_loss,
        "make_optimizer": create_optimizer
        if trainer.optimizer is None
        else optimizer_like(trainer.model, trainer.optimizer),
        "device": current_gpu() or "cpu",
        "autocast": _AUTOCAST.get(precision_of(args)),
        "accumulation": args.gradient_accumulation_steps,
        "max_grad_norm": args.max_grad_norm or 0.0,
        "auxiliary_models": auxiliary_models(trainer),
        "lengths": lengths,
        "liger": (args.liger_kernel_config or {}) if getattr(args, "use_liger_kernel", False) else None,
        "name": type(model).__name__,
    }


def measured_step(
    model: nn.Module, profiler: MemoryProfiler, args: TrainingArguments, loss: TrainerLoss | None = None
) -> dict[str, Any]:
    """Returns a Workload's fields for the prediction of a step on the micro-batches that `profiler` saw at the peak.

    Args:
        model: the model after training; it applies its own autocast by then.
        loss: the trainer's loss; None for the loss that the model returns.

    Raises:
        UserError: no step was measured, or a setting is not modelled.
    """
    check_live(args)
    loss = loss if profiler.loss_batches else None
    batches = [profiler.batch] if loss is None else profiler.loss_batches
    if not batches[0].elements:
        raise UserError("no step was measured")

    def compute_loss(model: Forward, batch: Batch) -> torch.Tensor:
        if loss is not None:
            return loss(model, *batch["args"], **batch["kwargs"])
        own: torch.Tensor = model(*batch["args"], **batch["kwargs"]).loss
        return own

    def rebuilt(batch: LargestBatch) -> Batch:
        given, named = batch.rebuilt()
        return {"args": given, "kwargs": named}

    # Later micro-batches find the gradients of the first: the largest of them is as high as any.
    by_size = [batches[0], *sorted(batches[1:], key=lambda batch: -batch.elements)]
    optimizer = profiler.optimizer
    return {
        "model": without_shards(model),
        "autocast": _AUTOCAST.get(precision_of(args)) if is_sharded(model) else None,
        "make_batch": lambda samples, length: rebuilt(max(batches, key=lambda batch: batch.elements)),
        "first": profiler.fullest == 1 < profiler.sampled,
        "micro_batches": () if loss is None else tuple(partial(rebuilt, batch) for batch in by_size),
        "compute_loss": compute_loss,
        "make_optimizer": optimizer and optimizer_like(model, optimizer, max(profiler.fullest - 2, 0)),
        "device": current_gpu(args.device.index) or "cpu",
        "accumulation": args.gradient_accumulation_steps if loss is None else len(batches),
        "max_grad_norm": args.max_grad_norm or 0.0,
        "auxiliary_models": profiler.auxiliary_models,
    }


def is_sharded(model: Any) -> bool:
    """Whether transformers divided the weights of `model` while loading it: by a DistributedConfig, or for ZeRO-3."""
    if getattr(getattr(model, "config", None), "distributed_config", None) is not None:
        return True
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def without_shards(model: Any) -> Any:
    """Returns a whole copy, on "meta", of a model that was divided while it was loaded; any other model itself.

    Raises:
        UserError: it has adapters, which were added after it was divided.
    """
    if not is_sharded(model):
        return model
    if hasattr(model, "peft_config"):
        raise UserError(
            "adapters on a model that DistributedConfig or ZeRO-3 divides as it is loaded are not predicted"
        )
    config = copy.deepcopy(model.config)
    config.distributed_config = None
    before = 2 if isinstance(model, FSDPModule) else 0  # classes that fully_shard has put before the model's
    kind: Any = type(model).__mro__[before]
    with torch.device("meta"), patched(zero3_is_made=True):  # ZeRO-3 would divide it
        whole = getattr(kind, FROM_CONFIG)(config, dtype=model.dtype, attn_implementation=attention_of(config))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, parameter in whole.named_parameters():
        parameter.requires_grad_(name in trained)
    return whole.train()


def own_loss(model: Forward, batch: Batch) -> torch.Tensor:
    """The loss that a transformers model computes itself."""
    loss: torch.Tensor = model(**batch).loss
    return loss


def shallow_copy(trainer: Trainer) -> Any:
    """A copy with tables of its own, in which TRL's trainers collect metrics."""
    copied: Any = copy.copy(trainer)
    for name, table in vars(trainer).items():
        if isinstance(table, dict):
            setattr(copied, name, tree_map(lambda leaf: leaf, table))
    return copied


def loss_of(trainer: Trainer) -> TrainerLoss:
    """Returns the trainer's loss; calling it does not modify the trainer, for example TRL's collected metrics."""

    def compute_loss(model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        copied = shallow_copy(trainer)
        if not isinstance(model, nn.Module):  # under autocast it is a function; a Trainer asks for the model's name
            copied.accelerator = copy.copy(trainer.accelerator)
            copied.accelerator.unwrap_model = lambda given, *_, **__: trainer.model if given is model else given
        loss: torch.Tensor = type(trainer).compute_loss(copied, model, *args, **kwargs)
        return loss

    return compute_loss


def rows_of(loader: Any, flag: str) -> Any:
    """Returns the rows of a data loader; raises UserError, which names `flag`, if they are streamed."""
    rows = loader.dataset
    if isinstance(rows, torch.utils.data.IterableDataset) or not hasattr(rows, "__len__"):
        raise UserError(
            f"{flag} looks at rows of the training data, and a {type(rows).__name__} has none to look at: load it "
            "without streaming, or find policy and batch with `ckpt-ft plan MODEL` and prove them with `ckpt-ft check`"
        )
    return rows


def require_batches(trainer: Trainer, flag: str) -> None:
    """Raises UserError if the trainer makes its batches from the model's answers (TRL's GRPO and RLOO)."""
    from transformers import Trainer

    if prepare_inputs(type(trainer)) is not prepare_inputs(Trainer):
        raise UserError(
            f"a {type(trainer).__name__} makes its batches while it trains, so none can be looked at beforehand "
            f"({flag}): give a policy; the report then compares the prediction with the measurement"
        )


def auxiliary_models(trainer: Trainer) -> tuple[nn.Module, ...]:
    """Returns unsharded other models on the trainer's device, such as TRL's reference and reward models."""
    trained = {id(p) for p in trainer.model.parameters()}
    found: dict[nn.Module, None] = {}
    for held in vars(trainer).values():
        for module in held if isinstance(held, (list, tuple)) else [held]:
            weights = list(module.parameters()) if isinstance(module, nn.Module) else []
            here = bool(weights) and weights[0].device == trainer.args.device
            if here and not any(id(p) in trained or isinstance(p, DTensor) for p in weights):
                found[module] = None
    return tuple(found)


def optimizer_like(
    model: nn.Module, optimizer: Any, steps: int = _MANY
) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Returns a function that creates an optimizer like `optimizer` of `model`, without states.

    steps: as in `_trained`.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
    shard_again(model)  # after an evaluation, FSDP2's root is gathered, and its parameters are not the optimizer's
    names = {id(p): name for name, p in model.named_parameters()}

    def make(model: nn.Module) -> torch.optim.Optimizer:
        named = dict(model.named_parameters())
        copied: torch.optim.Optimizer = renew(optimizer, {key: named[name] for key, name in names.items()})
        return _trained(copied, model, steps)

    return make


def _trained(optimizer: Any, model: nn.Module, steps: int) -> Any:
    """Returns `optimizer`, or its stand-in, in the mode of training.

    steps: how many steps a schedule-free optimizer has taken: RAdam's first five make fewer tensors.
    """
    if type(optimizer).__name__ == "GrokAdamW" and current_gpu() is not None:
        return make_optimizer(model, "grokadamw")  # its states are in host memory between steps
    kind = type(optimizer)
    if kind.__module__.startswith("torchao.") and kind.__name__ in _TORCHAO:
        return make_optimizer(model, _TORCHAO[kind.__name__])  # its own update is compiled
    if hasattr(optimizer, "train"):  # schedule-free optimizers, which an evaluation leaves in another mode
        optimizer.train()
        for group in optimizer.param_groups:
            group["k"] = steps
    return optimizer


def check_trainer(trainer: Trainer) -> str:
    """Returns what a live Trainer compiles, as `compiled_by` does.

    Raises:
        UserError: a setting of the trainer is not modelled, or `check_labels` refuses it.
    """
    check_live(trainer.args)
    check_labels(trainer)
    return compiled_by(trainer.accelerator)


def check_labels(trainer: Trainer) -> None:
    """Raises UserError if label smoothing would not shift the labels of a language model.

    A Trainer decides by the class of its model, which is OptimizedModule if all of it is compiled (compute_loss).
    """
    plugin, model = trainer.accelerator.state.dynamo_plugin, trainer.model
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    causal = type(inner).__name__ in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    whole = plugin.backend != "NO" and not plugin.use_regional_compilation
    if whole and causal and trainer.label_smoother is not None and trainer.compute_loss_func is None:
        raise UserError(
            "label_smoothing_factor with torch_compile: the Trainer does not shift the labels of a compiled language "
            "model, so each token would learn to predict itself; leave one of them out, or compile by regions "
            "(ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=true)"
        )


def compiled_by(accelerator: Any) -> str:
    """Returns what accelerate compiles, by its arguments or those of its launch: "whole", "regional" or "".

    Raises:
        UserError: another backend or mode than those that are predicted.
    """
    plugin = accelerator.state.dynamo_plugin
    if plugin.backend == "NO":
        return ""
    if plugin.backend != "INDUCTOR":
        raise UserError(f"the model is compiled by {plugin.backend}, and only Inductor's steps are predicted")
    if plugin.mode not in (None, "default"):
        raise UserError(f"the model is compiled with mode {plugin.mode}: Inductor's default mode is predicted")
    return "regional" if plugin.use_regional_compilation else "whole"


def precision_of(args: TrainingArguments) -> str:
    """Returns the mixed precision of a Trainer with `args`: its own flags, otherwise that of `accelerate launch`.

    Raises:
        UserError: the launch's precision is not one of no, bf16 and fp16.
    """
    if args.bf16 or args.fp16:
        return "bf16" if args.bf16 else "fp16"
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if launched not in PRECISIONS or launched == "fp8":
        raise UserError(f"mixed precision '{launched}' of the launch: {', '.join(PRECISIONS[:3])} are modelled")
    return launched
