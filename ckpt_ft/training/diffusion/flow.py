"""Flow matching: what a transformer is shown and how it is judged, at times drawn as diffusers' scripts draw them.

Between an image's latents x and noise e lies the straight path (1 - s) x + s e; the transformer predicts its direction
e - x (Lipman et al., 2023, https://arxiv.org/abs/2210.02747). Which s are drawn and what they weigh is section 3.1 of
https://arxiv.org/abs/2403.03206.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3
from torch import Tensor

from ckpt_ft.workloads.workload import Batch, Forward

from .arguments import TransformerArguments
from .families import Family

if TYPE_CHECKING:
    from diffusers import FlowMatchEulerDiscreteScheduler


class FlowMatching:
    """Makes micro-batches {"inputs": the transformer's, "target": the path's direction, "weight": (B,)} of latents.

    Args:
        config: the transformer's.
        vae: knows how latents are scaled.
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
        """Of `moments` and prompts; draws latents, noise and times from torch's global RNG."""
        latents = self.family.latents(self.vae, encoded.pop("moments"))
        noise = torch.randn_like(latents)
        drawn = compute_density_for_timestep_sampling(
            self.scheme, len(latents), self.args.logit_mean, self.args.logit_std, self.args.mode_scale
        )
        places = (drawn * self._steps).long().clamp(max=self._steps - 1)  # a half-precision 0.9999 may round to 1
        return self.batch(latents, noise, self._sigmas[places].to(latents.device), encoded)

    def batch(self, latents: Tensor, noise: Tensor, sigmas: Tensor, prompts: dict[str, Tensor]) -> Batch:
        """What the transformer is shown of `latents` (B, C, h, w) at `sigmas` (B,), 0 for an image and 1 for noise."""
        s = sigmas.view(-1, 1, 1, 1)
        noisy = (1 - s) * latents + s * noise
        return {
            "inputs": self.family.inputs(self.config, noisy, sigmas, prompts, self.args.guidance_scale),
            "target": self.family.pack(noise - latents),
            "weight": compute_loss_weighting_for_sd3(self.scheme, sigmas),
        }


def flow_loss(model: Forward, batch: Batch) -> Tensor:
    """Mean squared error in float32, each sample with its weight."""
    return flow_errors(model, batch).mean()


def flow_errors(model: Forward, batch: Batch) -> Tensor:
    """The weighted squared error (B,) of each sample."""
    prediction = model(**batch["inputs"], return_dict=False)[0]
    error = (prediction.float() - batch["target"].float()).square().flatten(1).mean(1)
    weighted: Tensor = batch["weight"] * error
    return weighted
