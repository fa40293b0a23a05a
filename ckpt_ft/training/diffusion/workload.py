"""What a diffusion recipe trains on, and its training step as a `Workload`, which the planner traces."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate.utils import send_to_device
from torch import nn

from ckpt_ft.memory.gpus import current_gpu
from ckpt_ft.training.images.captioned import ImageArguments
from ckpt_ft.workloads.adapters import without_adapters
from ckpt_ft.workloads.diffusion_models import unet_batch
from ckpt_ft.workloads.optimizers import optimizer_maker
from ckpt_ft.workloads.pipeline_parts import inpaints
from ckpt_ft.workloads.workload import MIXED_PRECISION, Batch, Forward, Loss, MakeBatch, Workload

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
from .objectives import (
    Denoising,
    FlowMatching,
    NoisyBatches,
    denoising_loss,
    flow_loss,
    preserving_denoising_loss,
    preserving_flow_loss,
)
from .sampling import Sampler, Validation, draw_class_images, draw_latents

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ckpt_ft.training.diffusion.arguments import LoopArguments


def unet_workload(
    unet: nn.Module,
    args: LoopArguments,
    accelerator: Accelerator,
    data: Data,
    snr_gamma: float | None,
) -> Workload:
    """Returns the step of a U-Net on the shapes of `data`.

    A micro-batch is {"inputs": the U-Net's arguments, "target": what it is to predict}. With prior preservation it has
    two rows per sample.
    """
    noisy, latents, dtype, prior = data.noisy, data.latents, data.dtype, data.prior
    scheduler = noisy.add_noise.scheduler
    tokens = next(iter(noisy.prompt.values())).shape[1]

    def make_batch(samples: int, length: int | None) -> Batch:
        rows, shape = samples if prior is None else 2 * samples, latents.shape(length)
        noisy.encode_blank(rows, latents.size(length))
        inputs = send_to_device(unet_batch(unet, rows, shape[1:], dtype, tokens), accelerator.device)
        return {"inputs": inputs, "target": torch.zeros_like(inputs["sample"][:, : shape[0]])}

    def compute_loss(model: Forward, batch: Batch) -> torch.Tensor:
        inputs = batch["inputs"]
        asked = model(**inputs).sample, batch["target"], scheduler, inputs["timestep"], snr_gamma
        return denoising_loss(*asked) if prior is None else preserving_denoising_loss(*asked, prior.prior_loss_weight)

    return _workload(unet, make_batch, compute_loss, args, accelerator, data)


def flow_workload(
    transformer: nn.Module,
    args: LoopArguments,
    accelerator: Accelerator,
    data: Data,
) -> Workload:
    """Returns the step of a transformer on the shapes of `data`.

    A micro-batch is {"inputs": the transformer's arguments, "target": what it is to predict, "weight": (B,)}. With
    prior preservation it has two rows per sample.
    """
    noisy, latents, prior = data.noisy, data.latents, data.prior
    shapes = {name: (value.shape[1:], value.dtype) for name, value in noisy.prompt.items()}

    def make_batch(samples: int, length: int | None) -> Batch:
        rows = samples if prior is None else 2 * samples
        noisy.encode_blank(rows, latents.size(length))
        prompts = {
            name: torch.ones(rows, *shape, dtype=dtype, device=accelerator.device)
            for name, (shape, dtype) in shapes.items()
        }
        zeros = torch.zeros(rows, *latents.shape(length), device=accelerator.device)
        return noisy.add_noise.batch(zeros, zeros, torch.ones(rows, device=accelerator.device), prompts)

    compute_loss = flow_loss if prior is None else partial(preserving_flow_loss, weight=prior.prior_loss_weight)
    return _workload(transformer, make_batch, compute_loss, args, accelerator, data)


def _workload(
    model: nn.Module,
    make_batch: MakeBatch,
    compute_loss: Loss,
    args: LoopArguments,
    accelerator: Accelerator,
    data: Data,
) -> Workload:
    return Workload(
        model,
        make_batch,
        compute_loss,
        make_optimizer=optimizer_maker(args.traced_optimizer, model=model),
        device=current_gpu() or "cpu",
        autocast=MIXED_PRECISION.get(accelerator.mixed_precision),
        accumulation=args.gradient_accumulation_steps,
        prefetched=False,
        max_grad_norm=args.max_grad_norm,
        lengths=data.latents.lengths,
        auxiliary_models=data.noisy.auxiliary_models,
        name=type(without_adapters(model)).__name__,
    )


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
