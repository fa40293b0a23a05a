"""Encodes conversations about images: tokens and labels once, in advance; pixels whenever a row is fetched.

The model's own processor decides how many tokens an image has. A conversation is cut where the assistant's turns begin
and end, as in text/encode.py. Pieces with images go through the processor, pieces without go through its tokenizer.
Bad input raises UserError, one line that names the row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from torch.nn.functional import pad

from ckpt_ft.errors import UserError, one_line
from ckpt_ft.training.text.data import row_number
from ckpt_ft.training.text.encode import (
    IGNORED,
    PadCollator,
    chat_segments,
    flattened,
    pack,
    warn_of_cut_rows,
)
from ckpt_ft.workloads.batches import ImagePositions

from .conversations import Cell, ImageLoader, VisionLanguageArguments, conversation, image_files_digest

if TYPE_CHECKING:
    from datasets import Dataset, Features
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

TOKENS = ("input_ids", "labels", "attention_mask", "token_type_ids", "mm_token_type_ids")  # one value per token
TOKEN_TYPES = TOKENS[3:]  # mark image tokens; some models take them
CROSS_ATTENTION_MASK = "cross_attention_mask"
_ENCODING_VERSION = 4  # part of the cache key of `datasets`: raise it when rows are encoded differently


def encode_conversations(
    rows: Dataset, processor: ProcessorMixin, images: ImageLoader, args: VisionLanguageArguments
) -> Dataset:
    """Returns `rows` as `input_ids`, `labels` and the number of `pixels`; fetched rows have `images` as tensors.

    Every image is read once. Rows whose images or whose answers do not fit into `max_length` are left out. A warning
    says how many rows are cut or left out. Packed rows also have `position_ids`.
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
    encoded = encoded.remove_columns("cut")
    _check_cross_attention(processor, encoded["pixels"])
    if args.packing:
        encoded = encoded.map(
            pack,
            batched=True,
            batch_size=1_000,  # rows hold their images' bytes
            fn_kwargs={"max_length": args.max_length},
            features=_features(packed=True),
            desc="Packing",
        )
    return encoded.with_transform(_WithPixels(processor, images))


def _features(packed: bool = False) -> Features:
    from datasets import Features, List, Value

    per_token = ("input_ids", "labels", *TOKEN_TYPES, *(("position_ids",) if packed else ()))
    numbers = ("pixels", "length", *(() if packed else ("cut",)))
    return Features(
        **{name: List(Value("int64")) for name in per_token},
        text=List(Value("string")),
        images=List(List({"bytes": Value("binary"), "path": Value("string")})),
        **{name: Value("int64") for name in numbers},
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
        talk = conversation(row, place)
        segments = chat_segments(talk.messages, 0, self.processor, place)
        tokens: dict[str, list[int]] = {name: [] for name in ("input_ids", "labels", *TOKEN_TYPES)}
        _extend(tokens, {"input_ids": self._bos(segments[0][0])}, trained=False)
        images, pixels, image_end = list(talk.images), 0, 0
        for (text, trained), count in zip(segments, _images_per_segment(talk.messages), strict=True):
            cells, images = images[:count], images[count:]
            piece = self._piece(text, cells, place)
            pixels += sum(value.numel() for name, value in piece.items() if name not in TOKENS)
            _extend(tokens, {name: value for name, value in piece.items() if name in TOKENS}, trained)
            image_end = len(tokens["input_ids"]) if count else image_end
        labels = tokens["labels"][: self.max_length]
        labels[:1] = [IGNORED]  # no token of this row predicts the first one
        if image_end > self.max_length or all(label == IGNORED for label in labels):
            return None
        return {
            **{name: values[: self.max_length] for name, values in tokens.items()},
            "labels": labels,
            "text": ["".join(text for text, _ in segments)],
            "images": [talk.images],
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
        word, bos = getattr(self.processor, "image_token", None), tokenizer.bos_token
        if word and text.count(word) > len(cells):
            raise UserError(f"{place}: its text holds {word}, which stands for an image to this model; take it out")
        if not cells:
            return {"input_ids": tokenizer(text, add_special_tokens=False).input_ids}
        made = processed(self.processor, text, cells, self.images, place)
        if bos is None or bos in text:
            return made
        # Llama 3.2 Vision's processor puts a token in front that is not in the text.
        kept = [at for at, token in enumerate(made["input_ids"]) if token != tokenizer.bos_token_id]
        return {name: [value[at] for at in kept] if name in TOKENS else value for name, value in made.items()}


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


def _extend(tokens: dict[str, list[int]], piece: dict[str, list[int]], trained: bool) -> None:
    ids = piece["input_ids"]
    zeros = [0] * len(ids)
    tokens["input_ids"] += ids
    tokens["labels"] += ids if trained else [IGNORED] * len(ids)
    for name in TOKEN_TYPES:
        tokens[name] += piece.get(name, zeros)


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
        positions: computes the positions of packed rows for models whose images have positions of their own.
        in_one: as in `PadCollator`.
        image_token: the image token of a model with cross-attention.
    """

    pad_token_id: int
    token_types: tuple[str, ...]
    positions: ImagePositions | None = None
    in_one: bool = False
    image_token: int = -1

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        images = concatenated_images(row["images"] for row in rows)
        packed = "position_ids" in rows[0]
        if packed and self.in_one:
            rows = [flattened(rows, ("input_ids", "labels", "position_ids", *self.token_types))]
        batch = PadCollator(self.pad_token_id)(rows)
        longest = batch["input_ids"].shape[1]
        for name in self.token_types:
            batch[name] = torch.tensor([row[name] + [0] * (longest - len(row[name])) for row in rows])
        batch |= images
        if CROSS_ATTENTION_MASK in batch:
            batch[CROSS_ATTENTION_MASK] = cross_attention_mask(
                batch["input_ids"], batch["aspect_ratio_mask"], self.image_token
            )
        if packed and self.positions is not None:
            batch["position_ids"] = self.positions.compute(batch)
        return batch


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


def cross_attention_mask(input_ids: torch.Tensor, tiles: torch.Tensor, image_token: int) -> torch.Tensor:
    """Returns which tokens see which tiles of which image, (B, length, images, tiles), for Llama 3.2 Vision.

    The processor computes this mask from a whole text. Rows are cut, padded and generated from in parts, so it is
    computed here from the tokens, with the processor's own functions.

    Args:
        tiles: (B, images, tiles), 1 for the tiles that an image has.
    """
    from transformers.models.mllama import processing_mllama as mllama

    spans = [mllama.get_cross_attention_token_mask(ids, image_token) for ids in input_ids.tolist()]
    mask = mllama.convert_sparse_cross_attention_mask_to_dense(
        spans, tiles.sum(-1).tolist(), max_num_tiles=tiles.shape[-1], length=input_ids.shape[1]
    )
    return torch.from_numpy(mask)


def _check_cross_attention(processor: ProcessorMixin, pixels: Sequence[int]) -> None:
    """Raises UserError if a model with cross-attention would get batches of rows with and without images."""
    without = sum(not count for count in pixels)
    if CROSS_ATTENTION_MASK in processor.model_input_names and 0 < without < len(pixels):
        raise UserError(
            f"{without} of {len(pixels)} rows have no image: this model reads images by cross-attention, and takes "
            "no batch of rows with and without; leave them out, or train on them by themselves"
        )


def check_answers(count: int, evaluates: bool) -> None:
    """Raises UserError if `--answered` has no held-out rows, or several processes."""
    if count and not evaluates:
        raise UserError(f"--answered {count}: no rows are held out; add --eval_strategy and --test_split_size, say")
    if count and PartialState().num_processes > 1:
        raise UserError(f"--answered {count} is of one process; leave it out, and ask the saved model")


@dataclass
class Questions:
    """The last answer of each encoded row, to be generated from the tokens and images before it."""

    rows: Dataset
    tokenizer: PreTrainedTokenizerBase
    collate: Callable[[list[Any]], dict[str, Any]]

    def right(self, model: PreTrainedModel) -> int:
        """Returns how many answers `model` generates word for word, greedily."""
        training = model.training
        model.eval()
        try:
            return sum(self._answer(model, row) for row in self.rows)
        finally:
            model.train(training)

    @torch.no_grad()
    def _answer(self, model: PreTrainedModel, row: dict[str, Any]) -> bool:
        labels = row["labels"]
        end = max(at for at, label in enumerate(labels) if label != IGNORED) + 1
        begin = end - next(n for n, label in enumerate([*labels[:end][::-1], IGNORED]) if label == IGNORED)
        prompt = {name: value[:begin] if isinstance(value, list) else value for name, value in row.items()}
        batch = {name: value.to(model.device) for name, value in self.collate([prompt]).items() if name != "labels"}
        generated: Any = model.generate(
            **batch, max_new_tokens=end - begin, do_sample=False, use_cache=True,
            pad_token_id=self.tokenizer.pad_token_id,
        )  # fmt: skip
        return self._text(generated[0, begin:].tolist()) == self._text(labels[begin:end])

    def _text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True)).strip()
