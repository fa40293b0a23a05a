"""Conversations about images: rows of `messages`, and of each row the images that they speak of, in order.

A row is as TRL, LLaMA-Factory and ms-swift have them: `messages` with a part `{"type": "image"}` (or the text
"<image>") for each image of the column `images`; an image part may name its own file instead. Whatever is wrong with a
row is one line that names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_ft.errors import UserError, one_line
from ckpt_ft.training.images.files import named_columns, open_image
from ckpt_ft.training.text.data import LOADERS, load_rows

if TYPE_CHECKING:
    from datasets import Dataset
    from PIL import Image

    from .arguments import VisionLanguageArguments

MARK = "<image>"  # in a text, where an image stands
NAMING = ("image", "path", "image_url", "url")  # of a part, where it names its own file
Cell = Mapping[str, Any]  # of an image column, undecoded: `bytes` or `path`


@dataclass(frozen=True)
class Conversation:
    """`messages` whose contents are lists of parts, and the images of their image parts, in order."""

    messages: list[dict[str, Any]]
    images: list[Cell]


def load_conversations(
    args: VisionLanguageArguments, *, evaluate: bool, seed: int
) -> tuple[Dataset, Dataset | None, Path | None]:
    """Rows of `messages` and undecoded `images` to train on, those to evaluate on if asked, and the images' folder.

    Raises:
        UserError: the dataset cannot be found or read, or lacks a column.
    """
    train, test = load_rows(args, evaluate=evaluate, seed=seed)
    source = f"dataset {args.dataset_name}"
    folder = Path(args.image_folder) if args.image_folder else _folder(str(args.dataset_name))
    if folder is not None and not folder.is_dir():
        raise UserError(f"--image_folder {folder}: no such folder")
    return _columns(train, args, source), None if test is None else _columns(test, args, source), folder


def _folder(name: str) -> Path | None:
    """Where images lie that a row names by path; None for a dataset of the Hub."""
    path = Path(name)
    return path.parent if path.suffix in LOADERS else path if path.is_dir() else None


def _columns(rows: Dataset, args: VisionLanguageArguments, source: str) -> Dataset:
    """`messages`, and `images` where there is such a column, whose cells are not decoded."""
    column = args.image_column
    if column == "images" and column not in rows.column_names:  # one image a row, or parts that name their files
        column = "image" if "image" in rows.column_names else ""
    known = [("messages_column", args.messages_column, "messages")]
    rows = named_columns(rows, source, *known, *([("image_column", column, "images")] if column else []))
    return rows.cast_column("images", _undecoded(rows.features["images"])) if column else rows


def _undecoded(feature: Any) -> Any:
    from datasets import Image as ImageFeature
    from datasets import List

    if isinstance(feature, ImageFeature):
        return ImageFeature(decode=False)
    return List(_undecoded(feature.feature)) if isinstance(feature, List) else feature


def conversation(row: Mapping[str, Any], place: str) -> Conversation:
    """The conversation of a row, every image part with its image.

    place: the row, for errors.

    Raises:
        UserError: it is no conversation, or has more image parts than images, or fewer.
    """
    turns = row["messages"]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) and turn.get("role") for turn in turns):
        raise UserError(f"{place}: expected 'messages', a list of turns with 'role' and 'content'")
    given = row.get("images")
    waiting = [_cell(image, place) for image in (given if isinstance(given, list) else [given] if given else [])]
    count, messages, images = len(waiting), [], []
    for turn in turns:
        parts = []
        for part in _parts(turn.get("content"), place):
            if part["type"] == "image":
                if turn["role"] == "assistant":
                    raise UserError(f"{place}: an assistant's turn holds an image; models answer in text")
                own = part.pop("image", None)
                if own is None and not waiting:
                    raise UserError(f"{place}: its messages speak of more images than the {count} of 'images'")
                images.append(waiting.pop(0) if own is None else _cell(own, place))
            parts.append(part)
        messages.append({"role": turn["role"], "content": parts})
    if waiting:
        raise UserError(
            f"{place}: {count} images, and its messages speak of {count - len(waiting)}; put a part "
            f'{{"type": "image"}}, or {MARK} in the text, where each belongs'
        )
    return Conversation(messages, images)


def _parts(content: Any, place: str) -> Iterator[dict[str, Any]]:
    """The parts of a turn's content: {"type": "text", "text"} and {"type": "image"}, perhaps with its "image"."""
    if isinstance(content, str):
        yield from _marked(content)
        return
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise UserError(f"{place}: a turn's 'content' is a text or a list of parts, not {content!r}")
    for part in content:
        named = next((part[key] for key in NAMING if part.get(key)), None)
        if part.get("type") == "text" and isinstance(part.get("text"), str):
            yield from _marked(part["text"])
        elif part.get("type") in ("image", "image_url"):
            yield {"type": "image", **({} if named is None else {"image": named})}
        else:
            raise UserError(
                f"{place}: a part of type {part.get('type')!r}; parts are of type 'text' (with it) or 'image'"
            )


def _marked(text: str) -> Iterator[dict[str, Any]]:
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
class Pictures:
    """Opens the images of rows.

    folder: where files that are named by path lie; None for a dataset of the Hub, which has them itself. smallest:
    pixels of the model's patch; images have at least as many on each side.
    """

    folder: Path | None
    smallest: int = 1

    def open(self, image: Cell, place: str) -> Image.Image:
        """The RGB picture.

        Raises:
            UserError: no such file, one outside of the folder, one that cannot be read, or a picture below a patch.
        """
        if image.get("bytes") is None:
            image = {"bytes": None, "path": str(self._file(str(image["path"]), place))}
        try:
            picture = open_image(image)
        except UserError as error:
            raise UserError(f"{place}: {error}") from error
        if min(picture.size) < self.smallest:
            width, height = picture.size
            raise UserError(
                f"{place}: {image['path'] or 'its image'} has {width} x {height} pixels, less than the model's patch "
                f"of {self.smallest}; take it out"
            )
        return picture

    def _file(self, path: str, place: str) -> Path:
        if "://" in path or path.startswith("data:"):
            raise UserError(f"{place}: image {path:.80} is not a file; download it into the data folder")
        if self.folder is None and not Path(path).is_absolute():
            raise UserError(f"{place}: image {path} is a path, and the dataset is the Hub's; give --image_folder")
        file = Path(path) if self.folder is None else self.folder / path
        try:
            inside = self.folder is None or file.resolve().is_relative_to(self.folder.resolve())
            there = file.is_file()
        except (OSError, RuntimeError, ValueError) as error:  # too long, a loop of links, a null byte
            raise UserError(f"{place}: image {path!r:.80} is no file's path: {one_line(error, 80)}") from error
        if not inside:
            raise UserError(
                f"{place}: image {path} lies outside of the data folder {self.folder}; name theirs, --image_folder"
            )
        if not there:
            raise UserError(f"{place}: image {file} does not exist")
        return file
