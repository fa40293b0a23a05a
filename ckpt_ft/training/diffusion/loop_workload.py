"""The diffusion recipes' step as a workload, and what `auto` and `--find_max_batch_size` leave open for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import send_to_device
from torch import nn

from ckpt_ft.memory.gpus import current_gpu
from ckpt_ft.training.fit import Fitted, fit
from ckpt_ft.training.launched import launch_of
from ckpt_ft.training.replan import Attempt
from ckpt_ft.workloads.adapters import without_adapters
from ckpt_ft.workloads.diffusion import noise_batch
from ckpt_ft.workloads.dtypes import MIXED_PRECISION
from ckpt_ft.workloads.optimizers import optimizer_maker
from ckpt_ft.workloads.workload import Batch, Forward, Loss, MakeBatch, Workload

from .flow import flow_loss
from .latent_shapes import LatentShapes
from .noise import NoisyBatches, denoising_loss

if TYPE_CHECKING:
    from accelerate import Accelerator

    from .arguments import LoopArguments


def unet_workload(
    unet: nn.Module,
    args: LoopArguments,
    accelerator: Accelerator,
    scheduler: Any,
    snr_gamma: float | None,
    latents: LatentShapes,
    dtype: torch.dtype,
) -> Workload:
    """The loop's step on `latents` and prompts of `dtype`.

    A micro-batch is {"inputs": the U-Net's, "target": what it is to predict}.
    """

    def make_batch(samples: int, length: int | None) -> Batch:
        inputs = send_to_device(
            noise_batch(without_adapters(unet), samples, latents.shape(length)[1:], dtype), accelerator.device
        )
        return {"inputs": inputs, "target": torch.zeros_like(inputs["sample"])}

    def compute_loss(model: Forward, batch: Batch) -> torch.Tensor:
        inputs = batch["inputs"]
        prediction = model(**inputs).sample
        return denoising_loss(prediction, batch["target"], scheduler, inputs["timestep"], snr_gamma)

    return _workload(unet, make_batch, compute_loss, args, accelerator, latents)


def flow_workload(
    transformer: nn.Module,
    args: LoopArguments,
    accelerator: Accelerator,
    noisy: NoisyBatches,
    latents: LatentShapes,
) -> Workload:
    """The loop's step on `latents` and prompts like those of `noisy`.

    A micro-batch is {"inputs": the transformer's, "target": what it is to predict, "weight": of each sample}.
    """
    shapes = {name: (value.shape[1:], value.dtype) for name, value in noisy.prompt.items()}

    def make_batch(samples: int, length: int | None) -> Batch:
        prompts = {
            name: torch.ones(samples, *shape, dtype=dtype, device=accelerator.device)
            for name, (shape, dtype) in shapes.items()
        }
        zeros = torch.zeros(samples, *latents.shape(length), device=accelerator.device)
        return noisy.add_noise.batch(zeros, zeros, torch.ones(samples, device=accelerator.device), prompts)

    return _workload(transformer, make_batch, flow_loss, args, accelerator, latents)


def _workload(
    model: nn.Module,
    make_batch: MakeBatch,
    compute_loss: Loss,
    args: LoopArguments,
    accelerator: Accelerator,
    latents: LatentShapes,
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
        lengths=latents.lengths,
        name=type(without_adapters(model)).__name__,
    )


def fit_loop(workload: Workload, accelerator: Accelerator, attempt: Attempt) -> Fitted:
    """`fit_to_memory` for the diffusion recipes' loop; `accelerator` is told the accumulation."""
    fitted = fit(
        workload, attempt.args, attempt.settings, accelerator.device, lambda: launch_of(accelerator),
        "train_batch_size", attempt.budget,
    )  # fmt: skip
    attempt.note(fitted)
    accelerator.gradient_accumulation_steps = fitted.args.gradient_accumulation_steps
    return fitted
