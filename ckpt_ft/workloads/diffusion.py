"""The training step of a diffusers U-Net or transformer on the meta device: noise in and out, mean squared error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ckpt_ft.errors import UserError, one_line

from .adapters import adapt
from .settings import DTYPES, Settings
from .workload import Batch, Forward, Workload

_ATTENTION_PROJECTIONS = ("to_k", "to_q", "to_v", "to_out.0")  # what diffusers' LoRA scripts adapt
_PROMPT_TOKENS = {"SD3Transformer2DModel": 333, "FluxTransformer2DModel": 512, "PixArtTransformer2DModel": 120}
_CLIP_TOKENS = 77
_SAMPLE_SIZE = 128  # of a latent: 1024 pixels


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
    if kind not in _INPUTS:
        raise UserError(f"{name}: no training step is known for {kind} ({', '.join(_INPUTS)})")
    built_class = getattr(diffusers, kind)
    try:
        with torch.device("meta"):
            model = built_class.from_config(dict(config)).to(DTYPES[settings.dtype]).train()
    except Exception as error:
        raise UserError(f"{name}: its config does not make a model: {one_line(error, 200)}") from error
    scale = 1 if kind == "UNet2DModel" else 8  # pixels of an image for one of a latent
    own = model.config.get("sample_size") or _SAMPLE_SIZE  # Flux names none
    side = settings.resolution // scale if settings.resolution else int(own)
    if settings.resolution % 8:
        raise UserError(
            f"resolution {settings.resolution}: a latent holds 8 x 8 pixels, so it must be a multiple of 8"
        )
    targets = settings.lora_targets or _ATTENTION_PROJECTIONS
    settings = replace(settings, lora_targets=targets, lora_dropout=settings.lora_dropout or 0.0)
    dtype = torch.float32 if settings.mixed_precision != "no" else DTYPES[settings.dtype]

    def make_batch(samples: int, length: int | None) -> Batch:
        return _INPUTS[kind](model.config, samples, side, dtype)

    shape = {"resolution": side * scale}
    return Workload(adapt(model, settings), make_batch, noise_loss, kind="diffusion model", shape=shape)


def noise_batch(model: nn.Module, size: int, side: int, dtype: torch.dtype) -> Batch:
    """What a model of a known class is called with, as zeros: `size` latents of `side` x `side`, prompts and times."""
    batch: Batch = _INPUTS[type(model).__name__](model.config, size, side, dtype)
    return batch


def noise_loss(model: Forward, batch: Batch) -> torch.Tensor:
    """Mean squared error in fp32 against noise of the prediction's shape: the batch's "target", if it has one."""
    inputs = {key: value for key, value in batch.items() if key != "target"}
    prediction = model(**inputs, return_dict=False)[0]
    target = batch["target"] if "target" in batch else torch.empty_like(prediction)
    return torch.nn.functional.mse_loss(prediction.float(), target.float(), reduction="mean")


def _unet(config: Any, size: int, side: int, dtype: torch.dtype) -> Batch:
    return {
        "sample": torch.zeros(size, config.in_channels, side, side, dtype=dtype),
        "timestep": torch.zeros(size, dtype=torch.long),
    }


def _conditional_unet(config: Any, size: int, side: int, dtype: torch.dtype) -> Batch:
    batch = _unet(config, size, side, dtype)
    batch["encoder_hidden_states"] = torch.zeros(size, _CLIP_TOKENS, config.cross_attention_dim, dtype=dtype)
    if config.addition_embed_type == "text_time":
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        batch["added_cond_kwargs"] = {
            "text_embeds": torch.zeros(size, pooled, dtype=dtype),
            "time_ids": torch.zeros(size, 6, dtype=dtype),
        }
    return batch


def _sd3(config: Any, size: int, side: int, dtype: torch.dtype) -> Batch:
    return {
        "hidden_states": torch.zeros(size, config.in_channels, side, side, dtype=dtype),
        "encoder_hidden_states": torch.zeros(
            size, _PROMPT_TOKENS["SD3Transformer2DModel"], config.joint_attention_dim, dtype=dtype
        ),
        "pooled_projections": torch.zeros(size, config.pooled_projection_dim, dtype=dtype),
        "timestep": torch.zeros(size, dtype=torch.long),
    }


def _flux(config: Any, size: int, side: int, dtype: torch.dtype) -> Batch:
    tokens, prompt = (side // 2) ** 2, _PROMPT_TOKENS["FluxTransformer2DModel"]
    batch = {
        "hidden_states": torch.zeros(size, tokens, config.in_channels, dtype=dtype),
        "encoder_hidden_states": torch.zeros(size, prompt, config.joint_attention_dim, dtype=dtype),
        "pooled_projections": torch.zeros(size, config.pooled_projection_dim, dtype=dtype),
        "timestep": torch.zeros(size, dtype=dtype),
        "img_ids": torch.zeros(tokens, 3, dtype=dtype),
        "txt_ids": torch.zeros(prompt, 3, dtype=dtype),
    }
    if config.guidance_embeds:
        batch["guidance"] = torch.zeros(size, dtype=dtype)
    return batch


def _pixart(config: Any, size: int, side: int, dtype: torch.dtype) -> Batch:
    prompt = _PROMPT_TOKENS["PixArtTransformer2DModel"]
    return {
        "hidden_states": torch.zeros(size, config.in_channels, side, side, dtype=dtype),
        "encoder_hidden_states": torch.zeros(size, prompt, config.caption_channels, dtype=dtype),
        "timestep": torch.zeros(size, dtype=torch.long),
        "added_cond_kwargs": {
            "resolution": torch.zeros(size, 2, dtype=dtype),
            "aspect_ratio": torch.zeros(size, 1, dtype=dtype),
        },
    }


def _dit(config: Any, size: int, side: int, dtype: torch.dtype) -> Batch:
    return {
        "hidden_states": torch.zeros(size, config.in_channels, side, side, dtype=dtype),
        "timestep": torch.zeros(size, dtype=torch.long),
        "class_labels": torch.zeros(size, dtype=torch.long),
    }


_INPUTS = {
    "UNet2DModel": _unet,
    "UNet2DConditionModel": _conditional_unet,
    "SD3Transformer2DModel": _sd3,
    "FluxTransformer2DModel": _flux,
    "PixArtTransformer2DModel": _pixart,
    "DiTTransformer2DModel": _dit,
}
