"""Labelled images for a classifier: a Hub dataset, a folder of class folders, or the drawn shapes.

Only loading, labels and metrics; `augment.py` makes tensors of the images. Whatever is wrong with the data is one line
that names the folder, the row or the class.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt_ft.errors import UserError, one_line
from ckpt_ft.training.flags import PIXELS, Range, SplitArguments, check_numbers, flag

from .files import image_files, named_columns, readable
from .shapes import drawn_shapes

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import EvalPrediction

_SHAPES_HELD_OUT = 512
_SHAPES_RESOLUTION = 40  # as drawn; the model's own resolution decides what it is shown

_NUMBERS = {"max_train_samples": Range(2), "resolution": PIXELS, "min_crop": Range(0, 1, open=True)}


@dataclass
class VisionArguments(SplitArguments):
    """Which labelled images are trained on, and how they are shown to the model.

    Raises:
        UserError: a share, number or size that no dataset can have.
    """

    dataset_name: str | None = flag(
        None,
        "Hub id, or a local folder with a folder of images per class, perhaps below folders named as the splits; "
        "without it, drawn shapes.",
    )
    image_column: str = flag("image", "Column of images of a Hub dataset.")
    label_column: str = flag("label", "Column of classes of a Hub dataset.")
    max_train_samples: int | None = flag(None, "Train on only this many images, drawn at random.")
    skip_bad_images: bool = flag(False, "Leave out images that cannot be read.")
    resolution: int | None = flag(None, "Pixels of a side; by default the model's own.")
    augment: bool = flag(True, "Train on random crops that are mirrored half of the time (--no_augment).")
    min_crop: float = flag(0.25, "The least share of an image's area that a crop shows.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, _NUMBERS)


def load_images(args: VisionArguments, *, evaluate: bool, seed: int) -> tuple[Dataset, Dataset | None, list[str]]:
    """Rows of `image` (undecoded) and `label` to train on, those to evaluate on if asked, and the classes' names.

    Raises:
        UserError: the source cannot be found, read, or is empty, has fewer than two classes, or an image or label that
        cannot be used.
    """
    train, test = _load(args, evaluate)
    if evaluate and test is None:
        train, test = args.hold_out(train, seed)
    if args.max_train_samples is not None:
        train = train.shuffle(seed=seed).select(range(min(args.max_train_samples, len(train))))
    source = args.dataset_name or "drawn shapes"
    names = class_names(train, source)
    splits = [_labelled(rows, names, source) for rows in (train, test) if rows is not None]
    splits = [readable(rows, source, skip=args.skip_bad_images) for rows in splits]
    _check_classes(splits[0]["label"], names, source)
    return splits[0], splits[1] if len(splits) > 1 else None, names


def _load(args: VisionArguments, evaluate: bool) -> tuple[Dataset, Dataset | None]:
    """Train and test rows as they are; None for a test split that is to be held out."""
    own_test = evaluate and args.test_split_size is None
    if args.dataset_name is None:
        shapes = drawn_shapes(resolution=_SHAPES_RESOLUTION).select_columns(["image", "label"])
        train = shapes.select(range(_SHAPES_HELD_OUT, len(shapes))) if own_test else shapes
        return _undecoded(train), _undecoded(shapes.select(range(_SHAPES_HELD_OUT))) if own_test else None
    read = _folder if Path(args.dataset_name).is_dir() else _hub
    return read(args, args.dataset_train_split), read(args, args.dataset_test_split) if own_test else None


def _hub(args: VisionArguments, split: str) -> Dataset:
    from datasets import load_dataset

    name = args.dataset_name
    try:
        rows = load_dataset(name, args.dataset_config, split=split)
    except Exception as error:  # as its files are: readers of many formats raise what they like
        reason = one_line(error.__cause__ or error)
        where = "neither a local folder nor a dataset of the Hub that can be read from here"
        raise UserError(f"--dataset_name {name}: {where}: {reason}") from error
    rows = named_columns(
        rows, str(name), ("image_column", args.image_column, "image"), ("label_column", args.label_column, "label")
    )
    if len(rows) == 0:
        raise UserError(f"--dataset_name {name}: split '{split}' is empty")
    return _undecoded(rows)


def _folder(args: VisionArguments, split: str) -> Dataset:
    """`folder/split/class/*.png`, or to train on `folder/class/*.png`; read here, so that errors name the class."""
    from datasets import ClassLabel, Dataset, Features, Value
    from datasets import Image as ImageFeature

    top = Path(args.dataset_name or "")
    root = top / split
    if not root.is_dir():
        if split != args.dataset_train_split:
            raise UserError(
                f"--dataset_name {top}: no folder '{split}' in it to evaluate on; hold images out with "
                "--test_split_size 0.1, or name the folder with --dataset_test_split"
            )
        root = top
    images = {folder.name: image_files(folder) for folder in _visible(root) if folder.is_dir()}
    empty = [name for name, files in images.items() if not files]
    if not images:
        raise UserError(
            f"--dataset_name {root}: no class folders in it; put each class's images in a folder of its own"
        )
    if empty:
        raise UserError(f"--dataset_name {root}: no images in class folder {', '.join(empty)}; add some, or remove it")
    names = list(images)
    return Dataset.from_dict(
        {
            "image": [str(file) for files in images.values() for file in files],
            "label": [names.index(name) for name, files in images.items() for _ in files],
        },
        features=Features(image=Value("string"), label=ClassLabel(names=names)),
    ).cast_column("image", ImageFeature(decode=False))


def _visible(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _undecoded(rows: Dataset) -> Dataset:
    from datasets import Image as ImageFeature

    try:
        return rows.cast_column("image", ImageFeature(decode=False))
    except (TypeError, ValueError) as error:
        kind = rows.features["image"]
        raise UserError(f"the image column holds {kind}, which cannot be read as images") from error


def class_names(rows: Dataset, source: str) -> list[str]:
    """The classes in label order: as the dataset names them, else the values of its label column, sorted.

    Raises:
        UserError: labels that are neither whole numbers nor texts.
    """
    from datasets import ClassLabel

    feature = rows.features["label"]
    if isinstance(feature, ClassLabel):
        return list(feature.names)
    values = set(rows["label"])
    if None in values:
        raise UserError(f"{source}: row {list(rows['label']).index(None) + 1} has no label")
    if not all(isinstance(value, (int, str)) for value in values):
        raise UserError(f"{source}: labels are whole numbers or names, not {type(next(iter(values))).__name__}")
    return [str(value) for value in sorted(values)]


def _labelled(rows: Dataset, names: list[str], source: str) -> Dataset:
    """`rows` with labels as positions in `names`."""
    from datasets import ClassLabel, Value

    feature = rows.features["label"]
    own = feature.names if isinstance(feature, ClassLabel) else None
    place = {name: index for index, name in enumerate(names)}
    labels = []
    for row, value in enumerate(rows["label"], start=1):
        name = own[value] if own and value is not None and 0 <= value < len(own) else None if own else str(value)
        if name not in place:
            given = f"label {value}" if name is None or name == str(value) else f"class '{name}'"
            raise UserError(
                f"{source}: row {row} has {given}, but there are {len(names)} classes to train on ({_some(names)})"
            )
        labels.append(place[name])
    return rows.remove_columns("label").add_column("label", labels, feature=Value("int64"))


def _check_classes(labels: Iterable[int], names: list[str], source: str) -> None:
    """Two classes at least; those without an image are said: the model gets outputs for them that it never learns."""
    counts = Counter(labels)
    if len(counts) < 2:
        only = names[next(iter(counts))]
        raise UserError(f"{source}: every training image is of class '{only}'; a classifier needs at least 2 classes")
    missing = [name for index, name in enumerate(names) if index not in counts]
    if missing:
        print(f"{source}: {len(missing)} of {len(names)} classes have no training image: {_some(missing)}", flush=True)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def choose(logits: Any, labels: Any) -> Any:
    """`preprocess_logits_for_metrics`: class numbers instead of scores, so that evaluation keeps one int per image."""
    return logits.argmax(dim=-1)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """`compute_metrics` after `choose`: the share of images that are right, over all and averaged over classes."""
    chosen, labels = np.asarray(prediction.predictions), np.asarray(prediction.label_ids)
    right = chosen == labels
    each = [float(right[labels == label].mean()) for label in np.unique(labels)]
    return {"accuracy": float(right.mean()), "balanced_accuracy": float(np.mean(each))}
