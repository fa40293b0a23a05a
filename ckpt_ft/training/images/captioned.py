"""Captioned images: a Hub dataset, a folder with metadata.jsonl or .txt files, drawn shapes; checked before training.

Whatever is wrong with them is one line that names the file or row. Images are resized until they cover their
size, the square of the resolution or that of their bucket, cropped to it and perhaps mirrored, with Pillow.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageOps

from ckpt_ft.errors import UserError, one_line
from ckpt_ft.training.flags import AT_LEAST_ONE, NOT_NEGATIVE, PIXELS, SHARE, Range, check_numbers, flag
from ckpt_ft.workloads.buckets import AUTO, Size, read_buckets

from .files import image_files, named_columns, readable
from .shapes import drawn_shapes

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor


_NUMBERS = {
    "resolution": Range(0, PIXELS.most),
    "max_train_samples": AT_LEAST_ONE,
    "dataloader_num_workers": NOT_NEGATIVE,
    "proportion_empty_prompts": SHARE,
}


@dataclass
class ImageArguments:
    """Which captioned images are trained on, and what is done to them first.

    Raises:
        UserError: a size that a VAE cannot take, or settings that contradict each other.
    """

    dataset_name: str | None = flag(None, "Hub id of a dataset of images and captions.")
    dataset_config_name: str | None = flag(None, "Configuration of the Hub dataset.")
    train_data_dir: str | None = flag(
        None,
        "Image folder with a metadata.jsonl of file_name and text, or a .txt of the same name beside each image; "
        "without it and dataset_name, drawn shapes.",
    )
    image_column: str = flag("image", "Column of the images.")
    caption_column: str = flag("text", "Column, or key in metadata.jsonl, of the captions.")
    max_train_samples: int | None = flag(None, "Train on only this many rows, the first ones.")
    resolution: int | None = flag(None, "Side of the square images in pixels; the model's own when left out.")
    aspect_ratio_buckets: str | None = flag(
        None,
        "'height,width;height,width': each image in the size nearest to its shape, batches of one size; auto makes "
        "sizes of as many pixels as the square. Without it every image is cut to the square.",
    )
    center_crop: bool = flag(True, "Crop the middle; --no_center_crop crops anywhere, anew each time.")
    random_flip: bool = flag(False, "Mirror half of the images, anew each time.")
    proportion_empty_prompts: float = flag(0.0, "Share of captions left out, for classifier-free guidance.")
    skip_bad_images: bool = flag(False, "Train without images that cannot be read instead of stopping.")
    cache_latents: bool | None = flag(
        None,
        "Encode images and captions once, into files; only the trained model is then on the device. "
        "On when left out, unless images are cropped or flipped at random.",
    )
    dataloader_num_workers: int = flag(0, "Processes that prepare batches.")

    def __post_init__(self) -> None:
        check_numbers(self, _NUMBERS)
        if self.resolution is not None and (self.resolution < PIXELS.least or self.resolution % 8):
            below = max(8, self.resolution // 8 * 8)
            raise UserError(f"--resolution {self.resolution} is not a multiple of 8; take {below} or {below + 8}")
        if self.aspect_ratio_buckets not in (None, AUTO):
            read_buckets(str(self.aspect_ratio_buckets))
        if self.dataset_name is not None and self.train_data_dir is not None:
            raise UserError("--dataset_name and --train_data_dir are two sources of images; give one of them")
        if self.cache_latents and self.is_random:
            raise UserError(
                "--cache_latents encodes each image once, but --no_center_crop and --random_flip draw anew each time: "
                "drop one or the other"
            )
        if self.cache_latents is None:
            self.cache_latents = not self.is_random

    @property
    def is_random(self) -> bool:
        return self.random_flip or not self.center_crop


def load_captioned(args: ImageArguments, resolution: int) -> Dataset:
    """Rows of `image` (bytes or path, undecoded) and `text`, every image readable and every caption there.

    Raises:
        UserError: the source cannot be found or is empty, a column or caption is missing, or an image cannot be read
        and `skip_bad_images` is off.
    """
    from datasets import Image as ImageFeature

    if args.dataset_name is not None:
        rows, source = _hub_dataset(args), args.dataset_name
    elif args.train_data_dir is not None:
        rows, source = _image_folder(args.train_data_dir, args.caption_column), args.train_data_dir
    else:
        return first_rows(drawn_shapes(resolution=resolution).select_columns(["image", "text"]), args).cast_column(
            "image", ImageFeature(decode=False)
        )
    rows = first_rows(rows.cast_column("image", ImageFeature(decode=False)), args)
    missing = next((number for number, text in enumerate(rows["text"], start=1) if not _is_caption(text)), None)
    if missing is not None:
        raise UserError(f"{source}: row {missing} of {len(rows)} has no caption ('{args.caption_column}')")
    return readable(rows, source, skip=args.skip_bad_images)


def _hub_dataset(args: ImageArguments) -> Dataset:
    from datasets import load_dataset

    try:
        rows = load_dataset(args.dataset_name, args.dataset_config_name, split="train")
    except Exception as error:  # as its files are: readers of many formats raise what they like
        reason = one_line(error.__cause__ or error)
        raise UserError(f"--dataset_name {args.dataset_name} cannot be loaded: {reason}") from error
    return named_columns(
        rows, str(args.dataset_name), ("image_column", args.image_column, "image"),
        ("caption_column", args.caption_column, "text"),
    )  # fmt: skip


def _image_folder(directory: str, caption_column: str) -> Dataset:
    """The layout of datasets' "imagefolder", read here because errors must name the line and the file."""
    from datasets import Dataset

    folder = Path(directory)
    if not folder.is_dir():
        raise UserError(f"--train_data_dir {directory}: no such directory")
    listing = next(
        (path for path in (folder / "metadata.jsonl", folder / "train" / "metadata.jsonl") if path.is_file()), None
    )
    if listing is None:
        return _with_text_files(folder, caption_column)
    paths, captions = [], []
    for number, line in enumerate(listing.read_bytes().splitlines(), start=1):
        if line.strip():
            entry = _entry(line, f"{listing} line {number}", caption_column)
            paths.append(_inside(folder, listing.parent / entry["file_name"], f"{listing} line {number}"))
            captions.append(entry[caption_column])
    return Dataset.from_dict({"image": paths, "text": captions})


def _with_text_files(folder: Path, caption_column: str) -> Dataset:
    """The layout of kohya's scripts: `1.png` and, beside it, `1.txt` with its caption."""
    from datasets import Dataset

    images = image_files(folder)
    texts = [path.with_suffix(".txt") for path in images]
    if not any(text.is_file() for text in texts):
        raise UserError(
            f"--train_data_dir {folder}: neither a metadata.jsonl nor .txt files beside the images with the captions; "
            f'write one line per image, such as {{"file_name": "1.png", "{caption_column}": "a red circle"}}'
        )
    captions = []
    for image, text in zip(images, texts, strict=True):
        try:
            captions.append(text.read_text(encoding="utf-8").strip())
        except (OSError, ValueError) as error:
            raise UserError(f"{image} has no caption: {text.name} beside it: {one_line(error, 200)}") from error
        if not captions[-1]:
            raise UserError(f"{image} has no caption: {text.name} is empty")
    return Dataset.from_dict({"image": [str(path) for path in images], "text": captions})


def _inside(folder: Path, path: Path, place: str) -> str:
    """`path`, which must lie below `folder`: a data set from elsewhere must not name what is private.

    Links are not followed: the Hub's own cache is made of them.
    """
    if "\0" in str(path) or not Path(os.path.abspath(path)).is_relative_to(os.path.abspath(folder)):
        raise UserError(f"{place} names {str(path)!r}, which lies outside of {folder}; its images are inside of it")
    return str(path)


def _entry(line: bytes, place: str, caption_column: str) -> dict[str, str]:
    try:
        entry = json.loads(line)
        json.dumps(entry, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON in UTF-8: {one_line(error, 200)}") from error
    if not isinstance(entry, dict) or not isinstance(entry.get("file_name"), str):
        raise UserError(f"{place} has no 'file_name'")
    if not _is_caption(entry.get(caption_column)):
        raise UserError(f"{place} has no caption: '{caption_column}' of {entry['file_name']} is missing or empty")
    return entry


def _is_caption(text: Any) -> bool:
    return isinstance(text, str) and bool(text.strip())


def first_rows(rows: Dataset, args: ImageArguments) -> Dataset:
    return rows if args.max_train_samples is None else rows.select(range(min(args.max_train_samples, len(rows))))


def framed(image: Image.Image, size: Size, args: ImageArguments, draw: random.Random) -> tuple[Tensor, Tensor]:
    """Pixels (3, *size) in -1..1 and SDXL's six time ids (original size, crop corner, target size).

    `draw` decides where to crop and whether to mirror when `args` ask for either. See section 2.2 of the SDXL report,
    https://arxiv.org/abs/2307.01952, for what the time ids are.
    """
    import numpy as np
    import torch

    original = (image.height, image.width)
    scale = max(target / side for target, side in zip(size, original, strict=True))
    height, width = (max(target, round(side * scale)) for target, side in zip(size, original, strict=True))
    image = image.resize((width, height), Image.Resampling.LANCZOS)
    if args.random_flip and draw.random() < 0.5:
        image = ImageOps.mirror(image)
    top, left = (height - size[0]) // 2, (width - size[1]) // 2
    if not args.center_crop:
        top, left = draw.randint(0, height - size[0]), draw.randint(0, width - size[1])
    image = image.crop((left, top, left + size[1], top + size[0]))
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1
    return pixels, torch.tensor([*original, top, left, *size])
