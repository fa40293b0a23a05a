"""The supported families of pipelines: one table of everything that differs between them.

A `Family` names classes and components, and says how prompts are encoded, how latents are scaled, and what the U-Net
or transformer is called with. Each function follows the family's pipeline in diffusers (and its training script, if
there is one), so that a model is trained on what it later draws from.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from PIL import Image
from torch import Tensor
from torch.nn import functional

from ckpt_ft.workloads.diffusion_models import IDS, TRAINABLE_ENCODERS, conditions, encoded_text

Prompts = dict[str, Tensor]  # by the names of the pipeline's arguments


@dataclass(frozen=True)
class Family:
    """One row of the table.

    Attributes:
        name: as shown to users.
        component: the name of the U-Net or transformer in the pipeline, and its folder.
        model, pipeline: its class in diffusers, and the one that saves its adapters.
        vae: the VAE's class in diffusers.
        tokens: the length that prompts are padded to; a U-Net's tokenizers have their own.
        encode: (pipeline, captions, tokens, device) -> encoded prompts.
        inputs: (model's config, noisy latents, sigmas or timesteps, prompts, guidance) -> the model's arguments.
        moments: (VAE, pixels) -> an image's latents, or the moments of their distribution, as they are cached.
        latents: (VAE, moments) -> latents (B, C, h, w) in the model's scale.
        pack: latents -> the layout in which the model predicts them.
        patch: latents along a side of one token.
        weighting: how times are drawn by default.
        scheduler: the class in diffusers of the noise that the pipeline was trained on, whatever it draws with.
        side: pixels of a side, if the model's configuration names none; None if it must.
        decodes_apart: whether images are decoded outside of autocast: SDXL's VAE overflows in half precision.
        absent: other components that are not loaded to encode prompts.
        old_lora_names: whether adapters are saved under the names that diffusers had before PEFT.
    """

    name: str
    component: str
    model: str
    pipeline: str
    vae: str
    tokens: int
    encode: Callable[[Any, list[str], int, torch.device], Prompts]
    inputs: Callable[[Any, Tensor, Tensor, Prompts, float], dict[str, Any]]
    moments: Callable[[Any, Tensor], Tensor]
    latents: Callable[[Any, Tensor], Tensor]
    pack: Callable[[Tensor], Tensor]
    patch: int = 2
    weighting: str = "none"
    scheduler: str = "FlowMatchEulerDiscreteScheduler"
    side: int | None = 1024
    decodes_apart: bool = False
    absent: tuple[str, ...] = ()
    old_lora_names: bool = False

    def draw(
        self,
        pipeline: Any,
        autocast: Callable[[], AbstractContextManager[Any]],
        guidance: float,
        arguments: dict[str, Any],
    ) -> list[Image.Image]:
        taken = inspect.signature(type(pipeline).__call__).parameters
        options: dict[str, Any] = {"output_type": "latent"} if self.decodes_apart else {}
        # A guidance-distilled transformer takes the scale as an input; any other runs twice.
        twice = "true_cfg_scale" in taken and not pipeline.components[self.component].config.guidance_embeds
        options["true_cfg_scale" if twice else "guidance_scale"] = guidance
        if "use_resolution_binning" in taken:  # it would draw images of the nearest published size
            options["use_resolution_binning"] = False
        with autocast():
            drawn = pipeline(**options, **arguments).images
        if self.decodes_apart:
            vae = pipeline.vae.float()
            parts = [vae.decode(part.float() / vae.config.scaling_factor).sample for part in drawn.split(4)]
            drawn = pipeline.image_processor.postprocess(torch.cat(parts).cpu(), output_type="pil")
        return drawn


def _packed(latents: Tensor) -> Tensor:
    """(B, C, h, w) -> (B, h/2 * w/2, 4C): squares of 2 x 2 as tokens (FluxPipeline._pack_latents)."""
    return functional.pixel_unshuffle(latents, 2).flatten(2).transpose(1, 2)


def _sequence(latents: Tensor) -> Tensor:
    """(B, C, h, w) -> (B, h * w, C)."""
    return latents.flatten(2).transpose(1, 2)


def _unchanged(latents: Tensor) -> Tensor:
    return latents


def _places(latents: Tensor, patch: int, axes: int) -> Tensor:
    """Returns (h * w / patch**2, axes): each token's row and column on the second and third axis."""
    height, width = (side // patch for side in latents.shape[2:])
    places = torch.zeros(height, width, axes, device=latents.device)
    places[..., 1] = torch.arange(height, device=latents.device)[:, None]
    places[..., 2] = torch.arange(width, device=latents.device)
    return places.flatten(0, 1)


def _moments(vae: Any, pixels: Tensor) -> Tensor:
    return vae.encode(pixels).latent_dist.parameters


def _sampled(moments: Tensor) -> Tensor:
    return DiagonalGaussianDistribution(moments).sample()


def _shifted(vae: Any, moments: Tensor) -> Tensor:
    return (_sampled(moments) - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor


def _guidance_input(config: Any, sigmas: Tensor, guidance: float) -> dict[str, Any]:
    """Returns the scale as an input of a guidance-distilled transformer."""
    return {"guidance": torch.full_like(sigmas, guidance)} if config.guidance_embeds else {}


def _unet_prompts(pipeline: Any, captions: list[str], tokens: int, device: torch.device) -> Prompts:
    """Encodes captions of full length; returns their tokens if the pipeline has no text encoders."""
    components = pipeline.components
    tokenizers = [components[name] for name in ("tokenizer", "tokenizer_2") if name in components]
    ids = {
        name: torch.tensor(tokenizer(captions, padding="max_length", truncation=True).input_ids, device=device)
        for name, tokenizer in zip(IDS, tokenizers, strict=False)
    }
    encoders = [components[name] for name in TRAINABLE_ENCODERS if components.get(name) is not None]
    return encoded_text(encoders, ids) if encoders else ids


def _unet_inputs(config: Any, noisy: Tensor, times: Tensor, prompts: Prompts, guidance: float) -> dict[str, Any]:
    return {"sample": noisy, "timestep": times, **conditions(prompts)}


def _flux_prompts(pipeline: Any, captions: list[str], tokens: int, device: torch.device) -> Prompts:
    embeds, pooled, _ = pipeline.encode_prompt(captions, None, device=device, max_sequence_length=tokens)
    return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}


def _flux_inputs(config: Any, noisy: Tensor, sigmas: Tensor, prompts: Prompts, guidance: float) -> dict[str, Any]:
    embeds = prompts["prompt_embeds"]
    return {
        "hidden_states": _packed(noisy),
        "timestep": sigmas,
        "encoder_hidden_states": embeds,
        "pooled_projections": prompts["pooled_prompt_embeds"],
        "txt_ids": torch.zeros(embeds.shape[1], 3, device=noisy.device),
        "img_ids": _places(noisy, 2, 3),
        **_guidance_input(config, sigmas, guidance),
    }


def _flux2_prompts(pipeline: Any, captions: list[str], tokens: int, device: torch.device) -> Prompts:
    return {"prompt_embeds": pipeline.encode_prompt(captions, device, max_sequence_length=tokens)[0]}


def _flux2_latents(vae: Any, moments: Tensor) -> Tensor:
    """Moves squares of 2 x 2 to channels, and whitens by the statistics of the VAE's batch norm."""
    latents = functional.pixel_unshuffle(_sampled(moments), 2)
    mean, variance = (value.to(latents).view(1, -1, 1, 1) for value in (vae.bn.running_mean, vae.bn.running_var))
    return (latents - mean) / (variance + vae.config.batch_norm_eps).sqrt()


def _flux2_inputs(config: Any, noisy: Tensor, sigmas: Tensor, prompts: Prompts, guidance: float) -> dict[str, Any]:
    embeds = prompts["prompt_embeds"]
    words = torch.zeros(embeds.shape[1], 4, device=noisy.device)
    words[:, 3] = torch.arange(len(words), device=noisy.device)
    return {
        "hidden_states": _sequence(noisy),
        "timestep": sigmas,
        "encoder_hidden_states": embeds,
        "txt_ids": words,
        "img_ids": _places(noisy, 1, 4),
        **_guidance_input(config, sigmas, guidance),
    }


def _sd3_prompts(pipeline: Any, captions: list[str], tokens: int, device: torch.device) -> Prompts:
    embeds, _, pooled, _ = pipeline.encode_prompt(
        captions, None, None, device=device, do_classifier_free_guidance=False, max_sequence_length=tokens
    )
    return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}


def _sd3_inputs(config: Any, noisy: Tensor, sigmas: Tensor, prompts: Prompts, guidance: float) -> dict[str, Any]:
    return {
        "hidden_states": noisy,
        "timestep": sigmas * 1000,
        "encoder_hidden_states": prompts["prompt_embeds"],
        "pooled_projections": prompts["pooled_prompt_embeds"],
    }


def _qwen_prompts(pipeline: Any, captions: list[str], tokens: int, device: torch.device) -> Prompts:
    """Pads to `tokens`; the pipeline itself pads to the longest prompt of the batch."""
    embeds, mask = pipeline.encode_prompt(captions, device, max_sequence_length=tokens)
    if mask is None:  # the pipeline returns None for "no padding"
        mask = torch.ones(embeds.shape[:2], dtype=torch.long, device=embeds.device)
    missing = tokens - embeds.shape[1]
    return {
        "prompt_embeds": functional.pad(embeds, (0, 0, 0, missing)),
        "prompt_embeds_mask": functional.pad(mask, (0, missing)),
    }


def _qwen_moments(vae: Any, pixels: Tensor) -> Tensor:
    """Encodes the image as a video of one frame."""
    return _moments(vae, pixels.unsqueeze(2)).squeeze(2)


def _qwen_latents(vae: Any, moments: Tensor) -> Tensor:
    latents = _sampled(moments)
    mean, deviation = (
        torch.tensor(values).to(latents).view(1, -1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return (latents - mean) / deviation


def _qwen_inputs(config: Any, noisy: Tensor, sigmas: Tensor, prompts: Prompts, guidance: float) -> dict[str, Any]:
    height, width = noisy.shape[2:]
    return {
        "hidden_states": _packed(noisy),
        "timestep": sigmas,
        "encoder_hidden_states": prompts["prompt_embeds"],
        "encoder_hidden_states_mask": prompts["prompt_embeds_mask"],
        "img_shapes": [[(1, height // 2, width // 2)]] * len(noisy),
        **_guidance_input(config, sigmas, guidance),
    }


def _sana_prompts(pipeline: Any, captions: list[str], tokens: int, device: torch.device) -> Prompts:
    """Prefixes the instruction that the pipeline gives its text encoder; like the pipeline, not for empty captions."""
    instruction = inspect.signature(type(pipeline).__call__).parameters["complex_human_instruction"].default
    encoded = [
        pipeline.encode_prompt(
            caption, False, device=device, max_sequence_length=tokens,
            complex_human_instruction=instruction if caption else None,
        )[:2]
        for caption in captions
    ]  # fmt: skip
    embeds, masks = (torch.cat(parts) for parts in zip(*encoded, strict=True))
    return {"prompt_embeds": embeds, "prompt_attention_mask": masks}


def _sana_inputs(config: Any, noisy: Tensor, sigmas: Tensor, prompts: Prompts, guidance: float) -> dict[str, Any]:
    return {
        "hidden_states": noisy,
        "encoder_hidden_states": prompts["prompt_embeds"],
        "encoder_attention_mask": prompts["prompt_attention_mask"],
        "timestep": sigmas * 1000 * config.timestep_scale,
        **_guidance_input(config, sigmas, guidance),
    }


def _unet(name: str, pipeline: str, *absent: str) -> Family:
    return Family(
        name, "unet", "UNet2DConditionModel", pipeline, "AutoencoderKL", 0,
        _unet_prompts, _unet_inputs, _moments, _shifted, _unchanged, patch=1,
        scheduler="DDPMScheduler", side=None, decodes_apart=True, absent=absent,
        old_lora_names=True,
    )  # fmt: skip


UNET = _unet("Stable Diffusion", "StableDiffusionPipeline", "safety_checker", "feature_extractor")
UNET_XL = _unet("Stable Diffusion XL", "StableDiffusionXLPipeline")
FAMILIES = {  # by the class of their pipeline
    row.pipeline: row
    for row in (
        UNET,
        UNET_XL,
        Family(
            "FLUX.1", "transformer", "FluxTransformer2DModel", "FluxPipeline", "AutoencoderKL", 512,
            _flux_prompts, _flux_inputs, _moments, _shifted, _packed,
        ),
        Family(
            "FLUX.2 klein", "transformer", "Flux2Transformer2DModel", "Flux2KleinPipeline",
            "AutoencoderKLFlux2", 512,
            _flux2_prompts, _flux2_inputs, _moments, _flux2_latents, _sequence,
        ),
        Family(
            "Stable Diffusion 3", "transformer", "SD3Transformer2DModel", "StableDiffusion3Pipeline",
            "AutoencoderKL", 256,
            _sd3_prompts, _sd3_inputs, _moments, _shifted, _unchanged, weighting="logit_normal",
        ),
        Family(
            "Qwen-Image", "transformer", "QwenImageTransformer2DModel", "QwenImagePipeline",
            "AutoencoderKLQwenImage", 512,
            _qwen_prompts, _qwen_inputs, _qwen_moments, _qwen_latents, _packed,
        ),
        Family(
            "Sana", "transformer", "SanaTransformer2DModel", "SanaPipeline", "AutoencoderDC", 300,
            _sana_prompts, _sana_inputs,
            lambda vae, pixels: vae.encode(pixels).latent,
            lambda vae, latents: latents * vae.config.scaling_factor,
            _unchanged, patch=1,
        ),
    )
}  # fmt: skip
