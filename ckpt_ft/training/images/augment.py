"""Images as a classifier is given them: random crops and mirroring in training, the model's own framing otherwise.

Crops follow Szegedy et al. 2014 (arXiv:1409.4842, section 6): a share of the area and an aspect ratio are drawn.
Pillow crops; normalising and, in evaluation, framing are done by the model's image processor, which transformers bases
on torchvision where that is installed and on Pillow and numpy otherwise.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image, ImageOps
from torch.utils.data import Dataset as TorchDataset
from transformers import TrainerCallback

from .files import open_image

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import TrainerControl, TrainerState, TrainingArguments

Row = dict[str, Any]
_ASPECTS = (3 / 4, 4 / 3)  # width / height of a crop before it is made square
_TRIES = 10


class ImageRows(TorchDataset[Row]):
    """`pixel_values` (3, resolution, resolution) and `labels` of rows of undecoded images.

    What is drawn depends on seed, epoch and row alone: not on workers, ranks, or where a run was resumed.

    Args:
        rows: columns `image` and `label`.
        processor: the model's image processor.
        resolution: pixels of a side; None leaves the size to the processor.
        min_crop: least share of the area that a random crop shows; None for no augmentation.
        seed: of the crops.
    """

    def __init__(
        self, rows: Dataset, processor: Any, resolution: int | None, min_crop: float | None = None, seed: int = 0
    ) -> None:
        self.rows, self.processor, self.resolution = rows, processor, resolution
        self.min_crop, self.seed = min_crop, seed
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # workers that outlive an epoch see it change

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        row = self.rows[index]
        image = open_image(row["image"])
        if self.min_crop is not None:
            draw = random.Random(f"{self.seed} {self.epoch.item()} {index}")
            image = random_crop(image, self.min_crop, draw)
            image = ImageOps.mirror(image) if draw.random() < 0.5 else image
        return {"pixel_values": self.pixels(image), "labels": row["label"]}

    def pixels(self, image: Image.Image) -> torch.Tensor:
        """`image` normalised, at the resolution: a random crop is scaled to it whole, another image framed."""
        given = {}
        if self.resolution is not None:
            fit = Image.Image.resize if self.min_crop is not None else ImageOps.fit
            image = fit(image, (self.resolution, self.resolution), Image.Resampling.BICUBIC)
            given = {"do_resize": False, "do_center_crop": False}
        pixels: torch.Tensor = self.processor(image, return_tensors="pt", **given)["pixel_values"][0]
        return pixels


def random_crop(image: Image.Image, min_area: float, draw: random.Random) -> Image.Image:
    """A part of `image`: at least `min_area` of its area, aspect ratio from 3:4 to 4:3; its middle if none fits."""
    width, height = image.size
    for _ in range(_TRIES):
        area = draw.uniform(min_area, 1) * width * height
        aspect = math.exp(draw.uniform(math.log(_ASPECTS[0]), math.log(_ASPECTS[1])))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = draw.randint(0, width - w), draw.randint(0, height - h)
            return image.crop((left, top, left + w, top + h))
    side = min(width, height)
    return ImageOps.fit(image, (side, side))


class NewCropsEachEpoch(TrainerCallback):
    """Tells `rows` the epoch. Data loaders would call a `set_epoch`, but not on several ranks, nor after a resume."""

    def __init__(self, rows: ImageRows) -> None:
        self.rows = rows

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.rows.epoch.fill_(int(state.epoch or 0))


class Collator:
    """Rows to a batch: `pixel_values` (N, 3, H, W), `labels` (N,), and `extra` arguments of the model as they are."""

    def __init__(self, extra: dict[str, Any] | None = None) -> None:
        self.extra = extra or {}

    def __call__(self, rows: Sequence[Row]) -> Row:
        pixels = torch.stack([row["pixel_values"] for row in rows])
        return {"pixel_values": pixels, "labels": torch.tensor([row["labels"] for row in rows]), **self.extra}
