"""What a diffusion recipe trains on: its data, the objectives, and the training step as a `Workload` for the planner.

U-Nets predict the noise or the velocity of a diffusion process. Transformers predict the direction e - x of the
straight path (1 - s) x + s e from an image's latents x to noise e (flow matching: Lipman et al., 2023,
https://arxiv.org/abs/2210.02747), at times s drawn as in section 3.1 of https://arxiv.org/abs/2403.03206.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3, compute_snr
from torch import Tensor, nn

from ckpt_ft.errors import UserError
from ckpt_ft.memory.gpus import current_gpu
from ckpt_ft.training.images import ImageArguments
from ckpt_ft.workloads.adapters import without_adapters
from ckpt_ft.workloads.optimizers import optimizer_maker
from ckpt_ft.workloads.sample_sizes import ImageSizes, Size
from ckpt_ft.workloads.workload import MIXED_PRECISION, Batch, Forward, Workload

from .arguments import DiffusionModelArguments, LoopArguments, TransformerArguments
from .data import Samples, load_samples
from .encoders import Encoders, checked_resolution, family_of
from .families import Family
from .sampling import Validation


class NoisyBatches:
    """Turns a loader's rows into micro-batches for `weighted_loss`.

    A micro-batch is {"inputs": the model's arguments, "target": what it is to predict, "weight": (B,)}.

    Args:
        encoders: kept only if the rows are not encoded yet (`cache_latents` off).
        add_noise: a function of moments and prompts that returns a micro-batch.

    Attributes:
        prompt: the empty prompt's encoding, which shows what encodings look like.
        size: height and width of the images of the last micro-batch.
        largest: those of the largest measured one.
        auxiliary_models: the models that encode in each step, and are therefore on the device.
    """

    def __init__(self, encoders: Encoders, add_noise: Any, image_args: ImageArguments) -> None:
        self.size = self.largest = (0, 0)
        self.add_noise, self._device = add_noise, encoders.device
        self._encoders = None if image_args.cache_latents else encoders
        self.auxiliary_models: tuple[nn.Module, ...] = () if self._encoders is None else tuple(encoders.modules)
        self.prompt, self._empty_share = encoders.encode_prompts([""]), image_args.proportion_empty_prompts

    def __call__(self, rows: dict[str, Tensor]) -> Batch:
        """Draws noise, times and dropped captions from torch's global random state."""
        height, width = rows["time_ids"][0, -2:].tolist()  # SDXL's target size
        self.size = height, width
        if self._encoders is None:
            encoded = {name: value.to(self._device) for name, value in rows.items()}
        else:
            encoded = self._encoders.encode(rows)
        drop_prompts(encoded, self.prompt, self._empty_share)
        return self.add_noise(encoded)

    def encode_blank(self, images: int, size: Size) -> None:
        """Runs the encoders of a step on black images, for a trace; does nothing if everything is cached."""
        if self._encoders is not None:
            time_ids = torch.zeros(images, 6, dtype=torch.long)
            pixels = torch.zeros(images, 3, *size)
            self._encoders.encode({"pixels": pixels, "time_ids": time_ids, "caption": [""] * images})


def drop_prompts(encoded: dict[str, Tensor], empty: dict[str, Tensor], share: float) -> None:
    """Replaces, in place, the captions of a random `share` of the batch by the empty prompt's encoding."""
    if share:
        one = encoded[next(iter(empty))]
        dropped = torch.rand(len(one)).to(one.device) < share
        for name, value in empty.items():
            encoded[name] = torch.where(dropped.view(-1, *[1] * (value.dim() - 1)), value, encoded[name])


@dataclass
class _Objective:
    """Turns encoded rows into micro-batches.

    Attributes:
        config: of what is trained.
        vae: its configuration scales the latents.
        scheduler: has the times.
    """

    family: Family
    config: Any
    vae: Any
    scheduler: Any
    args: Any


class Denoising(_Objective):
    """Adds noise to the latents of `moments`, for a U-Net.

    Min-SNR weighs the loss in terms of the clean image by min(SNR, gamma), divided by the SNR where noise is
    predicted, and by SNR + 1 where velocity is (Hang et al., 2023, https://arxiv.org/abs/2303.09556). Without
    `snr_gamma` all weights are 1.
    """

    def __call__(self, encoded: dict[str, Tensor]) -> Batch:
        """Draws latents, noise and times from torch's global random state.

        `--noise_offset` adds noise that is constant over each channel of an image
        (https://www.crosslabs.org/blog/diffusion-with-offset-noise), so that a model learns dark and bright images.
        """
        latents = self.family.latents(self.vae, encoded.pop("moments"))
        noise, offset = torch.randn_like(latents), self.args.noise_offset
        if offset:
            noise = noise + offset * torch.randn(*latents.shape[:2], 1, 1, device=latents.device)
        times = torch.randint(0, self.scheduler.config.num_train_timesteps, (len(latents),), device=latents.device)
        return self.batch(latents, noise, times, encoded)

    def batch(self, latents: Tensor, noise: Tensor, times: Tensor, prompts: dict[str, Tensor]) -> Batch:
        """Returns the micro-batch of `latents` (B, C, h, w) at the timesteps `times` (B,)."""
        times, velocity = times.long(), self.scheduler.config.prediction_type == "v_prediction"
        noisy = self.scheduler.add_noise(latents, noise, times)
        weight = torch.ones(len(latents), device=latents.device)
        if self.args.snr_gamma is not None:
            snr = compute_snr(self.scheduler, times)
            weight = snr.clamp(max=self.args.snr_gamma) / (snr + 1 if velocity else snr)
        return {
            "inputs": self.family.inputs(self.config, noisy, times, prompts, 1.0),
            "target": self.scheduler.get_velocity(latents, noise, times) if velocity else noise,
            "weight": weight,
        }


class FlowMatching(_Objective):
    """Mixes latents and noise, for a transformer; the target is the path's direction."""

    @property
    def scheme(self) -> str:
        """How times are drawn and weighted."""
        return self.args.weighting_scheme or self.family.weighting

    def __call__(self, encoded: dict[str, Tensor]) -> Batch:
        """Draws latents, noise and times from torch's global random state."""
        latents = self.family.latents(self.vae, encoded.pop("moments"))
        noise = torch.randn_like(latents)
        drawn = compute_density_for_timestep_sampling(
            self.scheme, len(latents), self.args.logit_mean, self.args.logit_std, self.args.mode_scale
        )
        steps = self.scheduler.config.num_train_timesteps
        places = (drawn * steps).long().clamp(max=steps - 1)  # a half-precision 0.9999 may round to 1
        return self.batch(latents, noise, self.scheduler.sigmas[places].to(latents.device), encoded)

    def batch(self, latents: Tensor, noise: Tensor, sigmas: Tensor, prompts: dict[str, Tensor]) -> Batch:
        """Returns the micro-batch of `latents` (B, C, h, w) at `sigmas` (B,): 0 is the image and 1 is noise."""
        s = sigmas.view(-1, 1, 1, 1)
        noisy = (1 - s) * latents + s * noise
        return {
            "inputs": self.family.inputs(self.config, noisy, sigmas, prompts, self.args.guidance_scale),
            "target": self.family.pack(noise - latents),
            "weight": compute_loss_weighting_for_sd3(self.scheme, sigmas),
        }


def weighted_loss(model: Forward, batch: Batch) -> Tensor:
    """Weighted mean squared error in float32."""
    prediction = model(**batch["inputs"], return_dict=False)[0]
    error = (prediction.float() - batch["target"].float()).square().flatten(1).mean(1)
    return (batch["weight"] * error).mean()


class Data(NamedTuple):
    """What a recipe learns from.

    Attributes:
        samples: the rows.
        noisy: turns rows into micro-batches.
        validation: the prompts that show what is learned, and the pipeline that draws them.
        family: the pipeline's.
        sizes: the sizes of the images.
        channels, scale: of latents, and pixels per latent along a side.
        dtype: of weights that are not trained.
    """

    samples: Samples
    noisy: NoisyBatches
    validation: Validation
    family: Family
    sizes: ImageSizes
    channels: int
    scale: int
    dtype: torch.dtype


def diffusion_workload(model: nn.Module, args: LoopArguments, accelerator: Accelerator, data: Data) -> Workload:
    """Returns the step of a U-Net or transformer on images of the sizes of `data`."""
    noisy = data.noisy
    shapes = {name: (value.shape[1:], value.dtype) for name, value in noisy.prompt.items()}

    def make_batch(samples: int, length: int | None) -> Batch:
        height, width = size = data.sizes.of(length)
        noisy.encode_blank(samples, size)
        device = accelerator.device
        prompts = {
            name: torch.ones(samples, *shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes.items()
        }
        zeros = torch.zeros(samples, data.channels, height // data.scale, width // data.scale, device=device)
        prompts["time_ids"] = torch.zeros(samples, 6, dtype=torch.long, device=device)
        return noisy.add_noise.batch(zeros, zeros, torch.ones(samples, device=device), prompts)

    return Workload(
        model,
        make_batch,
        weighted_loss,
        make_optimizer=optimizer_maker(args.traced_optimizer, model=model),
        device=current_gpu() or "cpu",
        autocast=MIXED_PRECISION.get(accelerator.mixed_precision),
        accumulation=args.gradient_accumulation_steps,
        prefetched=False,
        max_grad_norm=args.max_grad_norm,
        lengths=data.sizes.lengths,
        auxiliary_models=noisy.auxiliary_models,
        name=type(without_adapters(model)).__name__,
    )


def load_data(
    model_args: DiffusionModelArguments | TransformerArguments,
    image_args: ImageArguments,
    args: LoopArguments,
    accelerator: Accelerator,
) -> Data:
    """Returns the data of a U-Net or transformer; of the frozen parts it holds those that the loop still needs."""
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise UserError("--mixed_precision fp16 needs a GPU; on a CPU give bf16 or no")
    family, config = family_of(model_args)
    dtype = MIXED_PRECISION.get(accelerator.mixed_precision) or torch.float32
    encoders = Encoders(model_args, family, accelerator.device, dtype)
    resolution = checked_resolution(image_args.resolution, config, encoders)
    channels, side, _ = encoders.latent_shape(resolution)  # before the VAE leaves the device
    kind = FlowMatching if isinstance(model_args, TransformerArguments) else Denoising
    objective = kind(family, config, encoders.vae, encoders.scheduler, model_args)
    samples = load_samples(encoders, resolution, image_args, args, accelerator)
    return Data(
        samples,
        NoisyBatches(encoders, objective, image_args),
        Validation(family, model_args, encoders, resolution, args),
        family,
        ImageSizes(tuple(samples.sizes), tuple(map(len, samples.buckets))),
        channels,
        resolution // side,
        dtype,
    )
