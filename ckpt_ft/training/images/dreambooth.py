"""DreamBooth's images: a few of one subject under one prompt and, to keep what the model knows, others of its class.

Ruiz et al., 2022, https://arxiv.org/abs/2208.12242. The flags are named as in diffusers' scripts. Folders are read
without what lies below them, so that one may hold the other.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from PIL import Image

from ckpt_ft.errors import UserError, one_line
from ckpt_ft.training.flags import AT_LEAST_ONE, NOT_NEGATIVE, changed, check_numbers, flag

from .captioned import ImageArguments, first_rows, load_captioned
from .files import UNDECODABLE, image_files, readable

if TYPE_CHECKING:
    from datasets import Dataset

_PRIOR = (
    "class_data_dir", "class_prompt", "num_class_images", "sample_batch_size", "prior_generation_precision",
    "prior_loss_weight",
)  # fmt: skip
_KEY = "class_prompt"  # of a drawn image's file: what it was drawn for


class Prior(NamedTuple):
    """What of its knowledge a model is to keep.

    Attributes:
        folder: of the class images.
        prompt: what they show.
        images: that there are to be.
        batch: images drawn at once, of those that are missing.
        precision: that they are drawn in; None for the run's own.
        weight: of their loss beside the subject's.
    """

    folder: Path
    prompt: str
    images: int
    batch: int
    precision: str | None
    weight: float


@dataclass
class DreamBoothArguments(ImageArguments):
    """ImageArguments, or a folder of one subject; with either, images of its class that keep what the model knows.

    Raises:
        UserError: what ImageArguments refuses, a folder without its prompt, or flags of prior preservation without it.
    """

    instance_data_dir: str | None = flag(None, "DreamBooth: a folder of images of one subject, without captions.")
    instance_prompt: str | None = flag(None, "The caption of all these images, such as 'a photo of sks dog'.")
    with_prior_preservation: bool = flag(
        False,
        "Prior preservation: with each image also train on one of its class, which the model draws itself where the "
        "folder has too few.",
    )
    class_data_dir: str | None = flag(None, "Folder of the class images.")
    class_prompt: str | None = flag(
        None, "Prompt that class images are drawn from, and their caption, such as 'a photo of a dog'."
    )
    num_class_images: int | None = flag(None, "Number of class images; 100 when left out.")
    sample_batch_size: int | None = flag(None, "Class images drawn at once; 4 when left out.")
    prior_generation_precision: str | None = flag(
        None,
        "Precision that class images are drawn in; --mixed_precision when left out.",
        choices=["no", "fp32", "fp16", "bf16"],
    )
    prior_loss_weight: float | None = flag(None, "Weight of the class images' loss; 1 when left out.")

    def __post_init__(self) -> None:
        self.asked_to_cache = bool(self.cache_latents)
        super().__post_init__()
        numbers = {"num_class_images": AT_LEAST_ONE, "sample_batch_size": AT_LEAST_ONE}
        check_numbers(self, {**numbers, "prior_loss_weight": NOT_NEGATIVE})
        self._check_instance()
        self._check_prior()

    def uncached(self, why: str) -> DreamBoothArguments:
        """These, with nothing encoded in advance, which `why` rules out.

        Raises:
            UserError: it is asked for.
        """
        if self.asked_to_cache:
            raise UserError(f"--cache_latents encodes each image once, but {why}: drop it")
        return changed(self, cache_latents=False)

    @property
    def prior(self) -> Prior | None:
        """None without prior preservation."""
        if not self.with_prior_preservation:
            return None
        weight = 1.0 if self.prior_loss_weight is None else self.prior_loss_weight
        return Prior(
            Path(self.class_data_dir or ""), self.class_prompt or "", self.num_class_images or 100,
            self.sample_batch_size or 4, self.prior_generation_precision, weight,
        )  # fmt: skip

    def _check_instance(self) -> None:
        if self.instance_data_dir is None:
            if self.instance_prompt is not None:
                raise UserError(
                    "--instance_prompt is the caption of the images in --instance_data_dir, which is missing; those "
                    "of other sources have captions of their own"
                )
            return
        other = "dataset_name" if self.dataset_name is not None else "train_data_dir"
        if getattr(self, other) is not None:
            raise UserError(f"--instance_data_dir and --{other} are two sources of images; give one of them")
        if not (self.instance_prompt or "").strip():
            raise UserError(
                f"--instance_data_dir {self.instance_data_dir}: what does it show? add --instance_prompt, such as "
                "'a photo of sks dog'"
            )

    def _check_prior(self) -> None:
        given = [name for name in _PRIOR if getattr(self, name) is not None]
        if not self.with_prior_preservation:
            if given:
                raise UserError(
                    f"--{given[0]} belongs to prior preservation: add --with_prior_preservation, or drop it"
                )
            return
        for name in ("class_data_dir", "class_prompt"):
            if not (getattr(self, name) or "").strip():
                raise UserError(
                    f"--with_prior_preservation needs --{name}: "
                    + ("a folder for images of the class" if "dir" in name else "such as 'a photo of a dog'")
                )
        if self.aspect_ratio_buckets is not None:
            raise UserError(
                "--aspect_ratio_buckets and --with_prior_preservation: a subject's image and one of its class are of "
                "one size, in one batch; drop one of them"
            )
        for name in ("instance_data_dir", "train_data_dir"):
            folder = getattr(self, name)
            if folder is not None and os.path.realpath(folder) == os.path.realpath(self.class_data_dir or ""):
                raise UserError(
                    f"--class_data_dir {self.class_data_dir} is --{name} as well; give a folder of its own"
                )


def load_instance(args: DreamBoothArguments, resolution: int) -> Dataset:
    """Rows of `image` and `text` of what is taught: the subject's folder, or what `load_captioned` finds.

    Raises:
        UserError: as `load_captioned`.
    """
    if args.instance_data_dir is None:
        return load_captioned(args, resolution)
    images = images_in("--instance_data_dir", Path(args.instance_data_dir))
    if not images:
        raise UserError(f"--instance_data_dir {args.instance_data_dir}: there is no image in it")
    return _rows(images, str(args.instance_prompt), "--instance_data_dir", args)


def load_class(prior: Prior, args: DreamBoothArguments) -> Dataset:
    """Rows of `image` and `text` of the class: the first `prior.images` of the folder, in the order of their names.

    Raises:
        UserError: one cannot be read and `skip_bad_images` is off, or none is left.
    """
    images = images_in("--class_data_dir", prior.folder)[: prior.images]
    return _rows(images, prior.prompt, "--class_data_dir", args, subject=False)


def images_in(flag: str, folder: Path) -> list[Path]:
    """The image files of `folder`, not of those below it (see `image_files`).

    Raises:
        UserError: there is no such folder, or it may not be read.
    """
    try:
        return image_files(folder, below=False)
    except (OSError, ValueError) as error:  # ValueError: a null in the name
        reason = "no such directory" if isinstance(error, FileNotFoundError) else one_line(error)
        raise UserError(f"{flag} {folder}: {reason}") from error


def missing_class_images(prior: Prior) -> dict[int, Path]:
    """What of the class is still to be drawn: numbers and files.

    Image i always goes to the same file, so that of a run that was killed, or of several ranks, only the gaps are
    filled. Images of one's own, under any other name, count as well.

    Raises:
        UserError: the folder cannot be made, or holds images that were drawn for another prompt.
    """
    try:
        prior.folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise UserError(f"--class_data_dir {prior.folder} cannot be made ({one_line(error)})") from error
    there = set(images_in("--class_data_dir", prior.folder))
    drawn = {index: prior.folder / f"class-{index:05}.png" for index in range(prior.images)}
    for path in sorted(there & set(drawn.values())):
        _refuse_another_prompt(path, prior)
    wanted = prior.images - len(there - set(drawn.values()))
    return {index: path for index, path in drawn.items() if index < wanted and path not in there}


def save_class_image(image: Image.Image, prior: Prior, path: Path) -> None:
    """Write `image` and what it was drawn for."""
    from PIL.PngImagePlugin import PngInfo

    about = PngInfo()
    about.add_itxt(_KEY, prior.prompt)
    image.save(path, pnginfo=about)


def _refuse_another_prompt(path: Path, prior: Prior) -> None:
    try:
        with Image.open(path) as image:
            prompt = image.info.get(_KEY, prior.prompt)
    except UNDECODABLE:  # it is named when the rows are read
        return
    if prompt != prior.prompt:
        raise UserError(
            f"--class_data_dir {prior.folder}: {path.name} was drawn for '{prompt}', not for --class_prompt "
            f"'{prior.prompt}'; give another folder, or that prompt"
        )


def _rows(images: list[Path], prompt: str, flag: str, args: DreamBoothArguments, subject: bool = True) -> Dataset:
    from datasets import Dataset
    from datasets import Image as ImageFeature

    rows = Dataset.from_dict({"image": list(map(str, images)), "text": [prompt] * len(images)})
    rows = rows.cast_column("image", ImageFeature(decode=False))
    source = f"{flag} {images[0].parent}" if images else flag
    return readable(first_rows(rows, args) if subject else rows, source, skip=args.skip_bad_images)
