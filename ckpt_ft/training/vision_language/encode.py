"""Conversations about images to what a model takes: tokens and labels once, ahead; pixels whenever a row is fetched.

The model's own processor decides how many tokens an image has. A conversation is cut where the assistant's turns begin
and end, as in text/encode.py; a piece with images goes through the processor, one without through its tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from ckpt_ft.errors import UserError, one_line
from ckpt_ft.training.text.encode import IGNORED, PadCollator, chat_segments, one_after_another
from ckpt_ft.training.text.packing import pack
from ckpt_ft.workloads.packing import ImagePositions

from .cross_attention import MASK, check_images_in_all, cross_attention_mask
from .rows import Cell, Pictures, conversation
from .stamp import stamp_of

if TYPE_CHECKING:
    from datasets import Dataset, Features
    from transformers import ProcessorMixin

    from .arguments import VisionLanguageArguments

TOKENS = ("input_ids", "labels", "attention_mask", "token_type_ids", "mm_token_type_ids")  # one for each token
KINDS = TOKENS[3:]  # which tokens are an image's, as some models ask
_LAYOUT = 3  # raise it when rows are encoded to something else: datasets keeps what they were encoded to


def encode_conversations(
    rows: Dataset, processor: ProcessorMixin, pictures: Pictures, args: VisionLanguageArguments
) -> Dataset:
    """`rows` as `input_ids`, `labels` and the number of `pixels`; in a row that is fetched, `images` are tensors.

    Every image is read once. Rows whose images do not fit in `max_length` or that have no answer in it are left out.
    Packed rows have `position_ids` as well.

    Raises:
        UserError: a row is no conversation, an image cannot be used, nothing is left to train on, or some rows have no
            image and the model takes none of those beside the others.
    """
    encoded = rows.map(
        _Encoder(processor, pictures, args.max_length, stamp_of(rows, pictures.folder)),
        with_indices=True,
        batched=True,
        batch_size=16,  # pictures at a time
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
    if len(encoded) < len(rows):
        left_out = len(rows) - len(encoded)
        print(f"{left_out} of {len(rows)} rows are left out: nothing to learn within --max_length {args.max_length}")
    check_images_in_all(processor, encoded["pixels"])
    if args.packing:
        encoded = encoded.map(
            pack,
            batched=True,
            batch_size=1_000,  # with what they have of images
            fn_kwargs={"max_length": args.max_length},
            features=_features(packed=True),
            desc="Packing",
        )
    return encoded.with_transform(_WithPixels(processor, pictures))


def _features(packed: bool = False) -> Features:
    from datasets import Features, List, Value

    along = ("input_ids", "labels", *KINDS, *(("position_ids",) if packed else ()))
    tokens = {name: List(Value("int64")) for name in along}
    images = List(List({"bytes": Value("binary"), "path": Value("string")}))
    return Features(**tokens, text=List(Value("string")), images=images, pixels=Value("int64"), length=Value("int64"))


@dataclass
class _Encoder:
    """Picklable, so that `datasets` can run it in other processes and recognise it in its cache.

    files: what those of the images were when this was made.
    """

    processor: ProcessorMixin
    pictures: Pictures
    max_length: int
    files: str
    made: int = _LAYOUT

    def __call__(self, batch: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        encoded: dict[str, list[Any]] = {name: [] for name in _features()}
        for position, index in enumerate(indices):
            row = self._row({column: values[position] for column, values in batch.items()}, index)
            if row is not None:
                for name, values in encoded.items():
                    values.append(row[name])
        return encoded

    def _row(self, row: dict[str, Any], index: int) -> dict[str, Any] | None:
        """The encoded row; None where it has nothing to learn."""
        place = f"row {index + 1}"
        talk = conversation(row, place)
        segments = chat_segments(talk.messages, 0, self.processor, index)
        tokens: dict[str, list[int]] = {name: [] for name in ("input_ids", "labels", *KINDS)}
        if beginning := self._beginning(segments[0][0]):
            _extend(tokens, {"input_ids": beginning}, trained=False)
        images, pixels, seen = list(talk.images), 0, 0
        for (text, trained), count in zip(segments, _images_of(talk.messages), strict=True):
            cells, images = images[:count], images[count:]
            made = self._piece(text, cells, place)
            pixels += sum(value.numel() for name, value in made.items() if name not in TOKENS)
            _extend(tokens, {name: value for name, value in made.items() if name in TOKENS}, trained)
            seen = len(tokens["input_ids"]) if count else seen
        labels = tokens["labels"][: self.max_length]
        labels[:1] = [IGNORED]  # it is predicted from nothing, or in a packed sequence from another row
        if seen > self.max_length or all(label == IGNORED for label in labels):
            return None
        cut = {name: values[: self.max_length] for name, values in tokens.items()}
        whole = "".join(text for text, _ in segments)
        return {
            **cut, "labels": labels, "text": [whole], "images": [talk.images], "pixels": pixels, "length": len(labels),
        }  # fmt: skip

    def _beginning(self, text: str) -> list[int]:
        """What the tokenizer puts before every text, where the chat template has not."""
        tokenizer: Any = self.processor.tokenizer
        bos = tokenizer.bos_token
        return (
            []
            if bos is None or text.startswith(bos) or bos not in tokenizer("").tokens()
            else [tokenizer.bos_token_id]
        )

    def _piece(self, text: str, cells: list[Cell], place: str) -> dict[str, Any]:
        word = getattr(self.processor, "image_token", None)
        if word and text.count(word) > len(cells):
            raise UserError(f"{place}: its text holds {word}, which stands for an image to this model; take it out")
        if cells:
            return self._as_written(text, processed(self.processor, text, cells, self.pictures, place))
        tokenizer: Any = self.processor.tokenizer
        return {"input_ids": tokenizer(text, add_special_tokens=False).input_ids}

    def _as_written(self, text: str, made: dict[str, Any]) -> dict[str, Any]:
        """`made` without the token that begins a text, where the processor (Llama 3.2 Vision's) has put one in."""
        tokenizer: Any = self.processor.tokenizer
        bos = tokenizer.bos_token
        if bos is None or bos in text:
            return made
        kept = [at for at, token in enumerate(made["input_ids"]) if token != tokenizer.bos_token_id]
        return {name: [value[at] for at in kept] if name in TOKENS else value for name, value in made.items()}


def processed(
    processor: ProcessorMixin, text: str, cells: list[Cell], pictures: Pictures, place: str
) -> dict[str, Any]:
    """What the processor makes of a text and its images: lists for the `TOKENS`, tensors of pixels for the rest.

    Raises:
        UserError: an image cannot be used, or the processor refuses it.
    """
    images = [pictures.open(cell, place) for cell in cells]
    try:
        made = processor(text=[text], images=[images], return_tensors="pt", add_special_tokens=False)
    except (ValueError, TypeError, IndexError, ZeroDivisionError) as error:
        raise UserError(f"{place}: the model's processor refuses its images: {one_line(error, 200)}") from error
    return {name: value[0].tolist() if name in TOKENS else value for name, value in made.items()}


def _extend(tokens: dict[str, list[int]], piece: dict[str, list[int]], trained: bool) -> None:
    ids = piece["input_ids"]
    nothing = [0] * len(ids)
    tokens["input_ids"] += ids
    tokens["labels"] += ids if trained else [IGNORED] * len(ids)
    for name in KINDS:
        tokens[name] += piece.get(name, nothing)


def _images_of(messages: list[dict[str, Any]]) -> list[int]:
    """How many images stand in each segment of a conversation: in what is before an answer, in it, and in the rest."""
    counts = [0]
    for message in messages:
        if message["role"] == "assistant":
            counts += [0, 0]
        counts[-1] += sum(part["type"] == "image" for part in message["content"])
    return counts


@dataclass
class _WithPixels:
    """What rows are fetched with: their tokens, and in place of their images what the processor makes of them."""

    processor: ProcessorMixin
    pictures: Pictures

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        if "images" not in batch:
            return batch  # a column for itself
        rows = [zip(*row, strict=True) for row in zip(batch["text"], batch["images"], strict=True)]
        return {**batch, "images": [images_of(self._tensors(*part) for part in row) for row in rows]}

    def _tensors(self, text: str, cells: list[Cell]) -> dict[str, torch.Tensor]:
        if not cells:
            return {}
        made = processed(self.processor, text, cells, self.pictures, "a row that was read before")
        return {name: value for name, value in made.items() if name not in TOKENS}


@dataclass
class PixelCollator:
    """Rows to one batch: tokens padded to the longest, `(batch, longest)`, and all images after one another.

    kinds: of `KINDS`, those that the model takes. beside: the positions that it takes of packed rows besides those
    along the tokens. in_one: as `PadCollator`'s. image_token: stands for an image, where there is cross-attention.
    """

    pad_token_id: int
    kinds: tuple[str, ...]
    beside: ImagePositions | None = None
    in_one: bool = False
    image_token: int = -1

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        images = images_of(row["images"] for row in rows)
        packed = "position_ids" in rows[0]
        if packed and self.in_one:
            rows = [one_after_another(rows, ("input_ids", "labels", "position_ids", *self.kinds))]
        batch = PadCollator(self.pad_token_id)(rows)
        longest = batch["input_ids"].shape[1]
        for name in self.kinds:
            batch[name] = torch.tensor([row[name] + [0] * (longest - len(row[name])) for row in rows])
        batch |= images
        if MASK in batch:
            batch[MASK] = cross_attention_mask(batch["input_ids"], batch["aspect_ratio_mask"], self.image_token)
        if packed and self.beside is not None:
            batch["position_ids"] = self.beside.beside(batch)
        return batch


def images_of(parts: Iterable[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The tensors of several rows' images, those of rows that have some after one another."""
    seen = [part for part in parts if part]
    return {name: joined([part[name] for part in seen]) for name in (seen[0] if seen else ())}


def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    """One after the other along the first dimension; along the others the smaller ones are padded with zeros, as the
    processors do themselves."""
    largest = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    return torch.cat([pad(tensor, _missing(tensor, largest)) for tensor in tensors])


def _missing(tensor: torch.Tensor, largest: list[int]) -> list[int]:
    """As `pad` wants it: (before, after) of the last dimension first."""
    return [n for have, want in reversed([*zip(tensor.shape[1:], largest, strict=True)]) for n in (0, want - have)]
