"""Images drawn by what is trained, from prompts that are encoded already: for validation, and of a class."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor, nn

from ckpt_ft.workloads.adapters import without_adapters
from ckpt_ft.workloads.pipeline_parts import TextAndUNet

from .arguments import PipelineArguments
from .joint import components_of
from .trained import Trained, predicts

if TYPE_CHECKING:
    from .frozen import Frozen

Autocast = Callable[[], AbstractContextManager[Any]]
# (pipeline, autocast, guidance scale or None for the pipeline's own, the pipeline's other arguments) -> the images
Draw = Callable[[Any, Autocast, float | None, dict[str, Any]], list[Image.Image]]


class Sampler:
    """The pipeline that training began with, around a model as it stands.

    Args:
        args: which pipeline that was.
        encoders: only the VAE is kept; it comes to the model's device to draw and goes back to where it was.
        size: side of the images in pixels.
        draw: what turns a pipeline and its arguments into images.
    """

    def __init__(self, part: Trained, args: PipelineArguments, encoders: Frozen, size: int, draw: Draw) -> None:
        self.part, self.args, self.size, self.draw = part, args, size, draw
        self.vae, self.absent = encoders.vae, encoders.absent

    @torch.no_grad()
    def images(
        self,
        model: nn.Module,
        embeds: dict[str, Tensor],
        device: torch.device,
        autocast: Autocast,
        guidance: float | None = None,
        **more: Any,
    ) -> list[Image.Image]:
        """Of encoded prompts, the empty one last; of their tokens where the model has text encoders of its own.

        guidance: None for the pipeline's own scale.
        more: arguments of the pipeline.
        """
        home, was_training = self.vae.device, model.training
        self.vae.to(device)
        model.eval()
        try:
            if isinstance(model, TextAndUNet):
                with autocast():
                    embeds = model.encode({name: value.to(device) for name, value in embeds.items()})
            vae = copy.deepcopy(self.vae) if "mask_image" in more else self.vae  # SDXL's for inpainting leaves it cast
            trained = components_of(model, self.part.component)[self.part.component]
            pipeline = self._pipeline(vae, without_adapters(trained))
            arguments = {**_prompts(embeds, device), "height": self.size, "width": self.size, **more}
            return self.draw(pipeline, autocast, guidance, arguments)
        finally:
            model.train(was_training)
            self.vae.to(home)

    def _pipeline(self, vae: Any, model: nn.Module) -> Any:
        """The pipeline with its own sampler, around what is at hand: no text encoder is loaded again."""
        from diffusers import DiffusionPipeline

        pipeline = DiffusionPipeline.from_pretrained(
            self.args.pretrained_model_name_or_path,
            revision=self.args.revision,
            variant=self.args.variant,
            **{self.part.component: model, "vae": vae, **dict.fromkeys(self.absent)},
        )
        predicts(pipeline.scheduler, self.args)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline


def _prompts(embeds: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    arguments = {}
    for name, values in embeds.items():
        wanted, empty = values.to(device).split([len(values) - 1, 1])
        arguments[name], arguments[f"negative_{name}"] = wanted, empty.expand_as(wanted)
    return arguments
