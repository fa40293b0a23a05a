"""Diffusion models of diffusers as workloads: U-Nets and transformers on the meta device, their inputs and loss.

The inputs of each class have the shapes of diffusers' own training scripts and pipelines: how many tokens a prompt is
padded to, and how many pixels and frames one latent represents. No prompt has padding.
"""

from __future__ import annotations

import configparser
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckpt_ft.errors import UserError, one_line
from ckpt_ft.spec.peft_file import takes
from ckpt_ft.spec.training_spec import TrainingSpec

from .adapters import Valueless, adapt, without_adapters
from .pipeline_parts import (
    TEXT_ENCODERS,
    UNET,
    Encoding,
    TextAndUNet,
    add_text_adapters,
    build_text_encoder,
    build_vae,
    inpaints,
    part_configs,
    text_inputs,
    unet_sizes,
)
from .sample_sizes import Lengths, sizes_of
from .workload import DTYPES, MIXED_PRECISION, Batch, Forward, Workload

CLIP_TOKENS = 77  # of a prompt for CLIP's text encoders
_META_SIZES = 6  # numbers in an image's original size, crop and target size


@dataclass(frozen=True)
class Latents:
    """A micro-batch of noisy latents: `size` samples of `height` x `width`, with `frames` if they are videos.

    prompt_tokens: tokens of a U-Net's prompts.
    """

    config: Any
    size: int
    height: int
    width: int
    frames: int
    dtype: torch.dtype
    prompt_tokens: int = CLIP_TOKENS

    def zeros(self, *shape: int) -> torch.Tensor:
        """Zeros of this shape for every sample, in the latents' dtype."""
        return torch.zeros(self.size, *shape, dtype=self.dtype)

    def tokens(self, patch: int) -> int:
        """The number of squares of `patch` x `patch` in an image."""
        return (self.height // patch) * (self.width // patch)

    def number(self, text: str) -> int:
        """A number, or the one of that name in the latents or in the model's configuration."""
        value = int(text) if text.isdecimal() else getattr(self if hasattr(self, text) else self.config, text)
        return int(value)

    def rotary(self, frames: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of rotary positions."""
        shape = frames * self.tokens(self.config.patch_size), self.config.attention_head_dim
        return torch.zeros(shape), torch.zeros(shape)


def _sdxl_sizes(x: Latents) -> Batch | None:
    """SDXL's pooled prompt and sizes."""
    config = x.config
    if config.addition_embed_type != "text_time":
        return None
    pooled = config.projection_class_embeddings_input_dim - _META_SIZES * config.addition_time_embed_dim
    return {"text_embeds": x.zeros(pooled), "time_ids": x.zeros(_META_SIZES)}


def _video_rotary(x: Latents) -> tuple[torch.Tensor, torch.Tensor] | None:
    frames = math.ceil(x.frames / (x.config.patch_size_t or 1))
    return x.rotary(frames) if x.config.use_rotary_positional_embeddings else None


# The words of diffusion_inputs.ini -> (latents, numbers) -> an argument; None if the configuration does not take it.
_MAKERS: dict[str, Callable[..., Any]] = {
    "image": lambda x: x.zeros(x.config.in_channels, x.height, x.width),
    "video": lambda x: x.zeros(x.config.in_channels, x.frames, x.height, x.width),
    "patches": lambda x, patch, frames=1: x.zeros(frames * x.tokens(patch), x.config.in_channels),
    "positions": lambda x, patch, axes: torch.zeros(x.tokens(patch), axes, dtype=x.dtype),
    "shared": lambda x, *shape: torch.zeros(shape, dtype=x.dtype),  # by all samples
    "list": lambda x, *shape: [torch.zeros(shape, dtype=x.dtype) for _ in range(x.size)],
    "mask": lambda x, tokens: torch.ones(x.size, tokens, dtype=torch.long),
    "times": lambda x: torch.zeros(x.size, dtype=torch.long),
    "time": Latents.zeros,
    "guidance": lambda x: x.zeros() if x.config.guidance_embeds else None,
    "number": lambda x, number: number,
    "image_shapes": lambda x: [[(1, x.height // 2, x.width // 2)]] * x.size,
    "pixart_sizes": lambda x: {"resolution": x.zeros(2), "aspect_ratio": x.zeros(1)},
    "sdxl_sizes": _sdxl_sizes,
    "rotary": Latents.rotary,
    "video_rotary": _video_rotary,
}


class Kind:
    """How to call the forward of a model class: a section of diffusion_inputs.ini."""

    def __init__(self, section: Mapping[str, str]) -> None:
        self.arguments = {name: text.split() for name, text in section.items() if not name.startswith("@")}
        self.frames, self.own_side = int(section.get("@frames", 0)), int(section.get("@own_side", 128))
        self._scale = int(section.get("@scale", 8))
        self._scale_48 = int(section.get("@scale_48", self._scale))

    def pixels(self, config: Any) -> int:
        """Pixels of an image's side per latent."""
        return self._scale_48 if config.in_channels == 48 else self._scale

    def inputs(self, x: Latents) -> Batch:
        """The arguments of forward."""
        made = {}
        for name, (first, *rest) in self.arguments.items():
            make, sizes = (_MAKERS[first], rest) if first in _MAKERS else (Latents.zeros, [first, *rest])
            made[name] = make(x, *map(x.number, sizes))
        return {name: value for name, value in made.items() if value is not None}


def _read_kinds() -> dict[str, Kind]:
    table = configparser.ConfigParser(interpolation=None)
    table.optionxform = str  # type: ignore[assignment,method-assign]  # keeps the case of names
    table.read_string(Path(__file__).with_name("diffusion_inputs.ini").read_text(encoding="utf-8"))
    return {name: Kind(table[name]) for name in table.sections()}


KINDS = _read_kinds()


ATTENTION_PROJECTIONS = ("to_k", "to_q", "to_v", "to_out.0")  # the targets of diffusers' LoRA scripts
_LEAST = 8  # a resolution is a multiple of so many pixels, even if a latent is one pixel
_FRAMES = 49  # default length of a video, about two seconds


def diffusion_model(name: str, config: Mapping[str, Any], spec: TrainingSpec) -> Workload:
    """The workload of a diffusers model config (the one with `_class_name`).

    Raises:
        UserError: no training step is known for the class, or the resolution does not fit its VAE.
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
        auxiliary_models=() if encoding is None else encoding.modules,
        notes=notes,
        lengths=Lengths.of((high * wide for high, wide in sizes), by_length=True, unit="pixels") if sizes else None,
    )


def _build(name: str, config: Mapping[str, Any], spec: TrainingSpec) -> tuple[Any, Kind]:
    """The model on the meta device in the spec's dtype, and how its class is called.

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
            # diffusers' own `to` warns about modules that want float32.
            nn.Module.to(model, DTYPES[spec.precision.dtype])
    except Exception as error:
        raise UserError(f"{name}: its config does not make a model: {one_line(error, 200)}") from error
    return model.train(), KINDS[kind]


def _latent_side(config: Any, called: Kind, scale: int, resolution: int) -> int:
    """The latents per side of images of `resolution` pixels, `scale` pixels each; 0 pixels for the model's own side.

    Raises:
        UserError: the resolution is not a whole number of latents, or is 0 and the model's own images are not square.
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
    """Returns `spec` with adapters on the attention's projections if it names no modules."""
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
    """Returns `model`, joined with its text encoders if they are trained, and the encoding in each step, if any.

    Raises:
        UserError: the pipeline's other parts are not known, or the model whose text encoders are to be trained is no
            U-Net.
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
    """The inputs of a U-Net, alone or with its text encoders, as zeros, for latents of `shape` (height, width).

    prompt_tokens: tokens of a prompt that is encoded already.
    """
    joint = isinstance(model, TextAndUNet)
    unet = without_adapters(model.unet if joint else model)
    inputs = KINDS[type(unet).__name__].inputs(Latents(unet.config, size, *shape, 0, dtype, prompt_tokens))
    return text_inputs(inputs, list(model.text_encoders.values())) if joint else inputs


def noise_loss(model: Forward, batch: Batch) -> torch.Tensor:
    """Mean squared error in fp32 between the prediction and the batch's "target"; zeros without one."""
    inputs = {key: value for key, value in batch.items() if key != "target"}
    prediction = model(**inputs, return_dict=False)[0]
    if isinstance(prediction, list):  # one per sample
        prediction = torch.stack(prediction)
    target = batch["target"] if "target" in batch else torch.zeros_like(prediction)
    return torch.nn.functional.mse_loss(prediction.float(), target.float(), reduction="mean")
