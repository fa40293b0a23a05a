"""The diffusion recipes' training step as a `Workload`, which the planner traces."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from accelerate.utils import send_to_device
from torch import nn

from ckpt_ft.memory.gpus import current_gpu
from ckpt_ft.training.fit import Fitted, fit
from ckpt_ft.training.launched import launch_of
from ckpt_ft.training.replan import Attempt
from ckpt_ft.workloads.adapters import without_adapters
from ckpt_ft.workloads.diffusion_models import unet_batch
from ckpt_ft.workloads.optimizers import optimizer_maker
from ckpt_ft.workloads.workload import MIXED_PRECISION, Batch, Forward, Loss, MakeBatch, Workload

from .data import Data
from .objectives import (
    denoising_loss,
    flow_loss,
    preserving_denoising_loss,
    preserving_flow_loss,
)

if TYPE_CHECKING:
    from accelerate import Accelerator

    from .arguments import LoopArguments


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
        return denoising_loss(*asked) if prior is None else preserving_denoising_loss(*asked, prior.weight)

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

    compute_loss = flow_loss if prior is None else partial(preserving_flow_loss, weight=prior.weight)
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


def fit_loop(workload: Workload, accelerator: Accelerator, attempt: Attempt) -> Fitted:
    """Chooses the policy and the batch size that the flags leave open; sets the accumulation of `accelerator`."""
    fitted = fit(
        workload, attempt.args, attempt.settings, accelerator.device, lambda: launch_of(accelerator),
        "train_batch_size", attempt.budget,
    )  # fmt: skip
    attempt.note(fitted)
    accelerator.gradient_accumulation_steps = fitted.args.gradient_accumulation_steps
    return fitted
