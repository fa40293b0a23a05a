"""What the files of images are that rows name, in one short text: another one as soon as one of them has changed.

datasets keeps what rows were encoded to, and finds it again by rows and settings; of files it knows their names alone.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .rows import NAMING

if TYPE_CHECKING:
    from datasets import Dataset


def stamp_of(rows: Dataset, folder: Path | None) -> str:
    """Of the `images` of `rows`, and of what parts of their `messages` name; `folder` as of `Pictures`."""
    names = {
        name
        for column in ("messages", "images")
        if column in rows.column_names
        for name in _named(rows.data.column(column), column == "images")
    }
    digest = hashlib.blake2b(digest_size=12)
    for name in sorted(names):
        try:
            status = os.stat(Path(name) if folder is None else folder / name)
        except (OSError, ValueError):  # it is said when its row is read; a dataset's own images are in its rows
            continue
        digest.update(f"{name} {status.st_size} {status.st_mtime_ns}".encode(errors="replace"))
    return digest.hexdigest()


def _named(column: Any, names: bool) -> Iterator[str]:
    """The texts of an arrow column that stand where an image is named; `names`: whether all of them do."""
    from pyarrow import compute, types

    kind = column.type
    if types.is_list(kind) or types.is_large_list(kind):
        yield from _named(compute.list_flatten(column), names)
    elif types.is_struct(kind):
        for field in kind:
            yield from _named(compute.struct_field(column, field.name), field.name in NAMING)
    elif names and (types.is_string(kind) or types.is_large_string(kind)):
        yield from (name for name in compute.unique(column).to_pylist() if name is not None)
