"""The training step of a diffusers U-Net or transformer on the meta device: noise in and out, mean squared error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ckpt_ft.errors import UserError, one_line

from .adapters import adapt
from .buckets import sizes_of
from .diffusion_inputs import KINDS, Latents
from .dtypes import DTYPES
from .lengths import Lengths
from .peft_file import takes
from .settings import Settings
from .workload import Batch, Forward, Workload

ATTENTION_PROJECTIONS = ("to_k", "to_q", "to_v", "to_out.0")  # what diffusers' LoRA scripts adapt
_LEAST = 8  # pixels that a resolution is a multiple of, also where a latent is one pixel
_FRAMES = 49  # of a video, where none are asked for: about two seconds


def diffusion_model(name: str, config: Mapping[str, Any], settings: Settings) -> Workload:
    """The workload of a diffusers model config (the one with `_class_name`).

    Raises:
        UserError: the class is not one that is trained on noise, or the resolution does not fit its VAE.
    """
    try:
        import diffusers
    except ImportError as error:
        raise UserError(
            f"{name} is a diffusers model and diffusers is not installed: pip install 'ckpt_ft[diffusion]'"
        ) from error
    kind = config["_class_name"]
    if kind not in KINDS:
        raise UserError(f"{name}: no training step is known for {kind} ({', '.join(KINDS)})")
    if not hasattr(diffusers, kind):
        raise UserError(f"{name}: diffusers {diffusers.__version__} has no {kind}")
    built_class, called = getattr(diffusers, kind), KINDS[kind]
    try:
        with torch.device("meta"):
            model = built_class.from_config(dict(config))
            nn.Module.to(model, DTYPES[settings.dtype])  # diffusers' own warns of modules that want float32
            model.train()
    except Exception as error:
        raise UserError(f"{name}: its config does not make a model: {one_line(error, 200)}") from error
    scale, own = called.pixels(model.config), model.config.get("sample_size") or called.own_side
    side = settings.resolution // scale if settings.resolution else int(own)
    if settings.resolution % max(scale, _LEAST):
        raise UserError(
            f"resolution {settings.resolution}: a latent holds {scale} x {scale} pixels, so it must be a multiple of "
            f"{max(scale, _LEAST)}"
        )
    frames = (settings.frames or _FRAMES) if called.frames else 0
    targets = settings.lora_targets or ATTENTION_PROJECTIONS
    settings = replace(settings, lora_targets=targets, lora_dropout=settings.lora_dropout or 0.0)
    peft = settings.peft
    if peft and not peft.get("target_modules") and takes(peft, "target_modules", "the PEFT configuration"):
        settings = replace(settings, peft={**peft, "target_modules": list(ATTENTION_PROJECTIONS)})
    dtype = torch.float32 if settings.mixed_precision != "no" else DTYPES[settings.dtype]
    latent_frames = (frames - 1) // called.frames + 1 if frames else 0

    sizes = sizes_of(settings.buckets, side * scale, max(scale, _LEAST)) if settings.buckets else []
    sides = {high * wide: (high // scale, wide // scale) for high, wide in sizes} or {0: (side, side)}

    def make_batch(samples: int, length: int | None) -> Batch:
        nearest = max(sides) if length is None else min(sides, key=lambda pixels: abs(pixels - length))
        return called.inputs(Latents(model.config, samples, *sides[nearest], latent_frames, dtype))

    height, width = sides[max(sides)]
    shape = {"resolution": side * scale, **({"frames": frames} if frames else {})}
    notes: tuple[str, ...] = ()
    if sizes:
        shape = {**shape, "height": height * scale, "width": width * scale}
        notes = (f"buckets: a batch of {height * scale}x{width * scale} pixels, the largest of {len(sizes)}",)
    return Workload(
        adapt(model, settings),
        make_batch,
        noise_loss,
        kind="diffusion model",
        shape=shape,
        notes=notes,
        lengths=Lengths.of((high * wide for high, wide in sizes), by_length=True, unit="pixels") if sizes else None,
    )


def noise_batch(model: nn.Module, size: int, shape: tuple[int, int], dtype: torch.dtype) -> Batch:
    """What an image model of a known class is called with, as zeros: latents of `shape` (h, w), prompts and times."""
    return KINDS[type(model).__name__].inputs(Latents(model.config, size, *shape, 0, dtype))


def noise_loss(model: Forward, batch: Batch) -> torch.Tensor:
    """Mean squared error in fp32 against noise of the prediction's shape: the batch's "target", if it has one."""
    inputs = {key: value for key, value in batch.items() if key != "target"}
    prediction = model(**inputs, return_dict=False)[0]
    if isinstance(prediction, list):  # a sample each
        prediction = torch.stack(prediction)
    target = batch["target"] if "target" in batch else torch.zeros_like(prediction)
    return torch.nn.functional.mse_loss(prediction.float(), target.float(), reduction="mean")
