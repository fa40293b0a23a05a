"""The training step of a diffusers U-Net or transformer on the meta device: noise in and out, mean squared error."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from ckpt_ft.errors import UserError, one_line
from ckpt_ft.spec.peft_file import takes
from ckpt_ft.spec.training_spec import TrainingSpec

from .adapters import adapt, without_adapters
from .buckets import sizes_of
from .diffusion_inputs import CLIP_TOKENS, KINDS, Kind, Latents
from .dtypes import DTYPES, MIXED_PRECISION
from .lengths import Lengths
from .pipeline_parts import (
    TEXT_ENCODERS,
    UNET,
    Encoding,
    build_text_encoder,
    build_vae,
    inpaints,
    part_configs,
    unet_sizes,
)
from .text_and_unet import TextAndUNet, add_text_adapters, text_inputs
from .valueless import Valueless
from .workload import Batch, Forward, Workload

ATTENTION_PROJECTIONS = ("to_k", "to_q", "to_v", "to_out.0")  # what diffusers' LoRA scripts adapt
_LEAST = 8  # pixels that a resolution is a multiple of, also where a latent is one pixel
_FRAMES = 49  # of a video, where none are asked for: about two seconds


def diffusion_model(name: str, config: Mapping[str, Any], spec: TrainingSpec) -> Workload:
    """The workload of a diffusers model config (the one with `_class_name`).

    Raises:
        UserError: the class is not one that is trained on noise, or the resolution does not fit its VAE.
    """
    model, called = _build(name, config, spec)
    kind = config["_class_name"]
    sized = unet_sizes(name) if kind == UNET else None
    scale, prompt_tokens = sized or (called.pixels(model.config), CLIP_TOKENS)
    side = _latent_side(model.config, called, scale, spec.data.resolution)
    spec = _adapting_attention(spec)
    dtype = torch.float32 if spec.precision.mixed_precision != "no" else DTYPES[spec.precision.dtype]
    frames = (spec.data.frames or _FRAMES) if called.frames else 0
    latent_frames = (frames - 1) // called.frames + 1 if frames else 0

    sizes = sizes_of(spec.data.buckets, side * scale, max(scale, _LEAST)) if spec.data.buckets else []
    sides = {high * wide: (high // scale, wide // scale) for high, wide in sizes} or {0: (side, side)}

    inputs = partial(_inputs, called, model.config, latent_frames, dtype, prompt_tokens)
    masked = kind == UNET and inpaints(model.config)
    whole = {**model.config, "_class_name": kind}
    model, encoding = adapt(model, spec), None
    if spec.adapter.train_text_encoder or spec.data.encode_each_step or masked:
        prompt = inputs(1, (side, side)).get("encoder_hidden_states")
        tokens = None if kind == UNET else 0 if prompt is None else prompt.shape[1]
        model, encoding = _with_parts(name, part_configs(name, whole), spec, model, tokens, masked)

    def make_batch(samples: int, length: int | None) -> Batch:
        nearest = max(sides) if length is None else min(sides, key=lambda pixels: abs(pixels - length))
        height, width = sides[nearest]
        if encoding is not None:
            encoding(samples, (height * scale, width * scale))
        batch = inputs(samples, (height, width))
        joint = isinstance(model, TextAndUNet)
        return text_inputs(batch, list(model.text_encoders.values())) if joint else batch

    height, width = sides[max(sides)]
    shape = {"resolution": side * scale, **({"frames": frames} if frames else {})}
    notes: tuple[str, ...] = ()
    if sizes:
        shape = {**shape, "height": height * scale, "width": width * scale}
        notes = (f"buckets: a batch of {height * scale}x{width * scale} pixels, the largest of {len(sizes)}",)
    return Workload(
        model,
        make_batch,
        noise_loss,
        kind="diffusion model",
        shape=shape,
        beside=() if encoding is None else encoding.modules,
        notes=notes,
        lengths=Lengths.of((high * wide for high, wide in sizes), by_length=True, unit="pixels") if sizes else None,
    )


def _build(name: str, config: Mapping[str, Any], spec: TrainingSpec) -> tuple[Any, Kind]:
    """The model on meta, in the settings' dtype, and how its class is called.

    Raises:
        UserError: diffusers is missing or has no such class, no training step is known for it, or its config makes no
            model.
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
    try:
        with torch.device("meta"):
            model = getattr(diffusers, kind).from_config(dict(config))
            nn.Module.to(model, DTYPES[spec.precision.dtype])  # diffusers' own warns of modules that want float32
    except Exception as error:
        raise UserError(f"{name}: its config does not make a model: {one_line(error, 200)}") from error
    return model.train(), KINDS[kind]


def _latent_side(config: Any, called: Kind, scale: int, resolution: int) -> int:
    """Latents of a side of images of `resolution` pixels, `scale` of them for a latent; 0 pixels for the model's own.

    Raises:
        UserError: it is no whole number of latents, or none is given and the model's own is no square.
    """
    if resolution % max(scale, _LEAST):
        raise UserError(
            f"resolution {resolution}: a latent holds {scale} x {scale} pixels, so it must be a multiple of "
            f"{max(scale, _LEAST)}"
        )
    own = config.get("sample_size") or called.own_side
    if not resolution and not isinstance(own, int):
        raise UserError(f"resolution: the model's own is no square ({own} latents); give the side of one in pixels")
    return resolution // scale if resolution else int(own)


def _adapting_attention(spec: TrainingSpec) -> TrainingSpec:
    """`settings` whose adapters stand on the attention's projections where no other modules are named."""
    targets = spec.adapter.lora_targets or ATTENTION_PROJECTIONS
    spec = spec.edit(lora_targets=targets, lora_dropout=spec.adapter.lora_dropout or 0.0)
    peft = spec.adapter.peft
    if peft and not peft.get("target_modules") and takes(peft, "target_modules", "the PEFT configuration"):
        spec = spec.edit(peft={**peft, "target_modules": list(ATTENTION_PROJECTIONS)})
    return spec


def _inputs(
    called: Kind,
    config: Any,
    frames: int,
    dtype: torch.dtype,
    prompt_tokens: int,
    samples: int,
    shape: tuple[int, int],
) -> Batch:
    return called.inputs(Latents(config, samples, *shape, frames, dtype, prompt_tokens))


def _with_parts(
    name: str, parts: Mapping[str, Any], spec: TrainingSpec, model: Any, tokens: int | None, masked: bool
) -> tuple[Any, Encoding | None]:
    """`model`, with its text encoders where they are trained too; and what encodes in each step, if anything does.

    Raises:
        UserError: the pipeline's other parts are not known, or text encoders are to be trained that are no U-Net's.
    """
    if spec.adapter.train_text_encoder and tokens is not None:
        raise UserError(f"train text encoder: {name} is no U-Net, whose text encoders alone are trained with it")
    dtype = MIXED_PRECISION[spec.precision.mixed_precision] or DTYPES[spec.precision.dtype]
    encoders = [build_text_encoder(name, parts[part], dtype) for part in TEXT_ENCODERS if part in parts]
    if spec.adapter.train_text_encoder:
        with torch.device("meta"), Valueless():
            model = TextAndUNet(model, encoders)
            add_text_adapters(model, spec.adapter.lora_r, dropout=spec.adapter.lora_dropout or 0.0)
        encoders = []
    if not (spec.data.encode_each_step or masked):
        return model, None
    return model, Encoding(build_vae(name, parts["vae"]), encoders, tokens, masked)


def unet_batch(
    model: Any, size: int, shape: tuple[int, int], dtype: torch.dtype, prompt_tokens: int = CLIP_TOKENS
) -> Batch:
    """What a U-Net, alone or with its text encoders, is called with, as zeros, of latents `shape` (h, w).

    prompt_tokens: of a prompt that is encoded already.
    """
    joint = isinstance(model, TextAndUNet)
    unet = without_adapters(model.unet if joint else model)
    inputs = KINDS[type(unet).__name__].inputs(Latents(unet.config, size, *shape, 0, dtype, prompt_tokens))
    return text_inputs(inputs, list(model.text_encoders.values())) if joint else inputs


def noise_loss(model: Forward, batch: Batch) -> torch.Tensor:
    """Mean squared error in fp32 against noise of the prediction's shape: the batch's "target", if it has one."""
    inputs = {key: value for key, value in batch.items() if key != "target"}
    prediction = model(**inputs, return_dict=False)[0]
    if isinstance(prediction, list):  # a sample each
        prediction = torch.stack(prediction)
    target = batch["target"] if "target" in batch else torch.zeros_like(prediction)
    return torch.nn.functional.mse_loss(prediction.float(), target.float(), reduction="mean")
