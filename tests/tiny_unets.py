"""Stable Diffusion pipelines of three architectures, small enough to be built and trained in tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ckpt_ft.training.samples.pipelines import (
    TEXT_WIDTH,
    diffusion_scheduler,
    tiny_clip,
    tiny_tokenizer,
    tiny_unet,
    tiny_vae,
)

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


def make_tiny_pipeline(kind: str, vae_steps: int = 0, widths: tuple[int, ...] = (64, 96)) -> DiffusionPipeline:
    """Returns a pipeline for `RESOLUTION` pixels, the same on each call; keeps the random state.

    Args:
        kind: "sd1" (predicts noise), "sd2" (predicts velocity) or "sdxl" (two text encoders, pooled embedding, sizes).
        vae_steps: training steps of the VAE; 0 leaves it random.
        widths: channels of the U-Net's levels.
    """
    from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts: dict[str, Any] = {
            "vae": tiny_vae(vae_steps),
            "text_encoder": tiny_clip("CLIPTextModel"),
            "tokenizer": tiny_tokenizer(),
            "scheduler": diffusion_scheduler("v_prediction" if kind == "sd2" else "epsilon"),
        }
        if kind != "sdxl":
            alone = dict.fromkeys(("safety_checker", "feature_extractor"))
            return StableDiffusionPipeline(unet=tiny_unet(widths), requires_safety_checker=False, **alone, **parts)
        parts |= {"text_encoder_2": tiny_clip("CLIPTextModelWithProjection"), "tokenizer_2": tiny_tokenizer()}
        time_ids = 8  # embedding width of each of the six sizes
        unet = tiny_unet(
            widths,
            2 * TEXT_WIDTH,
            addition_embed_type="text_time",
            addition_time_embed_dim=time_ids,
            projection_class_embeddings_input_dim=TEXT_WIDTH + 6 * time_ids,
        )
        return StableDiffusionXLPipeline(unet=unet, **parts)
