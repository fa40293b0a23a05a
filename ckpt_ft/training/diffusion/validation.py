"""Validation images: prompts drawn by the U-Net as it stands; on disk, at the trackers, at the end on one sheet."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageDraw

from ckpt_ft.training.images.shapes import contact_sheet, drawings

from .arguments import DiffusionModelArguments, LoopArguments

if TYPE_CHECKING:
    from accelerate import Accelerator
    from diffusers import UNet2DConditionModel

    from .encoders import Encoders

TILE = 96  # pixels of an image on the sheet, at most
_MARGIN = 4
_LABEL = 72  # pixels for the row's name


class Validation:
    """Draws `args.validation_prompt` in the course of a run. The prompts are encoded now; the encoders are not kept.

    Args:
        encoders: only the VAE is kept; it comes to the device for a validation and goes back to where it was.
        size: side of the images in pixels.
    """

    def __init__(
        self, model: DiffusionModelArguments, args: LoopArguments, encoders: Encoders, size: int, folder: Path
    ) -> None:
        self.model, self.args, self.size, self.folder = model, args, size, folder
        self.sdxl = encoders.sdxl
        self.vae = encoders.vae
        self.prompts = args.validation_prompt or []
        self.embeds = {name: value.cpu() for name, value in encoders.encode_prompts([*self.prompts, ""]).items()}

    def run(self, unet: UNet2DConditionModel, accelerator: Accelerator, step: int) -> None:
        """Draw all prompts, write `step-{step}.png` and send them to the trackers. Only on the main process.

        The run's own RNG is left alone: noise comes from a generator of its own, the same at each validation.
        """
        images = self._draw(unet, accelerator)
        self.folder.mkdir(parents=True, exist_ok=True)
        if step == 0:
            for old in self.folder.glob("step-*.png"):  # of an earlier run in the same place
                old.unlink()
        sheet = contact_sheet(images, columns=len(images), tile=min(TILE, self.size * 3), margin=_MARGIN)
        sheet.save(self.folder / f"step-{step:06}.png")
        if self.size > TILE:
            for place, image in enumerate(images):
                image.save(self.folder / f"step-{step:06}-{place}.png")
        for tracker in accelerator.trackers:
            if tracker.name == "tensorboard":
                tracker.log_images({"validation": np.stack(images)}, step=step, dataformats="NHWC")
            elif tracker.name in ("wandb", "swanlab"):
                tracker.log_images({"validation": images}, step=step)

    @torch.no_grad()
    def _draw(self, unet: UNet2DConditionModel, accelerator: Accelerator) -> list[Image.Image]:
        pipeline = self._pipeline(unet)
        home, was_training = self.vae.device, unet.training
        self.vae.to(accelerator.device)
        unet.eval()
        try:
            with accelerator.autocast():
                latents = pipeline(
                    **self._prompt_arguments(accelerator.device),
                    height=self.size,
                    width=self.size,
                    num_inference_steps=self.args.validation_inference_steps,
                    guidance_scale=self.args.validation_guidance_scale,
                    num_images_per_prompt=self.args.num_validation_images,
                    generator=torch.Generator().manual_seed(self.args.seed),
                    output_type="latent",
                ).images
            # Outside of autocast: SDXL's VAE overflows in half precision.
            decoded = torch.cat(
                [self.vae.decode(part.float() / self.vae.config.scaling_factor).sample for part in latents.split(4)]
            )
            return pipeline.image_processor.postprocess(decoded.cpu(), output_type="pil")
        finally:
            unet.train(was_training)
            self.vae.to(home)

    def _pipeline(self, unet: UNet2DConditionModel) -> Any:
        """The pipeline with its own sampler, around what is at hand: no text encoder is loaded again."""
        from diffusers import DiffusionPipeline

        absent: dict[str, Any] = dict.fromkeys(("text_encoder", "tokenizer"))
        absent |= dict.fromkeys(("text_encoder_2", "tokenizer_2") if self.sdxl else ("safety_checker",))
        pipeline = DiffusionPipeline.from_pretrained(
            self.model.pretrained_model_name_or_path,
            unet=unet,
            vae=self.vae,
            revision=self.model.revision,
            variant=self.model.variant,
            **absent,
        )
        if self.model.prediction_type is not None:
            pipeline.scheduler.register_to_config(prediction_type=self.model.prediction_type)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def _prompt_arguments(self, device: torch.device) -> dict[str, torch.Tensor]:
        count = len(self.prompts)
        arguments = {}
        for name, ours in (("prompt_embeds", "prompt_embeds"), ("pooled_prompt_embeds", "pooled_embeds")):
            if ours in self.embeds:
                embeds = self.embeds[ours].to(device)
                arguments[name] = embeds[:count]
                arguments[f"negative_{name}"] = embeds[count:].expand(count, *embeds.shape[1:])
        return arguments

    def write_sheet(self, path: Path) -> None:
        """All validations as the rows of one picture; below them, for prompts of drawn shapes, what was asked for."""
        rows = [
            (f"step {int(file.stem[5:])}", Image.open(file).copy())
            for file in sorted(self.folder.glob("step-??????.png"))
        ]
        if not rows:
            return
        known = {drawing.caption: drawing for drawing in drawings()}
        if all(prompt in known for prompt in self.prompts):
            wanted = [
                known[prompt].image(self.size)
                for prompt in self.prompts
                for _ in range(self.args.num_validation_images)
            ]
            tile = min(TILE, self.size * 3)
            rows.append(("asked for", contact_sheet(wanted, columns=len(wanted), tile=tile, margin=_MARGIN)))
        width, height = rows[0][1].size
        page = Image.new("RGB", (_LABEL + width, height * len(rows)), (128, 128, 128))
        draw = ImageDraw.Draw(page)
        for place, (name, row) in enumerate(rows):
            page.paste(row, (_LABEL, place * height))
            draw.text((_MARGIN, place * height + height // 2 - 6), name, fill=(255, 255, 255))
        page.save(path)
