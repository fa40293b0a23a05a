"""Reads image files and cells of image columns as RGB pictures, and finds those that cannot be read.

Bad input raises UserError, one line that names the file or the row.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageOps, UnidentifiedImageError

from ckpt_ft.errors import UserError, meant, one_line

if TYPE_CHECKING:
    from datasets import Dataset

DECODED = 5_000  # images that are decoded completely before training; of later ones only the header is read
_SHOWN = 3  # bad images named in an error
UNDECODABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)  # errors of Pillow's decoders
_ORIENTATION, _QUARTER_TURNS = 0x0112, (5, 6, 7, 8)  # EXIF's tag, and its values for a quarter turn
_GREY = ("1", "L", "I", "F", "I;16", "I;16L", "I;16B", "I;16N")


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
    flags: dict[str, str] = {}
    for flag, column, _ in columns:
        if (other := flags.setdefault(column, flag)) != flag:
            raise UserError(f"--{other} and --{flag} both name the column {column}; give each its own")
        if column not in rows.column_names:
            likely, there = meant(column, rows.column_names), ", ".join(rows.column_names)
            raise UserError(f"--{flag} {column}: {source} has no such column{likely}; it has {there}")
    rows = rows.select_columns([column for _, column, _ in columns])
    return rows.rename_columns({theirs: ours for _, theirs, ours in columns if theirs != ours})


def readable(rows: Dataset, source: str, *, skip: bool) -> Dataset:
    """Returns the rows whose undecoded `image` can be read; prints the others, and what is converted to RGB."""
    problems: dict[int, str] = {}
    kinds: Counter[str] = Counter()
    for row, image in enumerate(rows["image"]):
        problem, kind = _inspect(image, row)
        if problem is not None:
            problems[row] = problem
        elif kind:
            kinds[kind] += 1
    if problems and not skip:
        named = "; ".join(list(problems.values())[:_SHOWN])
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise UserError(f"{source}: {named}{more}; repair them, or leave them out with --skip_bad_images")
    for problem in problems.values():
        print(f"skipped: {problem}", flush=True)
    if kinds:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        print(f"{source}: made RGB of {sum(kinds.values())} of {len(rows)} images ({counts})", flush=True)
    if len(problems) == len(rows):
        raise UserError(f"{source}: no readable image is left" if problems else f"{source}: there is no image in it")
    return rows.select([row for row in range(len(rows)) if row not in problems]) if problems else rows


def _inspect(image: Mapping[str, Any] | None, row: int) -> tuple[str | None, str]:
    """Returns why the image cannot be used (None if it can), and its kind if it is not RGB."""
    if image is None or (image["bytes"] is None and not image["path"]):
        return f"row {row + 1} has no image", ""
    name = image["path"] or f"the image of row {row + 1}"
    try:
        if image["bytes"] is None and not Path(image["path"]).is_file():
            return f"{name} does not exist", ""
        if not (len(image["bytes"]) if image["bytes"] is not None else Path(image["path"]).stat().st_size):
            return f"{name} is empty (0 bytes)", ""
        with _opened(image) as opened:
            kind = _kind(opened)
            if row < DECODED:
                to_rgb(opened)
    except UnidentifiedImageError:
        return f"{name} is no image that Pillow can read", ""
    except UNDECODABLE as error:
        return f"{name} cannot be read ({one_line(error)})", ""
    return None, kind


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
    try:
        with _opened(image) as opened:
            width, height = opened.size
            turned = opened.getexif().get(_ORIENTATION) in _QUARTER_TURNS
    except UNDECODABLE as error:
        raise UserError(f"{image['path'] or 'an image'} cannot be read ({one_line(error)})") from error
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


def _kind(image: Image.Image) -> str:
    """Describes an image that is not RGB; "" for RGB."""
    if image.has_transparency_data:
        return "with transparency, now over white"
    return "of one channel" if image.mode in _GREY else "" if image.mode == "RGB" else f"of mode {image.mode}"
