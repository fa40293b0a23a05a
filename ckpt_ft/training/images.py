"""Image files as RGB pictures, and captioned images for diffusion: from the Hub, a folder, shapes, or of one subject.

A folder has a metadata.jsonl, or is as kohya's scripts read it: a .txt file beside each image, folders with a number
of repeats. DreamBooth (Ruiz et al., 2022, https://arxiv.org/abs/2208.12242) trains on a few images of one subject
under one prompt. All images are checked before training. Bad input raises UserError, one line that names the file or
the row. The flags are named as in diffusers' scripts.
"""

from __future__ import annotations

import io
import os
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from datasets import Dataset
from datasets import Image as ImageFeature
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from ckpt_ft.errors import UserError, did_you_mean, one_line
from ckpt_ft.training.flags import AtLeastOne, Count, Needs, Pixels, Share, check_flags, flag, load_split
from ckpt_ft.training.samples.drawings import COMBINATIONS, drawn_shapes
from ckpt_ft.training.text import check_filled
from ckpt_ft.workloads.sample_sizes import AUTO, Size, read_buckets

DECODED = 5_000  # images that are decoded completely before training; of later ones only the header is read
_SHOWN = 3  # bad images named in an error
UNDECODABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)  # errors of Pillow's decoders
_REPEATED = re.compile(r"(\d{1,4})_(.+)")  # a folder of kohya's scripts: repeats of its images, and their caption
_ORIENTATION, _QUARTER_TURNS = 0x0112, (5, 6, 7, 8)  # EXIF's tag, and its values for a quarter turn
_SOURCES = ("instance_data_dir", "dataset_name", "train_data_dir")


def image_files(folder: Path, *, below: bool = True) -> list[Path]:
    """Returns the image files in `folder`, sorted; with `below` also those in folders below it. Skips hidden files."""
    suffixes = Image.registered_extensions()
    return sorted(
        path
        for path in (folder.rglob("*") if below else folder.iterdir())
        if path.suffix.lower() in suffixes and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def named_columns(rows: Dataset, source: str, *columns: tuple[str, str, str]) -> Dataset:
    """Selects and renames columns, each given as (the flag that names it, its name, its new name)."""
    for option, column, _ in columns:
        same = [f"--{other}" for other, theirs, _ in columns if theirs == column]
        if len(same) > 1:
            raise UserError(f"{' and '.join(same)} name one column, {column}; give each its own")
        if column not in rows.column_names:
            suggestion, there = did_you_mean(column, rows.column_names), ", ".join(rows.column_names)
            raise UserError(f"--{option} {column}: {source} has no such column{suggestion}; it has {there}")
    rows = rows.select_columns([column for _, column, _ in columns])
    return rows.rename_columns({theirs: ours for _, theirs, ours in columns if theirs != ours})


def undecoded(rows: Dataset) -> Dataset:
    """Returns `rows` whose column `image` is fetched as files or bytes.

    Raises:
        UserError: it holds no images.
    """
    try:
        return rows.cast_column("image", ImageFeature(decode=False))
    except (TypeError, ValueError) as error:
        kind = rows.features["image"]
        raise UserError(f"the image column holds {kind}, which cannot be read as images") from error


def readable(rows: Dataset, source: str, *, skip: bool) -> Dataset:
    """Returns the rows whose undecoded `image` can be read; prints the others."""
    found = [_problem(image, row) for row, image in enumerate(rows["image"])]
    problems = list(dict.fromkeys(filter(None, found)))  # an image may be several rows
    if problems and not skip:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        named = "; ".join(problems[:_SHOWN])
        raise UserError(f"{source}: {named}{more}; repair them, or leave them out with --skip_bad_images")
    for problem in problems:
        print(f"skipped: {problem}", flush=True)
    kept = [row for row, problem in enumerate(found) if problem is None]
    if not kept:
        raise UserError(f"{source}: no readable image is left" if problems else f"{source}: there is no image in it")
    return rows.select(kept) if problems else rows


def _problem(image: Mapping[str, Any] | None, row: int) -> str | None:
    """Returns why the image cannot be used; None if it can."""
    if image is None or (image["bytes"] is None and not image["path"]):
        return f"row {row + 1} has no image"
    name = image["path"] or f"the image of row {row + 1}"
    try:
        with _opened(image) as opened:
            if row < DECODED:
                to_rgb(opened)
    except UnidentifiedImageError:  # which names the file once more
        return f"{name} is no image that Pillow can read"
    except UNDECODABLE as error:
        return f"{name} cannot be read ({one_line(error)})"
    return None


def open_image(image: Mapping[str, Any]) -> Image.Image:
    """Returns the RGB picture of an undecoded `image` cell (`bytes` or `path`), turned as its EXIF data says."""
    try:
        with _opened(image) as opened:
            return to_rgb(opened)
    except UNDECODABLE as error:
        name = image["path"] or "an image"
        raise UserError(f"{name} cannot be read ({one_line(error)}); repair it or take it out") from error


def size_of(image: Mapping[str, Any]) -> tuple[int, int]:
    """Returns height and width of the picture that `open_image` returns; reads only the file's header."""
    with _opened(image) as opened:
        width, height = opened.size
        turned = opened.getexif().get(_ORIENTATION) in _QUARTER_TURNS
    return (width, height) if turned else (height, width)


def to_rgb(image: Image.Image) -> Image.Image:
    """Converts to RGB: grey in three channels (16 bits cut to 8), transparency over white, turned as EXIF says."""
    image = ImageOps.exif_transpose(image)
    if image.has_transparency_data:
        over = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", over.size, "white"), over).convert("RGB")
    if image.mode.startswith("I;16"):  # Pillow's own conversion turns everything above 255 white
        image = image.convert("I").point(lambda value: value * (1 / 256))
    return image.convert("RGB")


def _opened(image: Mapping[str, Any]) -> Image.Image:
    return Image.open(image["path"] if image["bytes"] is None else io.BytesIO(image["bytes"]))


@dataclass
class ImageArguments:
    """The captioned images, or the images of one subject, to train on, and how they are prepared."""

    _argument_group_name = "data"
    _needs: ClassVar[Needs] = {"instance_data_dir": ("instance_prompt",)}
    dataset_name: str | None = flag(None, "Hub id of a dataset of images and captions.")
    dataset_config_name: str | None = flag(None, "Configuration of the Hub dataset.")
    train_data_dir: str | None = flag(
        None,
        "Image folder with a metadata.jsonl of file_name and text, or a .txt of the same name beside each image; "
        "without it and dataset_name, drawn shapes.",
    )
    image_column: str = flag("image", "Column of the images.")
    caption_column: str = flag("text", "Column, or key in metadata.jsonl, of the captions.")
    max_train_samples: AtLeastOne | None = flag(None, "Train on only this many rows, the first ones.")
    resolution: Pixels | None = flag(None, "Side of the square images in pixels; the model's own when left out.")
    aspect_ratio_buckets: str | None = flag(
        None,
        "'height,width;height,width': each image in the size nearest to its shape, batches of one size; auto makes "
        "sizes of as many pixels as the square. Without it every image is cut to the square.",
    )
    center_crop: bool = flag(True, "Crop the middle; --no_center_crop crops anywhere, anew each time.")
    random_flip: bool = flag(False, "Mirror half of the images, anew each time.")
    proportion_empty_prompts: Share = flag(0.0, "Share of captions left out, for classifier-free guidance.")
    skip_bad_images: bool = flag(False, "Train without images that cannot be read instead of stopping.")
    cache_latents: bool | None = flag(
        None,
        "Encode images and captions once, into files; only the trained model is then on the device. "
        "On when left out, unless images are cropped or flipped at random.",
    )
    dataloader_num_workers: Count = flag(0, "Processes that prepare batches.")
    instance_data_dir: str | None = flag(None, "DreamBooth: a folder of images of one subject, without captions.")
    instance_prompt: str | None = flag(None, "The caption of all these images, such as 'a photo of sks dog'.")

    def __post_init__(self) -> None:
        check_flags(self)
        if self.aspect_ratio_buckets not in (None, AUTO):
            read_buckets(str(self.aspect_ratio_buckets))
        sources = [name for name in _SOURCES if getattr(self, name) is not None]
        if len(sources) > 1:
            raise UserError(f"--{sources[0]} and --{sources[1]} are two sources of images; give one of them")
        if self.instance_data_dir is not None and not (self.instance_prompt or "").strip():
            raise UserError("--instance_data_dir needs --instance_prompt, such as 'a photo of sks dog'")
        random_each_time = self.random_flip or not self.center_crop
        if self.cache_latents and random_each_time:
            raise UserError(
                "--cache_latents encodes each image once, but --no_center_crop and --random_flip draw anew each time: "
                "drop one or the other"
            )
        if self.cache_latents is None:
            self.cache_latents = not random_each_time


def load_captioned(args: ImageArguments, resolution: int) -> Dataset:
    """Returns rows of `image` (bytes or path, undecoded) and `text`: captioned images, or the subject's.

    Every image can be read and every caption is there.
    """
    if args.instance_data_dir is not None:
        rows, source = _load_subject(args.instance_data_dir, args.instance_prompt), args.instance_data_dir
    elif args.dataset_name is not None:
        rows, source = _load_columns("--dataset_name", args.dataset_name, args), args.dataset_name
    elif args.train_data_dir is not None:
        rows, source = _load_folder(Path(args.train_data_dir), args), args.train_data_dir
    else:
        count = min(args.max_train_samples or COMBINATIONS, COMBINATIONS)
        return undecoded(drawn_shapes(count, resolution).select_columns(["image", "text"]))
    rows = undecoded(rows)
    if args.max_train_samples is not None:
        rows = rows.select(range(min(args.max_train_samples, len(rows))))
    if getattr(rows.features["text"], "dtype", None) not in ("string", "large_string", "null"):  # a list has none
        raise UserError(
            f"{source}: '{args.caption_column}' holds {rows.features['text']}; captions are texts: name their column, "
            "--caption_column"
        )
    check_filled(rows, source, "text", args.caption_column)
    return readable(rows, source, skip=args.skip_bad_images)


def _load_subject(directory: str, prompt: str | None) -> Dataset:
    """Reads the images of a folder, not of the folders below it: DreamBooth's may lie in one another."""
    if not os.path.isdir(directory):
        raise UserError(f"--instance_data_dir {directory}: no such directory")
    images = image_files(Path(directory), below=False)
    return Dataset.from_dict({"image": list(map(str, images)), "text": [prompt] * len(images)})


def _load_columns(flag: str, name: str, args: ImageArguments) -> Dataset:
    rows = load_split(name, args.dataset_config_name, "train", flag)
    columns = ("image_column", args.image_column, "image"), ("caption_column", args.caption_column, "text")
    return named_columns(rows, name, *columns)


def _load_folder(folder: Path, args: ImageArguments) -> Dataset:
    """Reads the layout of datasets' "imagefolder", whose files must lie inside of it, or of kohya's scripts."""
    if not folder.is_dir():
        raise UserError(f"--train_data_dir {folder}: no such directory")
    if any(folder.rglob("metadata.jsonl")):
        return _load_columns("--train_data_dir", str(folder), args)
    return _load_text_files(folder, args.caption_column)


def _load_text_files(folder: Path, caption_column: str) -> Dataset:
    """Reads the layout of kohya's scripts: `1.png`, and beside it `1.txt` with its caption.

    An image in a folder `10_sks dog` is ten rows; "sks dog" is its caption if it has no text file.
    """
    images = image_files(folder)
    repeated = {path: named for path in folder.iterdir() if (named := _REPEATED.fullmatch(path.name))}
    kinds = [repeated.get(path.parent) for path in images]
    if not any(kinds) and not any(path.with_suffix(".txt").is_file() for path in images):
        raise UserError(
            f"--train_data_dir {folder}: neither a metadata.jsonl nor .txt files beside the images with the captions; "
            f'write one line per image, such as {{"file_name": "1.png", "{caption_column}": "a red circle"}}'
        )
    rows: list[tuple[str, str]] = []
    for image, kind in zip(images, kinds, strict=True):
        caption = _caption_beside(image, kind[2] if kind else None)
        rows += [(str(image), caption)] * (int(kind[1]) if kind else 1)
    return Dataset.from_dict({"image": [image for image, _ in rows], "text": [text for _, text in rows]})


def _caption_beside(image: Path, without: str | None) -> str:
    """Returns the caption in the text file beside `image`, or the caption of images without such a file."""
    file = image.with_suffix(".txt")
    if without is not None and not file.exists():
        return without
    try:
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise UserError(f"{image} has no caption: {file.name} beside it: {one_line(error, 200)}") from error
    if not text:
        raise UserError(f"{image} has no caption: {file.name} is empty")
    return text


def framed(image: Image.Image, size: Size, args: ImageArguments, draw: random.Random) -> tuple[Tensor, Tensor]:
    """Scales `image` until it covers `size`, crops it and perhaps mirrors it; `draw` makes the random choices.

    Returns:
        Pixels (3, *size) in -1..1, and SDXL's six time ids: original size, crop corner, target size (section 2.2 of
        https://arxiv.org/abs/2307.01952).
    """
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
