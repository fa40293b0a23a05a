"""The vision-language model that conversations about images train, and their encoding for it.

Tokens and labels are made once, in advance; pixels whenever a row is fetched. The model's own processor decides how
many tokens an image has. A conversation is cut where the assistant's turns begin and end, as in text.py. Pieces with
images go through the processor, pieces without go through its tokenizer. Bad input raises UserError, one line that
names the row, the model, the dataset or the flag.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from datasets import Dataset, Features, List, Value
from torch.nn.functional import pad
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel, ProcessorMixin
from transformers.models.auto.video_processing_auto import AutoVideoProcessor
from transformers.utils import is_torchvision_available
from transformers.video_processing_utils import BaseVideoProcessor

from ckpt_ft.errors import UserError, one_line
from ckpt_ft.spec.defaults import TRAINED_TOWERS
from ckpt_ft.training.conversations import Cell, ImageLoader, VisionLanguageArguments, conversation, image_files_digest
from ckpt_ft.training.flags import flag
from ckpt_ft.training.models import ModelArguments, load_pretrained, with_adapters
from ckpt_ft.training.text import IGNORED, PadCollator, chat_segments, row_number, warn_of_cut_rows
from ckpt_ft.validation import library_reads
from ckpt_ft.workloads.adapters import TrainedTowers, without_adapters
from ckpt_ft.workloads.images import choose_size

TOKENS = ("input_ids", "labels", "attention_mask", "token_type_ids", "mm_token_type_ids")  # one value per token
TOKEN_TYPES = TOKENS[3:]  # mark image tokens; some models take them
_ENCODING_VERSION = 4  # part of the cache key of `datasets`: raise it when rows are encoded differently


@dataclass
class VisionLanguageModelArguments(ModelArguments):
    """The model, its precision, and which of its towers are trained."""

    train_towers: str = flag(
        "language",
        "Towers that are trained, or that get adapters; the others are frozen. Without --use_peft what lies between "
        "the towers is trained as well.",
        choices=list(TRAINED_TOWERS),
    )


def encode_conversations(
    rows: Dataset, processor: ProcessorMixin, images: ImageLoader, args: VisionLanguageArguments
) -> Dataset:
    """Returns `rows` as `input_ids`, `labels` and the number of `pixels`; fetched rows have `images` as tensors.

    Every image is read once. Rows whose images or whose answers do not fit into `max_length` are left out. A warning
    says how many rows are cut or left out.
    """
    encoded = rows.map(
        _Encoder(processor, images, args.max_length, image_files_digest(images.folder)),
        with_indices=True,
        batched=True,
        batch_size=16,  # rows whose images are in memory at once
        remove_columns=rows.column_names,
        features=_features(),
        num_proc=args.dataset_num_proc,
        desc="Looking through the images",
    )
    if len(encoded) == 0:
        raise UserError(
            f"none of the {len(rows)} rows has its images and a token to learn within --max_length {args.max_length}; "
            "raise it, or make the images smaller"
        )
    warn_of_cut_rows(sum(encoded["cut"]), len(rows) - len(encoded), len(rows), args.max_length)
    return encoded.remove_columns("cut").with_transform(_WithPixels(processor, images))


def _features() -> Features:
    return Features(
        **{name: List(Value("int64")) for name in ("input_ids", "labels", *TOKEN_TYPES)},
        text=List(Value("string")),
        images=List(List({"bytes": Value("binary"), "path": Value("string")})),
        **{name: Value("int64") for name in ("pixels", "length", "cut")},
    )


@dataclass
class _Encoder:
    """Encodes batches of rows. Picklable, so that `datasets` can run it in other processes and cache its results.

    Attributes:
        files: digest of the image files, part of the cache key.
    """

    processor: ProcessorMixin
    images: ImageLoader
    max_length: int
    files: str
    version: int = _ENCODING_VERSION

    def __call__(self, batch: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        encoded: dict[str, list[Any]] = {name: [] for name in _features()}
        for position, index in enumerate(indices):
            row = self._encode({column: values[position] for column, values in batch.items()}, index)
            if row is not None:
                for name, values in encoded.items():
                    values.append(row[name])
        return encoded

    def _encode(self, row: dict[str, Any], index: int) -> dict[str, Any] | None:
        """Returns the encoded row; None if it has no trained token."""
        place = f"row {row_number(row, index)}"
        messages, images = conversation(row, place)
        segments = chat_segments(messages, 0, self.processor, place)
        tokens: dict[str, list[int]] = {name: [] for name in ("input_ids", "labels", *TOKEN_TYPES)}
        _extend(tokens, {"input_ids": self._bos(segments[0][0])}, trained=False)
        pixels = image_end = first = 0
        for (text, trained), count in zip(segments, _images_per_segment(messages), strict=True):
            cells = images[first : first + count]
            first += count
            piece = self._piece(text, cells, place)
            pixels += sum(value.numel() for name, value in piece.items() if name not in TOKENS)
            _extend(tokens, piece, trained)
            image_end = len(tokens["input_ids"]) if count else image_end
        labels = tokens["labels"][: self.max_length]
        labels[:1] = [IGNORED]  # no token of this row predicts the first one
        if image_end > self.max_length or all(label == IGNORED for label in labels):
            return None
        return {
            **{name: values[: self.max_length] for name, values in tokens.items()},
            "labels": labels,
            "text": ["".join(text for text, _ in segments)],
            "images": [images],
            "pixels": pixels,
            "length": len(labels),
            "cut": int(len(tokens["labels"]) > self.max_length),
        }

    def _bos(self, text: str) -> list[int]:
        """Returns the token that the tokenizer puts before every text, unless the chat template wrote it."""
        tokenizer: Any = self.processor.tokenizer
        bos = tokenizer.bos_token
        written = bos is None or text.startswith(bos) or bos not in tokenizer("").tokens()
        return [] if written else [tokenizer.bos_token_id]

    def _piece(self, text: str, cells: list[Cell], place: str) -> dict[str, Any]:
        tokenizer: Any = self.processor.tokenizer
        word = getattr(self.processor, "image_token", None)
        if word and text.count(word) > len(cells):
            raise UserError(f"{place}: its text holds {word}, which stands for an image to this model; take it out")
        if not cells:
            return {"input_ids": tokenizer(text, add_special_tokens=False).input_ids}
        return processed(self.processor, text, cells, self.images, place)


def processed(
    processor: ProcessorMixin, text: str, cells: list[Cell], images: ImageLoader, place: str
) -> dict[str, Any]:
    """Returns what the processor makes of a text and its images: lists for `TOKENS`, tensors for the rest."""
    pictures = [images.open(cell, place) for cell in cells]
    try:
        made = processor(text=[text], images=[pictures], return_tensors="pt", add_special_tokens=False)
    except (ValueError, TypeError, IndexError, ZeroDivisionError) as error:
        raise UserError(f"{place}: the model's processor refuses its images: {one_line(error, 200)}") from error
    return {name: value[0].tolist() if name in TOKENS else value for name, value in made.items()}


def _extend(tokens: dict[str, list[int]], piece: dict[str, Any], trained: bool) -> None:
    ids = piece["input_ids"]
    tokens["input_ids"] += ids
    tokens["labels"] += ids if trained else [IGNORED] * len(ids)
    for name in TOKEN_TYPES:
        tokens[name] += piece.get(name, [0] * len(ids))


def _images_per_segment(messages: list[dict[str, Any]]) -> list[int]:
    """Returns the number of images in each segment of a conversation: before an answer, in it, and after the last."""
    counts = [0]
    for message in messages:
        if message["role"] == "assistant":
            counts += [0, 0]
        counts[-1] += sum(part["type"] == "image" for part in message["content"])
    return counts


@dataclass
class _WithPixels:
    """Replaces the images of fetched rows by the tensors that the processor makes of them."""

    processor: ProcessorMixin
    images: ImageLoader

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        if "images" not in batch:
            return batch  # another column alone
        rows = [zip(*row, strict=True) for row in zip(batch["text"], batch["images"], strict=True)]
        return {**batch, "images": [concatenated_images(self._tensors(*part) for part in row) for row in rows]}

    def _tensors(self, text: str, cells: list[Cell]) -> dict[str, torch.Tensor]:
        if not cells:
            return {}
        made = processed(self.processor, text, cells, self.images, "a row that was read before")
        return {name: value for name, value in made.items() if name not in TOKENS}


@dataclass
class ImageCollator:
    """Batches rows: tokens padded to the longest row, `(batch, longest)`, and all images concatenated.

    Attributes:
        token_types: those of `TOKEN_TYPES` that the model takes.
    """

    pad_token_id: int
    token_types: tuple[str, ...]

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        images = concatenated_images(row["images"] for row in rows)
        batch = PadCollator(self.pad_token_id)(rows)
        longest = batch["input_ids"].shape[1]
        for name in self.token_types:
            batch[name] = torch.tensor([row[name] + [0] * (longest - len(row[name])) for row in rows])
        return batch | images


def concatenated_images(parts: Iterable[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Concatenates the image tensors of several rows; rows without images are skipped."""
    seen = [part for part in parts if part]
    return {name: concatenated([part[name] for part in seen]) for name in (seen[0] if seen else ())}


def concatenated(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Concatenates along dimension 0; pads the other dimensions with zeros to the largest, as the processors do."""
    largest = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    missing = [[want - have for have, want in zip(tensor.shape[1:], largest, strict=True)] for tensor in tensors]
    padding = [[n for sides in reversed(each) for n in (0, sides)] for each in missing]  # of the last dimension first
    return torch.cat([pad(tensor, each) for tensor, each in zip(tensors, padding, strict=True)])


def load_processor(args: VisionLanguageModelArguments, data: VisionLanguageArguments) -> ProcessorMixin:
    """Returns the model's processor, set to the image size of the flags."""
    with library_reads(f"model {args.model_name_or_path}: no processor can be loaded"), without_videos():
        processor = AutoProcessor.from_pretrained(args.model_name_or_path, **args.source)
    if not hasattr(processor, "image_processor"):
        raise UserError(
            f"model {args.model_name_or_path}: its processor takes no images; recipes/llm.py trains on text"
        )
    if "cross_attention_mask" in processor.model_input_names:
        raise UserError(
            f"model {args.model_name_or_path} reads images by cross-attention (Llama 3.2 Vision), which this recipe "
            "does not train; `ckpt-ft run` puts a script that does under a policy"
        )
    tokenizer = processor.tokenizer
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    processor.chat_template = processor.chat_template or tokenizer.chat_template
    choose_size(processor.image_processor, data.max_pixels, data.longest_side)
    return processor


def load_model(args: VisionLanguageModelArguments, max_length: int = 0) -> PreTrainedModel:
    """Returns the model in train mode, with the other towers frozen; with adapters only the trained towers have them.

    max_length: tokens of the longest sequence, for `--rope_scaling`.
    """
    model = load_pretrained(args, AutoModelForImageTextToText, max_length)
    model.config.get_text_config().use_cache = False  # some models read this one; a Trainer sets the whole model's
    trained = TrainedTowers(model, args.train_towers)
    if args.adapts:
        by = f"--peft_config {args.peft_config}:" if args.peft_config else "--lora_target_modules"
        return with_adapters(model, args, targets=lambda given: trained.adapted_layers(given, by))
    trained.freeze_others()
    return model


def collator_of(model: Any, pad_token_id: int) -> ImageCollator:
    """Returns the collator of encoded rows for `model`, with the inputs that its forward takes."""
    taken = inspect.signature(without_adapters(model).forward).parameters
    return ImageCollator(pad_token_id, tuple(name for name in TOKEN_TYPES if name in taken))


class _VideoSettings(BaseVideoProcessor):
    """Stands in for a video processor without torchvision: keeps its settings, so that they are saved unchanged."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.settings = settings

    def to_dict(self) -> dict[str, Any]:
        return dict(self.settings)


@contextmanager
def without_videos() -> Iterator[None]:
    """Lets `AutoProcessor` load a processor of images and videos without torchvision, which only videos need."""
    if is_torchvision_available():
        yield
        return
    check = ProcessorMixin.check_argument_for_proper_class

    def checked(processor: ProcessorMixin, name: str, part: Any) -> Any:
        return _VideoSettings if isinstance(part, _VideoSettings) else check(processor, name, part)

    with (
        patch.object(AutoVideoProcessor, "from_pretrained", _VideoSettings.from_pretrained),
        patch.object(ProcessorMixin, "check_argument_for_proper_class", checked),
    ):
        yield


def check_all_have_images(rows: Dataset, train_towers: str) -> None:
    """Raises UserError if only the vision tower is trained and a row has no image."""
    without = sum(not count for count in rows.with_format(None)["pixels"])
    if train_towers == "vision" and without:
        raise UserError(
            f"--train_towers vision: {without} of {len(rows)} rows have no image, from which that tower learns "
            "nothing; leave them out, or train both towers"
        )
