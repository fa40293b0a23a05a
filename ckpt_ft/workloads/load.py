"""A model by name as a Workload: built from its configuration on the meta device, in the order that it is trained in.

`load(name, ...)` takes a Hub id, a local directory or a config file, of a transformers model (the class that it names,
where batches.py knows what that is trained on) or a diffusers pipeline (its U-Net or transformer). No weight is ever
allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from ckpt_ft.errors import UserError
from ckpt_ft.memory.gpus import GPU, gpu_of

from .adapters import notes_on
from .dtypes import MIXED_PRECISION
from .lengths import Lengths
from .model_config import read_config
from .optimizers import optimizer_maker
from .settings import Settings
from .workload import MakeBatch, Workload


def load(
    name: str,
    settings: Settings,
    device: str | GPU = "t4",
    lengths: Lengths | None = None,
    batches: Callable[[nn.Module], MakeBatch] | None = None,
) -> Workload:
    """The workload of a Hub id, a local directory or a config file.

    Args:
        device: that it is to run on.
        lengths: tokens of a dataset's rows; without them every row has the settings' `seq_length`.
        batches: for the model, batches of the dataset's own rows; without them, of rows of text as long as those.

    Raises:
        UserError: nothing by that name, not a kind of model that is known here, or settings that do not fit it.
    """
    if lengths is not None:
        settings = replace(settings, seq_length=max(lengths.longest, 2))
    if settings.lora_targets and not settings.lora_r:
        raise UserError(f"LoRA targets {','.join(settings.lora_targets)} without LoRA: give a rank, or drop them")
    gpu = gpu_of(device)
    if lengths is not None and settings.rows == "packed":
        raise UserError("a dataset's lengths and packed rows: a packed sequence is full; leave one of them out")
    workload = _by_kind(name, read_config(name), settings)
    _check_samples(name, workload, settings, own_rows=batches is not None)
    if lengths is not None:
        _check_lengths(name, workload, settings)
    if batches is not None:
        workload = replace(workload, make_batch=batches(workload.model), notes=())  # of batches that are not made
    return replace(
        workload,
        name=name,
        make_optimizer=optimizer_maker(settings.optimizer, settings.ema, workload.model),
        device=device,
        autocast=MIXED_PRECISION[settings.mixed_precision],
        accumulation=settings.accumulation,
        max_grad_norm=settings.max_grad_norm,
        lengths=lengths or workload.lengths,
        launch=settings.launch,
        alloc_conf=settings.alloc_conf,
        notes=(*workload.notes, *notes_on(settings), *([gpu.note] if gpu and gpu.note else [])),
    )


def _check_samples(name: str, workload: Workload, settings: Settings, own_rows: bool) -> None:
    """Raises UserError where `settings` say something of samples that those of `workload` do not have.

    own_rows: batches are of a dataset's own rows.
    """
    held = f"the batches of {name}, a {workload.kind}, hold no"
    if "seq_length" in settings.given and "seq_length" not in workload.shape:
        raise UserError(f"sequence length {settings.seq_length}: {held} sequences")
    for asked, what in (("images", "images among text"), ("audio_seconds", "sound"), ("resolution", "images")):
        if getattr(settings, asked) and asked not in workload.shape:
            raise UserError(f"{asked.replace('_', ' ')} {getattr(settings, asked)}: {held} {what}")
    for budget in ("max_pixels", "longest_side"):
        if (given := getattr(settings, budget)) and not settings.images and not own_rows:
            raise UserError(
                f"{budget.replace('_', ' ')} {given}: it is of images; say how many each row has, 1 for example"
            )
    if settings.buckets and "height" not in workload.shape:
        raise UserError(f"aspect ratio buckets: {held} images in buckets")
    for asked, what in (("train_text_encoder", "text encoders"), ("encode_each_step", "images to encode")):
        if getattr(settings, asked) and workload.kind != "diffusion model":
            raise UserError(f"{asked.replace('_', ' ')}: {name}, a {workload.kind}, has no {what}")
    if settings.frames and "frames" not in workload.shape:
        raise UserError(f"{settings.frames} frames: {held} videos")


def _check_lengths(name: str, workload: Workload, settings: Settings) -> None:
    """Raises UserError where the lengths of a dataset's rows say nothing of the batches of `workload`."""
    if settings.images:
        raise UserError("a dataset's lengths and images in every row: leave one of them out")
    if workload.kind != "language model":
        raise UserError(
            f"a dataset's lengths: the batches of {name}, of kind '{workload.kind}', are all alike; leave it out"
        )


def _by_kind(name: str, config: Mapping[str, Any], settings: Settings) -> Workload:
    """Model, batches and loss of the kind of model that `config` describes."""
    if "_class_name" in config:
        from .diffusion import diffusion_model

        return diffusion_model(name, config, settings)
    if "model_type" not in config:
        raise UserError(f"{name}: its config has neither model_type (transformers) nor _class_name (diffusers)")
    from .transformers_models import transformers_model

    return transformers_model(name, config, settings)
