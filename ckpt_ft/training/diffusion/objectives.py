"""The training objectives: how noise is added to latents, what the model predicts, and the loss.

U-Nets predict the noise or the velocity of a diffusion process. Transformers predict the direction e - x of the
straight path (1 - s) x + s e from an image's latents x to noise e (flow matching: Lipman et al., 2023,
https://arxiv.org/abs/2210.02747), at times s drawn as in section 3.1 of https://arxiv.org/abs/2403.03206.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.training_utils import (
    compute_density_for_timestep_sampling,
    compute_loss_weighting_for_sd3,
    compute_snr,
)
from torch import Tensor, nn
from torch.nn import functional

from ckpt_ft.memory.measure.profiler import LargestBatch
from ckpt_ft.training.images.captioned import ImageArguments
from ckpt_ft.workloads.pipeline_parts import conditions
from ckpt_ft.workloads.sample_sizes import Size
from ckpt_ft.workloads.workload import Batch, Forward

from .arguments import TransformerArguments
from .families import Family

if TYPE_CHECKING:
    from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler

    from .encoders import FrozenEncoders


class NoisyBatches:
    """Turns a loader's rows into micro-batches {"inputs": the model's arguments, "target": what it is to predict}.

    Args:
        encoders: kept only if the rows are not encoded yet (`cache_latents` off).
        add_noise: a function of moments and prompts that returns a micro-batch.

    Attributes:
        prompt: the empty prompt's encoding, which shows what encodings look like.
        last: the micro-batch that was made last.
        largest: the largest measured micro-batch, for images in buckets.
        auxiliary_models: the models that encode in each step, and are therefore on the device.
    """

    def __init__(self, encoders: FrozenEncoders, add_noise: Any, image_args: ImageArguments) -> None:
        self.last: Batch = {}
        self.largest = LargestBatch()
        self.add_noise, self._device = add_noise, encoders.device
        self._encoders = None if image_args.cache_latents else encoders
        self.auxiliary_models: tuple[nn.Module, ...] = () if self._encoders is None else tuple(encoders.modules)
        self.prompt, self._empty_share = encoders.encode_prompts([""]), image_args.proportion_empty_prompts
        self._encoded = 0, (0, 0)  # number and size of the images that `last` was encoded from

    def __call__(self, rows: dict[str, Tensor]) -> Batch:
        """Draws noise, times and dropped captions from torch's global random state."""
        self.last = {}  # frees its memory while the next one is made
        if self._encoders is None:
            encoded = {name: value.to(self._device) for name, value in rows.items()}
        else:
            height, width = rows["pixels"].shape[2:]
            self._encoded = len(rows["pixels"]), (height, width)
            encoded = self._encoders.encode(rows)
        drop_prompts(encoded, self.prompt, self._empty_share)
        self.last = self.add_noise(encoded)
        return self.last

    def encode_blank(self, images: int, size: Size) -> None:
        """Runs the encoders of a step on black images, for a trace; does nothing if everything is cached."""
        if self._encoders is not None:
            self._encoders.encode(self._encoders.blank(images, size))

    def note(self, batch: Batch) -> None:
        """Records that `batch`, the last one, belongs to a measured step."""
        self.largest.note(self._encoded, batch)

    def seen(self) -> Batch:
        """Returns the micro-batch of the measured peak, after running the encoders that made it."""
        if self.last and not self.largest.elements:
            self.note(self.last)
        self.last = {}
        images, size = self.largest.args
        self.encode_blank(images, size)
        return self.largest.again()[1]


def drop_prompts(encoded: dict[str, Tensor], empty: dict[str, Tensor], share: float) -> None:
    """Replaces, in place, the captions of a random `share` of the batch by the empty prompt's encoding."""
    if share:
        one = encoded[next(iter(empty))]
        dropped = torch.rand(len(one)).to(one.device) < share
        for name, value in empty.items():
            encoded[name] = torch.where(dropped.view(-1, *[1] * (value.dim() - 1)), value, encoded[name])


class Denoising:
    """Adds noise to the latents of `moments`, for a U-Net; for inpainting also the mask and the masked latents."""

    def __init__(self, scheduler: DDPMScheduler, scaling: float, noise_offset: float) -> None:
        self.scheduler, self.scaling, self.noise_offset = scheduler, scaling, noise_offset

    def __call__(self, encoded: dict[str, Tensor]) -> Batch:
        latents = DiagonalGaussianDistribution(encoded["moments"]).sample() * self.scaling
        inputs, target = noisy_inputs(latents, encoded, self.scheduler, self.noise_offset)
        if "mask" in encoded:
            visible = DiagonalGaussianDistribution(encoded["masked_moments"]).sample() * self.scaling
            inputs["sample"] = torch.cat([inputs["sample"], encoded["mask"], visible], dim=1)
        return {"inputs": inputs, "target": target}


def noisy_inputs(
    latents: Tensor, encoded: dict[str, Tensor], scheduler: DDPMScheduler, noise_offset: float = 0.0
) -> tuple[dict[str, Any], Tensor]:
    """Returns the U-Net's arguments for `latents` (B, C, h, w) at random times, and what it should predict.

    Draws from torch's global random state. `noise_offset` adds noise that is constant over each channel of an image
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
    """Mean squared error in float32, weighted by Min-SNR (Hang et al., 2023, https://arxiv.org/abs/2303.09556).

    The weight is min(SNR, gamma) in terms of the clean image; it is divided by the SNR where noise is predicted, and
    by SNR + 1 where velocity is. Without `snr_gamma` all weights are 1.
    """
    if snr_gamma is None:
        return functional.mse_loss(prediction.float(), target.float())
    snr = compute_snr(scheduler, times)
    divisor = snr + 1 if scheduler.config.prediction_type == "v_prediction" else snr
    weight = snr.clamp(max=snr_gamma) / divisor
    loss = functional.mse_loss(prediction.float(), target.float(), reduction="none")
    return (loss.mean(dim=(1, 2, 3)) * weight).mean()


def preserving_denoising_loss(
    prediction: Tensor, target: Tensor, scheduler: DDPMScheduler, times: Tensor, snr_gamma: float | None, weight: float
) -> Tensor:
    """`denoising_loss` of the subject's half, plus `weight` times that of the class's half, without Min-SNR."""
    (ours, prior), (wanted, kept) = prediction.chunk(2), target.chunk(2)
    loss = denoising_loss(ours, wanted, scheduler, times.chunk(2)[0], snr_gamma)
    return loss + weight * denoising_loss(prior, kept, scheduler, times)


class FlowMatching:
    """Mixes latents and noise, for a transformer: {"inputs", "target": the path's direction, "weight": (B,)}.

    Args:
        config: the transformer's.
        vae: its configuration scales the latents.
        scheduler: has the times.
    """

    def __init__(
        self,
        family: Family,
        config: Any,
        vae: Any,
        scheduler: FlowMatchEulerDiscreteScheduler,
        args: TransformerArguments,
    ) -> None:
        self.family, self.config, self.vae, self.args = family, config, vae, args
        self.scheme = args.weighting_scheme or family.weighting
        self._sigmas, self._steps = scheduler.sigmas, scheduler.config.num_train_timesteps

    def __call__(self, encoded: dict[str, Tensor]) -> Batch:
        """Draws latents, noise and times from torch's global random state."""
        latents = self.family.latents(self.vae, encoded.pop("moments"))
        noise = torch.randn_like(latents)
        drawn = compute_density_for_timestep_sampling(
            self.scheme, len(latents), self.args.logit_mean, self.args.logit_std, self.args.mode_scale
        )
        places = (drawn * self._steps).long().clamp(max=self._steps - 1)  # a half-precision 0.9999 may round to 1
        return self.batch(latents, noise, self._sigmas[places].to(latents.device), encoded)

    def batch(self, latents: Tensor, noise: Tensor, sigmas: Tensor, prompts: dict[str, Tensor]) -> Batch:
        """Returns the micro-batch of `latents` (B, C, h, w) at `sigmas` (B,): 0 is the image and 1 is noise."""
        s = sigmas.view(-1, 1, 1, 1)
        noisy = (1 - s) * latents + s * noise
        return {
            "inputs": self.family.inputs(self.config, noisy, sigmas, prompts, self.args.guidance_scale),
            "target": self.family.pack(noise - latents),
            "weight": compute_loss_weighting_for_sd3(self.scheme, sigmas),
        }


def flow_loss(model: Forward, batch: Batch) -> Tensor:
    """Weighted mean squared error in float32."""
    return flow_errors(model, batch).mean()


def preserving_flow_loss(model: Forward, batch: Batch, weight: float) -> Tensor:
    """`flow_loss` of the subject's half, plus `weight` times that of the class's half."""
    ours, prior = flow_errors(model, batch).chunk(2)
    return ours.mean() + weight * prior.mean()


def flow_errors(model: Forward, batch: Batch) -> Tensor:
    """Returns the weighted squared error of each sample, (B,)."""
    prediction = model(**batch["inputs"], return_dict=False)[0]
    error = (prediction.float() - batch["target"].float()).square().flatten(1).mean(1)
    weighted: Tensor = batch["weight"] * error
    return weighted
