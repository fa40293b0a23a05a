"""What the U-Net is shown and how it is judged: latents with noise, captions left out, the denoising loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from torch import Tensor, nn
from torch.nn import functional

from ckpt_ft.memory.measure.largest_batch import LargestBatch
from ckpt_ft.training.images.captioned import ImageArguments
from ckpt_ft.workloads.pipeline_parts import conditions
from ckpt_ft.workloads.sample_sizes import Size
from ckpt_ft.workloads.workload import Batch

if TYPE_CHECKING:
    from diffusers import DDPMScheduler

    from .frozen import Frozen


class NoisyBatches:
    """Makes micro-batches of what a loader yields: {"inputs": the model's, "target": what it is to predict}.

    Args:
        encoders: kept only where the loader's rows are not encoded yet (`cache_latents` off).
        add_noise: moments and prompts -> a micro-batch.

    Attributes:
        add_noise: likewise.
        last: what was made last.
        largest: of images in buckets, the largest that was measured.
        beside: models that encode in each step, and so are on the device.
    """

    def __init__(self, encoders: Frozen, add_noise: Any, image_args: ImageArguments) -> None:
        self.last: Batch = {}
        self.largest = LargestBatch()
        self.add_noise, self._device = add_noise, encoders.device
        self._encoders = None if image_args.cache_latents else encoders
        self.beside: tuple[nn.Module, ...] = () if self._encoders is None else tuple(encoders.modules)
        self._empty_prompt, self._share_of_it = encoders.encode_prompts([""]), image_args.proportion_empty_prompts
        self._shown = 0, (0, 0)  # images of `last` as the encoders were shown them, and their height and width

    @property
    def prompt(self) -> dict[str, Tensor]:
        """What prompts are like: the empty one's encoding."""
        return self._empty_prompt

    def encode_blank(self, images: int, size: Size) -> None:
        """What a step encodes of so many images of `size`, for a trace; nothing where all is cached."""
        if self._encoders is not None:
            self._encoders.encode(self._encoders.blank(images, size))

    def note(self, batch: Batch) -> None:
        """`batch`, made last, is of a measured step."""
        self.largest.note(self._shown, batch)

    def seen(self) -> Batch:
        """The micro-batch that the measured peak is of, and in a trace what it took to make it."""
        if self.last and not self.largest.elements:
            self.note(self.last)
        self.last = {}
        images, size = self.largest.args
        self.encode_blank(images, size)
        return self.largest.again()[1]

    def __call__(self, rows: dict[str, Tensor]) -> Batch:
        """Draws from torch's global RNG: noise, times, and the captions that are left out."""
        self.last = {}  # its memory is free while the next is made
        if self._encoders is None:
            encoded = {name: value.to(self._device) for name, value in rows.items()}
        else:
            height, width = rows["pixels"].shape[2:]
            self._shown = len(rows["pixels"]), (height, width)
            encoded = self._encoders.encode(rows)
        drop_prompts(encoded, self._empty_prompt, self._share_of_it)
        self.last = self.add_noise(encoded)
        return self.last


class Denoising:
    """Adds a U-Net's noise to `moments`: {"inputs": the U-Net's, "target": what it is to predict}."""

    def __init__(self, scheduler: DDPMScheduler, scaling: float, noise_offset: float) -> None:
        self.scheduler, self.scaling, self.noise_offset = scheduler, scaling, noise_offset

    def __call__(self, encoded: dict[str, Tensor]) -> Batch:
        latents = DiagonalGaussianDistribution(encoded["moments"]).sample() * self.scaling
        inputs, target = noisy_inputs(latents, encoded, self.scheduler, self.noise_offset)
        if "mask" in encoded:
            seen = DiagonalGaussianDistribution(encoded["masked_moments"]).sample() * self.scaling
            inputs["sample"] = torch.cat([inputs["sample"], encoded["mask"], seen], dim=1)
        return {"inputs": inputs, "target": target}


def noisy_inputs(
    latents: Tensor, encoded: dict[str, Tensor], scheduler: DDPMScheduler, noise_offset: float = 0.0
) -> tuple[dict[str, Any], Tensor]:
    """The U-Net's keyword arguments for `latents` (B, C, h, w) at random times, and what it should predict.

    Draws from torch's global RNG. `noise_offset` adds noise that is constant over each channel of an image
    (https://www.crosslabs.org/blog/diffusion-with-offset-noise), so that a model learns very dark and bright images.
    """
    noise = torch.randn_like(latents)
    if noise_offset:
        noise = noise + noise_offset * torch.randn(*latents.shape[:2], 1, 1, device=latents.device)
    steps = scheduler.config.num_train_timesteps
    times = torch.randint(0, steps, (len(latents),), device=latents.device)
    inputs = {"sample": scheduler.add_noise(latents, noise, times), "timestep": times, **conditions(encoded)}
    if scheduler.config.prediction_type == "v_prediction":
        return inputs, scheduler.get_velocity(latents, noise, times)
    return inputs, noise


def denoising_loss(
    prediction: Tensor, target: Tensor, scheduler: DDPMScheduler, times: Tensor, snr_gamma: float | None = None
) -> Tensor:
    """Mean squared error, with `snr_gamma` weighted by Min-SNR (Hang et al., 2023, https://arxiv.org/abs/2303.09556).

    Always in float32. The weight is min(SNR, gamma) in terms of the clean image; predicting noise multiplies that by
    1 / SNR and predicting velocity by 1 / (SNR + 1).
    """
    if snr_gamma is None:
        return functional.mse_loss(prediction.float(), target.float())
    from diffusers.training_utils import compute_snr

    snr = compute_snr(scheduler, times)
    divisor = snr + 1 if scheduler.config.prediction_type == "v_prediction" else snr
    weight = snr.clamp(max=snr_gamma) / divisor
    loss = functional.mse_loss(prediction.float(), target.float(), reduction="none")
    return (loss.mean(dim=(1, 2, 3)) * weight).mean()


def drop_prompts(encoded: dict[str, Tensor], empty: dict[str, Tensor], share: float) -> None:
    """Replace, in place, the captions of a random `share` of the batch by the empty one's encoding."""
    if share:
        one = encoded[next(iter(empty))]
        dropped = torch.rand(len(one)).to(one.device) < share
        for name, value in empty.items():
            encoded[name] = torch.where(dropped.view(-1, *[1] * (value.dim() - 1)), value, encoded[name])
