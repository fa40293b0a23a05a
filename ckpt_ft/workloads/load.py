"""`load`: the Workload of a spec, built from the model's configuration on the meta device, without any weights.

The model is a Hub id, a local directory or a config file of a transformers model, if transformers_models.py knows what
its class is trained on, or of a diffusers pipeline, whose U-Net or transformer is trained.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from ckpt_ft.errors import UserError
from ckpt_ft.memory.allocator.settings import expandable_segments
from ckpt_ft.memory.distributed.sequence_parallel import carries_state
from ckpt_ft.memory.gpus import GPU, gpu_of
from ckpt_ft.spec.launch import Launch
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.standins.float8 import to_float8
from ckpt_ft.validation import library_reads
from ckpt_ft.workloads.adapters import adapters_of, notes_on, with_quantisation_of
from ckpt_ft.workloads.model_config import read_config

from .optimizers import notes_on as notes_on_optimizer
from .optimizers import optimizer_maker
from .phases import evaluation_of
from .sample_sizes import Lengths
from .trl_trainers import trainer_step, vllm_share
from .workload import MIXED_PRECISION, Batch, Forward, Loss, Workload

_OF_ROWS = ("causal-lm", "masked-lm", "image-text-to-text")  # tasks whose rows may have lengths of their own
_CASTS = "without torch.compile each cast to 8 bits is several kernels; --compile regional fuses them"
_FALLBACK = re.compile(r'use_kernel_func_from_hub_with_fallback\(\s*"\w+",\s*"([\w-]+)"')


def load(spec: TrainingSpec, device: str | GPU | None = None, lengths: Lengths | None = None) -> Workload:
    """Returns the workload of the model that `spec` names.

    Args:
        device: the device to predict for; None for the spec's.
        lengths: lengths of a dataset's rows; without them every row has the spec's number of tokens.

    Raises:
        UserError: an unknown model or kind of model, or a spec that does not match the model.
    """
    name = spec.model.name
    expandable_segments(spec.host.alloc_conf)
    if device is None:
        device = gpu_of(spec.host.device) or "cpu"
    if lengths is not None:
        key = "default_seq_length" if spec.data.seq_length is None else "seq_length"
        spec = spec.edit(**{key: max(lengths.longest, 2)})
    gpu = gpu_of(device)
    if lengths is not None:
        if spec.data.rows == "packed":
            raise UserError("a dataset's lengths and packed rows: a packed sequence is full; leave one of them out")
        spec = spec.edit(rows="padded")
    config: Mapping[str, Any] = read_config(name)
    named = with_task(spec)
    spec = with_quantisation_of(name, config, named if spec.trainer.trainer == "reward" else spec)
    workload = _by_kind(name, config, spec)
    if spec.trainer.trainer:
        workload = trainer_step(workload, spec.edit(seq_length=workload.shape.get("seq_length")))
    if spec.precision.mixed_precision == "fp8":
        if gpu is None or not gpu.fp8:
            had = "the CPU" if gpu is None else f"{gpu.name} (compute capability {'.'.join(map(str, gpu.arch))})"
            raise UserError(
                f"mixed precision fp8 on {had}: it needs compute capability 8.9 (L4, RTX 4090, H100); take bf16",
                mixed_precision="bf16",
            )
        to_float8(workload.model)
    share, sleeps = vllm_share(spec) or (0.0, False)
    if gpu and share and not sleeps:  # as the CUDA context, it leaves the step less of the card
        device = gpu = replace(gpu, context=gpu.context + int(share * gpu.memory))
    when = "while it generates alone" if sleeps else "counted with the CUDA context"
    _check_samples(name, workload, spec)
    _check_states(workload.model, spec)
    if lengths is not None and spec.data.images:
        raise UserError("a dataset's lengths and images in every row: leave one of them out")
    if lengths is not None and workload.kind not in _OF_ROWS:
        raise UserError(
            f"a dataset's lengths: the batches of {name}, of kind '{workload.kind}', are all alike; leave it out"
        )
    phases = workload.phases
    if spec.data.eval_batch_size and "evaluation" not in phases:
        phases = phases | {"evaluation": evaluation_of(spec.data)}
    projection = spec.optimizer.optim_target_modules, spec.optimizer.optim_rank
    launch, of_blocks = _with_blocks(spec.launch.launch, workload.model, spec.host.strict)
    return replace(
        workload,
        compute_loss=_with_clear_errors(workload.compute_loss, adapters_of(spec)),
        name=_with_missing_kernels(named.title, workload.model) if gpu else named.title,
        make_optimizer=optimizer_maker(
            spec.optimizer.name, spec.optimizer.ema, workload.model, str(device), *projection
        ),
        device=device,
        autocast=MIXED_PRECISION[spec.precision.mixed_precision],
        accumulation=spec.data.accumulation,
        max_grad_norm=spec.optimizer.max_grad_norm,
        lengths=lengths or workload.lengths,
        launch=launch,
        phases=phases,
        compile=spec.kernels.compile,
        alloc_conf=spec.host.alloc_conf,
        notes=(
            *workload.notes,
            *([f"vLLM takes {share:.0%} of the card, {when}"] if share else []),
            *(
                f"{what} between steps has a row in an estimate, limits a plan's batch, and is not in the seconds"
                for what in phases
            ),
            *of_blocks,
            *notes_on(spec, config),
            *([_CASTS] if spec.precision.mixed_precision == "fp8" and not spec.kernels.compile else []),
            *notes_on_optimizer(spec.optimizer.name, *projection),
            *([gpu.note] if gpu and gpu.note else []),
        ),
    )


def with_task(spec: TrainingSpec) -> TrainingSpec:
    """Returns `spec` with the task that its model is trained on if it names none; a diffusion model has none.

    TRL's RewardTrainer loads a model as a classifier with one label.
    """
    if spec.trainer.trainer == "reward":
        return spec.edit(task="text-classification", num_labels=1)
    config = read_config(spec.model.name)
    if "model_type" not in config:
        return spec
    from ckpt_ft.workloads.transformers_models import class_and_task

    return spec.edit(task=class_and_task(spec.model.name, config, spec.model.task)[1].name)


def task_with_labels(name: str) -> str:
    """Returns the task that the model `name` is trained on where it has labels: its own, or to classify text."""
    own = with_task(TrainingSpec.of(name)).model.task
    return "text-classification" if own in ("masked-lm", "causal-lm", "embedding") else own


def _with_clear_errors(loss: Loss, adapters: str) -> Loss:
    """`loss` with one-line errors: a model that was built from a configuration alone may fail in its first forward."""

    def compute_loss(model: Forward, batch: Batch) -> torch.Tensor:
        with library_reads(f"its forward refuses a batch of {', '.join(batch)}{adapters}"):
            lost = loss(model, batch)
        if torch.is_grad_enabled() and not lost.requires_grad:
            raise UserError(f"nothing that is trained has a part in the loss{adapters}")
        return lost

    return compute_loss


def _check_states(model: nn.Module, spec: TrainingSpec) -> None:
    """Raises UserError for a ring of GPUs along which layers would pass a state on: axolotl has code of its own."""
    launch, text = spec.launch.launch, getattr(getattr(model, "config", None), "get_text_config", None)
    if launch is not None and launch.cp > 1 and text is not None:
        part = spec.data.tokens // launch.cp
        if carries_state(text()):
            raise UserError(
                f"launch cp {launch.cp}: layers that carry a state along the sequence: accelerate refuses them; rows "
                f"of {part} tokens on each GPU take nearly as much, without what the GPUs send each other",
                launch=replace(launch, cp=1), seq_length=part,
            )  # fmt: skip


def _with_blocks(launch: Launch | None, model: nn.Module, strict: bool) -> tuple[Launch | None, tuple[str, ...]]:
    """The launch with the model's own blocks in place of classes that it does not have, and a note on them."""
    classes = {type(module).__name__ for module in model.modules()}
    absent = [name for name in (launch and launch.wrap) or () if name not in classes]
    if not absent or strict or launch is None:
        return launch, ()
    said = f"the launch wraps {', '.join(absent)}, which the model does not have, and a run ends there"
    return replace(launch, wrap=()), (f"{said}: its own blocks are predicted",)


def _with_missing_kernels(title: str, model: nn.Module) -> str:
    """`title`, and the packages of kernels that are not installed, in place of which PyTorch code is traced.

    Such code may need more memory: Mamba's scan then keeps the state of each step.
    """
    places = {type(module).__module__ for module in model.modules()}
    absent = sorted({package for place in places for package in _kernels_of(place) if find_spec(package) is None})
    return f"{title} (PyTorch's own code, slower than the kernels of {' and '.join(absent)})" if absent else title


@lru_cache
def _kernels_of(module: str) -> tuple[str, ...]:
    """The packages whose kernels a modelling file of transformers calls if they are installed."""
    if not module.startswith("transformers.models."):
        return ()
    source = inspect.getsource(sys.modules[module])
    old = ["mamba_ssm"] if "is_mamba_ssm_available" in source else []  # before transformers 5.20
    return tuple({*old, *(name.replace("-", "_") for name in _FALLBACK.findall(source))})


def _check_samples(name: str, workload: Workload, spec: TrainingSpec) -> None:
    """Raises UserError if `spec` sets sizes that the samples of `workload` do not have."""
    held = f"the batches of {name}, of kind '{workload.kind}', hold no"
    for asked, size, given, what in (
        ("seq_length", "seq_length", f"sequence length {spec.data.seq_length}", "sequences"),
        ("images", "images", f"images {spec.data.images}", "images among text"),
        ("audio_seconds", "audio_seconds", f"audio seconds {spec.data.audio_seconds}", "sound"),
        ("resolution", "resolution", f"resolution {spec.data.resolution}", "images"),
        ("buckets", "height", "aspect ratio buckets", "images in buckets"),
        ("frames", "frames", f"{spec.data.frames} frames", "videos"),
    ):
        if spec.get(asked) and size not in workload.shape:
            raise UserError(f"{given}: {held} {what}")
    for budget in ("max_pixels", "longest_side"):
        if (given := spec.get(budget)) and not spec.data.images:
            raise UserError(
                f"{budget.replace('_', ' ')} {given}: it applies to images; give their number too, such as --images 1"
            )
    for asked, what in (("train_text_encoder", "text encoders"), ("encode_each_step", "images to encode")):
        if spec.get(asked) and workload.kind not in ("diffusion U-Net", "diffusion model"):
            raise UserError(f"{asked.replace('_', ' ')}: {name}, of kind '{workload.kind}', has no {what}")


def _by_kind(name: str, config: Mapping[str, Any], spec: TrainingSpec) -> Workload:
    """The workload of a transformers or a diffusers configuration."""
    if "_class_name" in config:
        if spec.kernels.use_liger_kernel or spec.kernels.cut_cross_entropy:
            raise UserError(f"Liger's kernels and cut cross entropy are not for {name}, a diffusion model")
        if spec.model.task or spec.model.num_labels:
            raise UserError(f"task and number of labels: {name} is a diffusion model, which is trained on noise")
        from ckpt_ft.workloads.diffusion_models import diffusion_model

        return diffusion_model(name, config, spec)
    if "model_type" not in config:
        raise UserError(f"{name}: its config has neither model_type (transformers) nor _class_name (diffusers)")
    from ckpt_ft.workloads.transformers_models import transformers_model

    return transformers_model(name, config, spec)
