"""Validation images: prompts drawn by the model as it stands; on disk, at the trackers, at the end on one sheet."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn

from ckpt_ft.files import write
from ckpt_ft.training.samples.drawings import contact_sheet, drawings

from .arguments import LoopArguments
from .sampling import Sampler

if TYPE_CHECKING:
    from accelerate import Accelerator

    from .frozen import Frozen

TILE = 96  # pixels of an image on the sheet, at most
_MARGIN = 4
_LABEL = 72  # pixels for the row's name


class Validation:
    """Draws `args.validation_prompt` in the course of a run. The prompts are encoded now; the encoders are not kept.

    Args:
        more: arguments of the pipeline, such as the images to paint in.
    """

    def __init__(self, sampler: Sampler, args: LoopArguments, encoders: Frozen, folder: Path, **more: Any) -> None:
        self.sampler, self.args, self.folder, self.more = sampler, args, folder, more
        self.prompts = args.validation_prompt or []
        self.embeds = {name: value.cpu() for name, value in encoders.encode_prompts([*self.prompts, ""]).items()}

    @property
    def tile(self) -> int:
        """Pixels of an image's side on a sheet; small ones are enlarged."""
        return min(TILE, self.sampler.size * 3)

    def run(self, model: nn.Module, accelerator: Accelerator, step: int) -> None:
        """Draw all prompts, write `step-{step}.png` and send them to the trackers. Only on the main process.

        The run's own RNG is left alone: noise comes from a generator of its own, the same at each validation.
        """
        images = self._draw(model, accelerator)
        if step == 0:
            for old in self.folder.glob("step-*.png"):  # of an earlier run in the same place
                old.unlink()
        sheet = contact_sheet(images, columns=len(images), tile=self.tile, margin=_MARGIN)
        write(self.folder / f"step-{step:06}.png", sheet.save)
        if self.sampler.size > TILE:
            for place, image in enumerate(images):
                write(self.folder / f"step-{step:06}-{place}.png", image.save)
        for tracker in accelerator.trackers:
            if tracker.name == "tensorboard":
                tracker.log_images({"validation": np.stack(images)}, step=step, dataformats="NHWC")
            elif tracker.name in ("wandb", "swanlab"):
                tracker.log_images({"validation": images}, step=step)

    def _draw(self, model: nn.Module, accelerator: Accelerator) -> list[Image.Image]:
        return self.sampler.images(
            model, self.embeds, accelerator.device, accelerator.autocast, self.args.validation_guidance_scale,
            num_inference_steps=self.args.validation_inference_steps,
            num_images_per_prompt=self.args.num_validation_images,
            generator=torch.Generator().manual_seed(self.args.seed), **self.more,
        )  # fmt: skip

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
                known[prompt].image(self.sampler.size)
                for prompt in self.prompts
                for _ in range(self.args.num_validation_images)
            ]
            rows.append(("asked for", contact_sheet(wanted, columns=len(wanted), tile=self.tile, margin=_MARGIN)))
        width, height = rows[0][1].size
        page = Image.new("RGB", (_LABEL + width, height * len(rows)), (128, 128, 128))
        draw = ImageDraw.Draw(page)
        for place, (name, row) in enumerate(rows):
            page.paste(row, (_LABEL, place * height))
            draw.text((_MARGIN, place * height + height // 2 - 6), name, fill=(255, 255, 255))
        write(path, page.save)
