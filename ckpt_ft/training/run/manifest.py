"""The manifest of a checkpoint: its run, and every file with its size and digest. It is written last and at once.

A checkpoint is whole when its files are those of its manifest. One that a killed run left half, that lost a file, that
was written over by another run or that holds a file of someone else's is not, and nothing of it is read.
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
    """What a whole checkpoint holds.

    run: the identity of the run that wrote it. files: by path below the checkpoint, but for the manifest's own.
    """

    run: str
    files: dict[str, Entry]


def write_manifest(checkpoint: Path, run: str) -> None:
    """Call `checkpoint` whole: all its files are on the disk before the manifest that names them is there.

    Raises:
        OSError: it cannot be written.
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
    """The manifest of `checkpoint`, None where there is none that can be read; its files are not looked at."""
    try:
        return Manifest.model_validate_json((checkpoint / NAME).read_bytes())
    except (OSError, ValidationError):
        return None


def what_is_wrong(checkpoint: Path) -> str | None:
    """Why `checkpoint` is not whole, None when it is. Reads every file that it holds."""
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
    """The directory `path`, filled by `fill(directory)` the first time; a damaged one is made again, with a warning.

    Raises:
        UserError: there can be no directory at that place.
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
