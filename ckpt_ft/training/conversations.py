"""Conversations about images: their rows, and the files of their images.

A row has the layout of TRL, LLaMA-Factory and ms-swift: `messages` with a part `{"type": "image"}` (or the text
"<image>") for each image in the column `images`. An image part may name its own file instead. Bad input raises
UserError, one line that names the row, the dataset or the flag.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, List
from datasets import Image as ImageFeature
from PIL import Image

from ckpt_ft.errors import UserError
from ckpt_ft.training.flags import AtLeastOne, Count, Length, SplitArguments, flag
from ckpt_ft.training.images import image_files, named_columns, open_image
from ckpt_ft.training.text import LOADERS, ROW_NUMBER, load_rows

MARK = "<image>"  # an image in a text
PATH_KEYS = ("image", "path", "image_url", "url")  # keys of an image part that name its file
Cell = Mapping[str, Any]  # an undecoded image: `bytes` or `path`


@dataclass
class VisionLanguageArguments(SplitArguments):
    """The conversations about images to train on. The names are TRL's and the processors'."""

    dataset_name: str | None = flag(
        None, "Hub id, or a local directory or file (json, jsonl, parquet); without it, drawn pictures."
    )
    messages_column: str = flag("messages", "Column of conversations.")
    image_column: str = flag("images", "Column of each row's images: files, or images of the dataset; also one image.")
    image_folder: str | None = flag(None, "Folder of images that rows name by path; by default the dataset's own.")
    dataset_num_proc: Count | None = flag(None, "Processes that look through the rows.")
    max_length: Length = flag(
        2048,
        "Tokens per sequence, images included; text beyond it is cut, and rows whose images do not fit are left out.",
    )
    max_pixels: AtLeastOne | None = flag(
        None, "Most pixels of an image; larger ones are scaled down (Qwen-VL and its kin)."
    )
    longest_side: AtLeastOne | None = flag(None, "Pixels of an image's longer side (Idefics3, SmolVLM, Pixtral).")


def load_conversations(
    args: VisionLanguageArguments, *, evaluate: bool, seed: int
) -> tuple[Dataset, Dataset | None, Path | None]:
    """Returns the training rows of `messages` and undecoded `images`, the evaluation rows, and the images' folder.

    The folder is None for a Hub dataset.
    """
    train, test = load_rows(args, evaluate=evaluate, seed=seed)
    source = f"dataset {args.dataset_name}"
    path = Path(str(args.dataset_name))
    folder = path.parent if path.suffix in LOADERS else path if path.is_dir() else None
    folder = Path(args.image_folder) if args.image_folder else folder
    if folder is not None and not folder.is_dir():
        raise UserError(f"--image_folder {folder}: no such folder")
    return _known_columns(train, args, source), None if test is None else _known_columns(test, args, source), folder


def _known_columns(rows: Dataset, args: VisionLanguageArguments, source: str) -> Dataset:
    """Selects `messages`, `ROW_NUMBER` if present, and `images` if there is such a column, undecoded."""
    column = args.image_column
    if column == "images" and column not in rows.column_names:  # one image a row, or parts that name their files
        column = "image" if "image" in rows.column_names else ""
    known = [("messages_column", args.messages_column, "messages")]
    if ROW_NUMBER in rows.column_names:
        known.append(("", ROW_NUMBER, ROW_NUMBER))
    rows = named_columns(rows, source, *known, *([("image_column", column, "images")] if column else []))
    return rows.cast_column("images", _undecoded(rows.features["images"])) if column else rows


def _undecoded(feature: Any) -> Any:
    if isinstance(feature, ImageFeature):
        return ImageFeature(decode=False)
    return List(_undecoded(feature.feature)) if isinstance(feature, List) else feature


def conversation(row: Mapping[str, Any], place: str) -> tuple[list[dict[str, Any]], list[Cell]]:
    """Returns the messages of a row, whose contents are lists of parts, and the images of the image parts, in order.

    Args:
        place: the row's name in errors.
    """
    turns = row["messages"]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) and turn.get("role") for turn in turns):
        raise UserError(f"{place}: expected 'messages', a list of turns with 'role' and 'content'")
    images = row.get("images") or []
    given = images if isinstance(images, list) else [images]
    messages = [{"role": turn["role"], "content": [*_parts(turn.get("content"), place)]} for turn in turns]
    if any(part["type"] == "image" for turn in messages if turn["role"] == "assistant" for part in turn["content"]):
        raise UserError(f"{place}: an assistant's turn holds an image; models answer in text")
    named = [part.pop("image", None) for turn in messages for part in turn["content"] if part["type"] == "image"]
    if named.count(None) != len(given):
        raise UserError(
            f"{place}: {len(given)} images, and its messages mention {named.count(None)}; put a part "
            f'{{"type": "image"}}, or {MARK} in the text, where each belongs'
        )
    rest = iter(given)
    return messages, [_cell(next(rest) if own is None else own, place) for own in named]


def _parts(content: Any, place: str) -> Iterator[dict[str, Any]]:
    """Yields the parts of a turn: {"type": "text", "text"} and {"type": "image"}, which may have its own "image"."""
    if isinstance(content, str):
        yield from _split_at_marks(content)
        return
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise UserError(f"{place}: a turn's 'content' is a text or a list of parts, not {content!r}")
    for part in content:
        named = next((part[key] for key in PATH_KEYS if part.get(key)), None)
        if part.get("type") == "text" and isinstance(part.get("text"), str):
            yield from _split_at_marks(part["text"])
        elif part.get("type") in ("image", "image_url"):
            yield {"type": "image", **({} if named is None else {"image": named})}
        else:
            raise UserError(
                f"{place}: a part of type {part.get('type')!r}; parts are of type 'text' (with it) or 'image'"
            )


def _split_at_marks(text: str) -> Iterator[dict[str, Any]]:
    for at, words in enumerate(text.split(MARK)):
        if at:
            yield {"type": "image"}
        if words:
            yield {"type": "text", "text": words}


def _cell(image: Any, place: str) -> Cell:
    if isinstance(image, str):
        return {"bytes": None, "path": image}
    given = (image.get("bytes"), image.get("path")) if isinstance(image, dict) else (None, None)
    if isinstance(given[0] or b"", bytes) and isinstance(given[1] or "", str) and any(given):
        return {"bytes": given[0], "path": given[1]}
    raise UserError(f"{place}: an image is a file's path or an image of the dataset, not {image!r:.60}")


@dataclass(frozen=True)
class ImageLoader:
    """Opens the images of rows; `folder` has the files that rows name by path, and is None for a Hub dataset."""

    folder: Path | None

    def open(self, image: Cell, place: str) -> Image.Image:
        if image.get("bytes") is None:
            image = {"bytes": None, "path": str(self._file(str(image["path"]), place))}
        try:
            return open_image(image)
        except UserError as error:
            raise UserError(f"{place}: {error}") from error

    def _file(self, path: str, place: str) -> Path:
        if self.folder is None and not Path(path).is_absolute():
            raise UserError(
                f"{place}: image {path!r:.200} is no file of the dataset; --image_folder names the folder of files"
            )
        file = Path(path) if self.folder is None else self.folder / path
        if not os.path.isfile(file):
            raise UserError(f"{place}: image {str(file)!r:.200} does not exist")
        if self.folder is not None and not file.resolve().is_relative_to(self.folder.resolve()):
            raise UserError(
                f"{place}: image {path} lies outside of the data folder {self.folder}; name theirs, --image_folder"
            )
        return file


def image_files_digest(folder: Path | None) -> str:
    """Returns a digest of the image files in a data folder, by path, size and time of change.

    `datasets` finds encoded rows in its cache by the rows and the settings; of image files it only sees the names.
    """
    digest = hashlib.blake2b(digest_size=12)
    files = [] if folder is None else image_files(folder)
    for path in filter(os.path.isfile, files):  # no link to nothing, which `ImageLoader` names where a row has it
        status = path.stat()
        digest.update(f"{path} {status.st_size} {status.st_mtime_ns}".encode(errors="replace"))
    return digest.hexdigest()
