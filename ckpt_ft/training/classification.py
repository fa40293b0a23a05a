"""Image classification: labelled images, what the model is shown of them, and the classifier itself.

Images come from the Hub, from a folder of class folders, or are drawn shapes. In training they are cropped at random
and mirrored; in evaluation the model's own processor frames them. Random crops follow Szegedy et al. 2014
(arXiv:1409.4842, section 6): a share of the area and an aspect ratio are drawn. Bad input raises
UserError, one line that names the folder, the row or the class.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from annotated_types import Ge, Interval
from datasets import Dataset
from PIL import Image, ImageOps
from torch import Tensor, nn
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    PreTrainedModel,
    ResNetConfig,
    ResNetForImageClassification,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    default_data_collator,
)

from ckpt_ft.errors import UserError
from ckpt_ft.training.flags import Pixels, SplitArguments, changed, flag
from ckpt_ft.training.images import named_columns, open_image, readable, undecoded
from ckpt_ft.training.labels import check_classes, class_names, labelled, settings_of
from ckpt_ft.training.models import ModelArguments, load_pretrained, with_adapters
from ckpt_ft.training.samples.drawings import drawn_shapes
from ckpt_ft.training.text import load_rows
from ckpt_ft.validation import library_reads
from ckpt_ft.workloads.adapters import without_adapters
from ckpt_ft.workloads.workload import BATCH_NORMS, has_batch_norm

Row = dict[str, Any]
_SHAPES_HELD_OUT = 512
_SHAPES_RESOLUTION = 40  # pixels as drawn; the model's own resolution decides what it is shown
_BUILT_IN_SIDE = 32
_ASPECTS = (3 / 4, 4 / 3)  # width / height of a crop before it is made square
_CROP_TRIES = 10


@dataclass
class VisionArguments(SplitArguments):
    """The labelled images to train on, and how the model is shown them."""

    dataset_name: str | None = flag(
        None,
        "Hub id, or a local folder with a folder of images per class, optionally inside a folder per split; without "
        "it, drawn shapes.",
    )
    image_column: str = flag("image", "Column of images of a Hub dataset.")
    label_column: str = flag("label", "Column of classes of a Hub dataset.")
    max_train_samples: Annotated[int, Ge(2)] | None = flag(None, "Train on only this many images, drawn at random.")
    skip_bad_images: bool = flag(False, "Leave out images that cannot be read.")
    resolution: Pixels | None = flag(None, "Pixels of a side; by default the model's own.")
    augment: bool = flag(True, "Train on random crops that are mirrored half of the time (--no_augment).")
    min_crop: Annotated[float, Interval(gt=0, le=1)] = flag(
        0.25, "The least share of an image's area that a crop shows."
    )


def load_images(args: VisionArguments, *, evaluate: bool, seed: int) -> tuple[Dataset, Dataset | None, list[str]]:
    """Returns the training rows of `image` (undecoded) and `label`, the evaluation rows, and the classes' names."""
    source = args.dataset_name or "drawn shapes"
    if args.dataset_name is None:
        splits = _drawn(args, evaluate, seed)
    else:
        columns = ("image_column", args.image_column, "image"), ("label_column", args.label_column, "label")
        loaded = load_rows(args, evaluate=evaluate, seed=seed)
        splits = [named_columns(rows, source, *columns) for rows in loaded if rows is not None]
    splits = [undecoded(rows) for rows in splits]
    if args.max_train_samples is not None:
        splits[0] = splits[0].shuffle(seed=seed).select(range(min(args.max_train_samples, len(splits[0]))))
    names = class_names(splits[0], source)
    splits = [readable(labelled(rows, names, source), source, skip=args.skip_bad_images) for rows in splits]
    check_classes(splits[0]["label"], names, source)
    return splits[0], splits[1] if evaluate else None, names


def _drawn(args: VisionArguments, evaluate: bool, seed: int) -> list[Dataset]:
    shapes = drawn_shapes(resolution=_SHAPES_RESOLUTION).select_columns(["image", "label"])
    if evaluate and args.test_split_size is None:
        return [shapes.select(range(_SHAPES_HELD_OUT, len(shapes))), shapes.select(range(_SHAPES_HELD_OUT))]
    return [*args.hold_out(shapes, seed)] if evaluate else [shapes]


class ImageRows:
    """A map-style dataset of `pixel_values` (3, resolution, resolution) and `labels`, from rows of undecoded images.

    Random crops depend on the seed, the epoch and the row alone: not on workers, ranks, or where a run was resumed.

    Args:
        rows: columns `image` and `label`.
        resolution: pixels of a side; None leaves the size to the processor.
        min_crop: least share of the area that a random crop shows; None for no augmentation.
    """

    def __init__(
        self, rows: Dataset, processor: Any, resolution: int | None, min_crop: float | None = None, seed: int = 0
    ) -> None:
        self.rows, self.processor, self.resolution = rows, processor, resolution
        self.min_crop, self.seed = min_crop, seed
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # persistent workers must see it change

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

    def pixels(self, image: Image.Image) -> Tensor:
        """Normalises `image` at the resolution; a random crop is scaled to it, another image is framed."""
        options = {}
        if self.resolution is not None:
            fit = Image.Image.resize if self.min_crop is not None else ImageOps.fit
            image = fit(image, (self.resolution, self.resolution), Image.Resampling.BICUBIC)
            options = {"do_resize": False, "do_center_crop": False}
        return self.processor(image, return_tensors="pt", **options)["pixel_values"][0]


def random_crop(image: Image.Image, min_area: float, draw: random.Random) -> Image.Image:
    """Crops at least `min_area` of the area at an aspect ratio from 3:4 to 4:3; the middle square if none fits."""
    width, height = image.size
    for _ in range(_CROP_TRIES):
        area = draw.uniform(min_area, 1) * width * height
        aspect = math.exp(draw.uniform(math.log(_ASPECTS[0]), math.log(_ASPECTS[1])))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = draw.randint(0, width - w), draw.randint(0, height - h)
            return image.crop((left, top, left + w, top + h))
    side = min(width, height)
    return ImageOps.fit(image, (side, side))


def new_crops_each_epoch(rows: ImageRows) -> TrainerCallback:
    """Returns a callback that sets the epoch of `rows`.

    Trainer's data loaders call a `set_epoch`, but not on several ranks, nor after a resume.
    """

    class NewCropsEachEpoch(TrainerCallback):
        def on_epoch_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
            rows.epoch.fill_(int(state.epoch or 0))

    return NewCropsEachEpoch()


def collate(rows: Sequence[Row], **extra: Any) -> Row:
    """Batches rows to `pixel_values` (N, 3, H, W) and `labels` (N,), with `extra` arguments of the model."""
    return {**default_data_collator(list(rows)), **extra}


def load_classifier(args: ModelArguments, names: list[str]) -> PreTrainedModel:
    """Returns a model with one output per class; a pretrained head of another size is replaced, which is logged.

    With adapters all weights are frozen except the head and BatchNorm. Both are saved whole beside the adapters:
    BatchNorm's statistics change in training, and an adapter without them would predict something else.
    """
    classes = settings_of(names)
    if args.model_name_or_path is None:
        # A ResNet of basic blocks (He et al. 2015, arXiv:1512.03385), which learns the drawn shapes fast on a CPU.
        model: Any = ResNetForImageClassification(
            ResNetConfig(
                embedding_size=16, hidden_sizes=[16, 32, 64, 128], depths=[1, 1, 1, 1], layer_type="basic", **classes
            )
        )
    else:
        model = load_pretrained(args, AutoModelForImageClassification, ignore_mismatched_sizes=True, **classes)
    if not args.adapts:
        return model
    head = next(name for name, _ in reversed(list(model.named_children())) if name != model.base_model_prefix)
    norms = [name for name, module in model.named_modules() if isinstance(module, BATCH_NORMS)]
    layers = _adaptable_layers(model, head)
    return with_adapters(model, args, targets=lambda given: given or layers, modules_to_save=[head, *norms])


def _adaptable_layers(model: nn.Module, head: str) -> list[str]:
    """Returns the layers outside the head that get an adapter by default: linear ones, or a CNN's convolutions."""
    body = [(name, module) for name, module in model.named_modules() if not f"{name}.".startswith(f"{head}.")]
    linear = [name for name, module in body if isinstance(module, nn.Linear)]
    return linear or [name for name, module in body if isinstance(module, nn.Conv2d) and module.groups == 1]


def load_processor(args: ModelArguments) -> Any:
    """Returns the model's image processor: its size, scaling and normalisation."""
    if args.model_name_or_path is None:
        from transformers import ViTImageProcessor  # says so where it finds no torchvision

        return ViTImageProcessor(size={"height": _BUILT_IN_SIDE, "width": _BUILT_IN_SIDE})
    with library_reads(f"model {args.model_name_or_path}: no image processor can be loaded"):
        return AutoImageProcessor.from_pretrained(args.model_name_or_path, **args.source)


def own_resolution(processor: Any) -> int:
    size = (getattr(processor, "do_center_crop", None) and processor.crop_size) or processor.size or {}
    for key in ("height", "shortest_edge"):
        if size.get(key):
            return int(size[key])
    raise UserError("the model's image processor has no size; give --resolution")


def position_arguments(model: Any, resolution: int | None) -> dict[str, Any]:
    """Returns the arguments that make `model` interpolate its position embeddings to `resolution`, if it must."""
    base = without_adapters(model)
    own = getattr(base.config, "image_size", None)
    if resolution is None or own in (None, resolution, [resolution, resolution]):
        return {}
    if "interpolate_pos_encoding" in inspect.signature(base.forward).parameters:
        print(f"position embeddings of {own} pixels are interpolated to --resolution {resolution}", flush=True)
        return {"interpolate_pos_encoding": True}
    return {}


def check_batch_norm(model: nn.Module, args: TrainingArguments, count: int) -> TrainingArguments:
    """Returns `args` with `dataloader_drop_last` if the last of `count` images were alone in a batch of BatchNorm."""
    if not has_batch_norm(model) or args.world_size > 1 or count % args.train_batch_size != 1:
        return args
    print(f"each epoch leaves out the last of {count} images: BatchNorm cannot train on a batch of one", flush=True)
    return changed(args, dataloader_drop_last=True)
