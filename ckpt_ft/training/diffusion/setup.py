"""Prepares what a diffusion recipe trains on: loads the frozen parts, draws missing class images, encodes the rows."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_ft.training.images.captioned import ImageArguments
from ckpt_ft.workloads.pipeline_parts import inpaints

from .arguments import DiffusionModelArguments, LoopArguments, TransformerArguments
from .data import Data, FramedImages, LatentShapes, MaskedImages, blank_picture, load_samples, masked_pictures
from .denoiser import UNET, UNET_XL
from .encoders import (
    TransformerEncoders,
    UNetEncoders,
    checked_resolution,
    family_of,
    frozen_dtype,
    load_denoiser,
    load_scheduler,
    load_times,
    load_transformer,
    own_side,
    transformer_config,
    unet_config,
)
from .objectives import Denoising, FlowMatching, NoisyBatches
from .sampling import Sampler, Validation, draw_class_images, draw_latents

if TYPE_CHECKING:
    from accelerate import Accelerator


def load_unet_data(
    model_args: DiffusionModelArguments, image_args: ImageArguments, args: LoopArguments, accelerator: Accelerator
) -> Data:
    """Returns the data of a U-Net; of the frozen parts it holds only those that the loop still needs."""
    config = unet_config(model_args)
    sdxl = config["addition_embed_type"] == "text_time"
    dtype, rows = frozen_dtype(accelerator), FramedImages
    if inpaints(config):
        rows, image_args = MaskedImages, image_args.uncached("the masks of inpainting are drawn anew each time")
    encoders = UNetEncoders(model_args, sdxl, accelerator.device, dtype, rows)
    resolution = image_args.resolution or own_side(config) * encoders.vae_scale_factor
    noise = Denoising(load_scheduler(model_args), encoders.vae.config.scaling_factor, model_args.noise_offset)
    channels, scale = encoders.vae.config.latent_channels, encoders.vae_scale_factor
    sampler = Sampler(UNET_XL if sdxl else UNET, model_args, encoders, resolution, draw_latents)
    load = partial(load_denoiser, model_args, dtype)
    whole = blank_picture(resolution) if inpaints(config) else {}
    draw_class_images(image_args.prior, sampler, encoders, load, accelerator, args.seed, **whole)
    samples = load_samples(encoders, resolution, image_args, args, accelerator)
    pictures = masked_pictures(samples, args) if inpaints(config) else {}
    return Data(
        samples,
        NoisyBatches(encoders, noise, image_args),
        Validation(sampler, args, encoders, Path(args.output_dir, "samples"), **pictures),
        LatentShapes.of(samples, channels, scale),
        dtype,
        image_args.dataloader_num_workers,
        image_args.prior,
    )


def load_transformer_data(
    model_args: TransformerArguments, image_args: ImageArguments, args: LoopArguments, accelerator: Accelerator
) -> Data:
    """Returns the data of a transformer; of the frozen parts it holds only those that the loop still needs."""
    family = family_of(model_args)
    config = transformer_config(model_args, family)
    dtype = frozen_dtype(accelerator)
    encoders = TransformerEncoders(model_args, family, accelerator.device, dtype)
    resolution = checked_resolution(image_args.resolution, config, encoders)
    channels, side, _ = encoders.latent_shape(resolution)  # before the VAE leaves the device
    flow = FlowMatching(family, config, encoders.vae, load_times(model_args), model_args)
    sampler = Sampler(family.part, model_args, encoders, resolution, family.draw)
    load = partial(load_transformer, model_args, family.part, dtype)
    draw_class_images(image_args.prior, sampler, encoders, load, accelerator, args.seed)
    samples = load_samples(encoders, resolution, image_args, args, accelerator)
    return Data(
        samples,
        NoisyBatches(encoders, flow, image_args),
        Validation(sampler, args, encoders, Path(args.output_dir, "samples")),
        LatentShapes.of(samples, channels, resolution // side),
        dtype,
        image_args.dataloader_num_workers,
        image_args.prior,
    )
