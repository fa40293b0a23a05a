"""Draws images with the model in training, for validation.

The pipeline that training began with is put together around the model. Prompts are encoded in advance, so no text
encoder is loaded again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from diffusers import DiffusionPipeline
from diffusers.utils import make_image_grid
from PIL import Image
from torch import nn

from ckpt_ft.files import write
from ckpt_ft.workloads.adapters import without_adapters
from ckpt_ft.workloads.diffusion_models import TextAndUNet

from .arguments import LoopArguments, PipelineArguments
from .denoiser import components_of, set_prediction_type
from .encoders import Encoders
from .families import Family


class Validation:
    """Draws `args.validation_prompt` during a run, with the pipeline that training began with around the model.

    The prompts are encoded now; of the encoders only the VAE is kept. To draw it moves to the model's device.

    Args:
        model_args: name the pipeline.
        size: side of the images in pixels.
    """

    def __init__(
        self, family: Family, model_args: PipelineArguments, encoders: Encoders, size: int, args: LoopArguments
    ) -> None:
        self.family, self.model_args, self.size, self.args = family, model_args, size, args
        self.vae, self.absent = encoders.vae, encoders.absent
        self.folder, self.prompts = Path(args.output_dir, "samples"), args.validation_prompt or []
        self.embeds = {name: value.cpu() for name, value in encoders.encode_prompts([*self.prompts, ""]).items()}

    @torch.no_grad()
    def images(self, model: nn.Module, accelerator: Accelerator) -> list[Image.Image]:
        """Draws all prompts.

        The noise comes from a generator of its own, the same at each validation, so the run's random state is kept.
        """
        embeds, device, args = self.embeds, accelerator.device, self.args
        home, was_training = self.vae.device, model.training
        self.vae.to(device)
        model.eval()
        try:
            if isinstance(model, TextAndUNet):  # its prompts are tokens
                with accelerator.autocast():
                    embeds = model.encode({name: value.to(device) for name, value in embeds.items()})
            component = self.family.component
            pipeline = self._pipeline(without_adapters(components_of(model, component)[component]))
            arguments: dict[str, Any] = {
                "height": self.size, "width": self.size, "num_inference_steps": args.validation_inference_steps,
                "num_images_per_prompt": args.num_validation_images,
                "generator": torch.Generator().manual_seed(args.seed),
            }  # fmt: skip
            for name, values in embeds.items():
                prompts, empty = values.to(device).split([len(values) - 1, 1])
                arguments[name], arguments[f"negative_{name}"] = prompts, empty.expand_as(prompts)
            return self.family.draw(pipeline, accelerator.autocast, args.validation_guidance_scale, arguments)
        finally:
            model.train(was_training)
            self.vae.to(home)

    def _pipeline(self, model: nn.Module) -> Any:
        pipeline = DiffusionPipeline.from_pretrained(
            self.model_args.pretrained_model_name_or_path, revision=self.model_args.revision,
            variant=self.model_args.variant,
            **{self.family.component: model, "vae": self.vae, **dict.fromkeys(self.absent)},
        )  # fmt: skip
        set_prediction_type(pipeline.scheduler, self.model_args)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def run(self, model: nn.Module, accelerator: Accelerator, step: int) -> None:
        """Draws all prompts, writes `step-{step}.png` and sends the images to the trackers; for the main process."""
        images = self.images(model, accelerator)
        if step == 0:
            for old in self.folder.glob("step-*.png"):  # of an earlier run in the same place
                old.unlink()
        write(self.folder / f"step-{step:06}.png", make_image_grid(images, 1, len(images)).save)
        for tracker in accelerator.trackers:
            if tracker.name == "tensorboard":
                tracker.log_images({"validation": np.stack(images)}, step=step, dataformats="NHWC")
            elif tracker.name in ("wandb", "swanlab"):
                tracker.log_images({"validation": images}, step=step)

    def write_sheet(self, path: Path) -> None:
        """Writes all validations as the rows of one picture."""
        rows = [Image.open(file) for file in sorted(self.folder.glob("step-??????.png"))]
        if rows:
            write(path, make_image_grid(rows, len(rows), 1).save)
