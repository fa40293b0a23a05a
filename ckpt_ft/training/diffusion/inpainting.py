"""Inpainting U-Nets: beside noisy latents they see a mask and the latents of what it leaves of the image.

Their channels are C noisy ones, one of the mask (1 where the image is to be drawn anew), and C of the image with that
part grey. Masks are drawn anew each time an image is shown: a rectangle or an ellipse of any size at any place.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torch.nn import functional

from ckpt_ft.workloads.sample_sizes import Size

from .latents import FramedImages, Key, Row

if TYPE_CHECKING:
    from .arguments import LoopArguments

_GREY = (127, 127, 127)


class MaskedImages(FramedImages):
    """Rows of FramedImages with a `mask` (1, height, width)."""

    def __getitem__(self, key: Key) -> Row:
        mask = random_mask(self.size(key[1]), random.Random(f"mask {self.seed} {key[0]} {key[1]}"))
        return {**super().__getitem__(key), "mask": torch.from_numpy(np.asarray(mask, np.float32) / 255)[None]}


def random_mask(size: Size, draw: random.Random) -> Image.Image:
    """White, on black, where an image of `size` (height, width) is to be drawn anew."""
    high, wide = size
    mask = Image.new("L", (wide, high), 0)
    width, height = draw.randint(1, wide), draw.randint(1, high)
    left, top = draw.randint(0, wide - width), draw.randint(0, high - height)
    pen = ImageDraw.Draw(mask)
    shape = pen.rectangle if draw.random() < 0.5 else pen.ellipse
    shape((left, top, left + width - 1, top + height - 1), fill=255)
    return mask


@torch.no_grad()
def encode_masked(vae: Any, pixels: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """`mask` (B, 1, h, w) as the U-Net sees it, and `masked_moments` of the images without what it hides."""
    hidden = mask >= 0.5
    moments = vae.encode(pixels.masked_fill(hidden, 0.0)).latent_dist.parameters
    return {"mask": functional.interpolate(hidden.float(), size=moments.shape[-2:]), "masked_moments": moments}


def pictures(samples: Any, args: LoopArguments) -> dict[str, Any]:
    """What the inpainting pipeline draws in for `args.validation_prompt`: the first images, their masks of epoch 0.

    samples: MaskedImages, or Pairs of them, where the subject's come first.
    """
    rows: Any = samples if isinstance(samples, MaskedImages) else samples.rows
    shown = [rows[0, place % len(rows)] for place in range(len(args.validation_prompt or []))]
    shown = [row for row in shown for _ in range(args.num_validation_images)]
    images = [((row["pixels"].permute(1, 2, 0) + 1) * 127.5).round().byte().numpy() for row in shown]
    masks = [(row["mask"][0] * 255).byte().numpy() for row in shown]
    return {"image": list(map(Image.fromarray, images)), "mask_image": list(map(Image.fromarray, masks))}


def blank(side: int) -> dict[str, Any]:
    """For an image that is drawn whole."""
    return {"image": Image.new("RGB", (side, side), _GREY), "mask_image": Image.new("L", (side, side), 255)}
