"""The manifest of a checkpoint: its run, and every file with its size and digest. It is written last and atomically.

A checkpoint is complete when its files match its manifest. A checkpoint that is partial, lacks a file, was overwritten
by another run or contains a foreign file is never read.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ValidationError

from ckpt_ft.errors import UserError, one_line
from ckpt_ft.files import flush, flush_tree, make_directory, write

logger = logging.getLogger(__name__)
NAME = "manifest.json"
_CHUNK = 1 << 20
_NO_PLACE = (FileExistsError, FileNotFoundError, NotADirectoryError, PermissionError)


class Entry(BaseModel):
    """One file of a checkpoint."""

    bytes: int
    sha256: str


class Manifest(BaseModel):
    """The contents of a complete checkpoint.

    run: the identity of the run that wrote it. files: keyed by path below the checkpoint, without the manifest itself.
    """

    run: str
    files: dict[str, Entry]


def write_manifest(checkpoint: Path, run: str) -> None:
    """Mark `checkpoint` as complete: flushes all its files to the disk, then writes the manifest.

    Raises:
        OSError: the manifest cannot be written.
    """
    flush_tree(checkpoint)
    files = {
        name: Entry(bytes=path.stat().st_size, sha256=_digest(path))
        for name, path in sorted(_files(checkpoint).items())
    }
    write(checkpoint / NAME, Manifest(run=run, files=files).model_dump_json(indent=1))
    flush(checkpoint)
    flush(checkpoint.parent)


def read_manifest(checkpoint: Path) -> Manifest | None:
    """Returns the manifest of `checkpoint`, or None if it cannot be read; its files are not checked."""
    try:
        return Manifest.model_validate_json((checkpoint / NAME).read_bytes())
    except (OSError, ValidationError):
        return None


def what_is_wrong(checkpoint: Path) -> str | None:
    """Returns why `checkpoint` is not complete, or None if it is. Reads every file in it."""
    manifest = read_manifest(checkpoint)
    if manifest is None:
        return f"without a {NAME} it was not written to its end"
    try:
        there = _files(checkpoint)
        for name in there.keys() - manifest.files.keys():
            return f"{name} in it is none of its files"
        for name, entry in manifest.files.items():
            if name not in there:
                return f"{name} is missing"
            if there[name].stat().st_size != entry.bytes:
                return f"{name} has {there[name].stat().st_size} bytes and not {entry.bytes}"
        for name, entry in manifest.files.items():
            if _digest(there[name]) != entry.sha256:
                return f"{name} was changed after it was written"
    except OSError as error:
        return one_line(error)
    return None


def make_whole(path: Path, fill: Callable[[Path], object]) -> Path:
    """Returns the directory `path`, filled by `fill(directory)` the first time; refills a damaged one with a warning.

    Raises:
        UserError: the directory cannot be created.
        OSError: the disk is full.
    """

    def filled(directory: Path) -> None:
        fill(directory)
        write_manifest(directory, path.name)

    try:
        wrong = what_is_wrong(path) if path.is_dir() else None
        if wrong is not None:
            logger.warning("%s is made again: %s", path, wrong)
            shutil.rmtree(path)
        return make_directory(path, filled)
    except _NO_PLACE as error:
        raise UserError(
            f"{path} cannot be made ({error.strerror}: {error.filename}); CKPT_FT_CACHE names another directory for "
            "what is made once"
        ) from error


def _files(checkpoint: Path) -> dict[str, Path]:
    paths = (path for path in checkpoint.rglob("*") if not path.is_dir())
    return {path.relative_to(checkpoint).as_posix(): path for path in paths if path != checkpoint / NAME}


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
