"""Files and directories that are whole or not there, and the one place for what is made once and kept.

What is written goes beside its target under a hidden name, is flushed to the disk and then renamed; renaming within a
directory is atomic on POSIX. So a killed run, a full disk or another process at the same time never leaves half.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from ckpt_ft.errors import UserError

_PARTIAL = re.compile(r"^\..*\.[0-9a-f]{12}(\.\w+)?$")  # what `_beside` makes


def cache_root() -> Path:
    """Where samples, latents and plans are kept: `$CKPT_FT_CACHE`, or `ckpt_ft` in `$XDG_CACHE_HOME` (`~/.cache`)."""
    own = os.environ.get("CKPT_FT_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ckpt_ft"


def make_parents(path: Path) -> None:
    """Make the directory that `path` is to lie in. The cache is made for its owner alone (0700)."""
    root = cache_root()
    if root in path.parents and not root.exists():
        root.parent.mkdir(parents=True, exist_ok=True)
        root.mkdir(mode=0o700, exist_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)


def write(path: str | Path, content: str | Callable[[Path], object]) -> Path:
    """Write `path` whole or not at all, in a directory that is made where it is missing.

    content: the text, or what writes a file to the path that it is given, which ends as `path` does.

    Raises:
        OSError: it cannot be written; what stood there before stands there still.
    """
    path = _target(path)
    make_parents(path)
    partial = _beside(path)
    try:
        if isinstance(content, str):
            partial.write_text(content, encoding="utf-8")
        else:
            content(partial)
        flush(partial)
        return partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def check_writable(path: str | Path, flag: str) -> None:
    """Raises UserError where `flag` asks for a file that `write` could not write: said before long work, not after."""
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{flag} {path}: is a directory; give a file")
    try:
        trial = _beside(_target(path))
        make_parents(trial)
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise UserError(f"{flag} {path}: cannot be written ({error.strerror})") from error


def sweep(directory: Path) -> None:
    """Delete what killed processes left beside their targets in `directory` more than a day ago."""
    for path in directory.glob(".*"):
        if _PARTIAL.search(path.name) and path.lstat().st_mtime < time.time() - 24 * 3600:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def make_directory(path: Path, fill: Callable[[Path], object]) -> Path:
    """The directory `path`, filled by `fill(directory)` the first time; of several that make it at once one wins.

    Raises:
        OSError: it cannot be written.
    """
    if path.is_dir():
        return path
    make_parents(path)
    sweep(path.parent)
    partial = _beside(path)
    try:
        partial.mkdir()
        fill(partial)
        flush_tree(partial)
        partial.rename(path)
    except OSError:
        if not path.is_dir():  # otherwise another process was first, and made the same
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return path


def flush_tree(directory: Path) -> None:
    """Have everything in `directory` on the disk, not only in the page cache, before a name calls it whole."""
    for path in [*directory.rglob("*"), directory]:
        flush(path)


def flush(path: Path) -> None:
    """Have a file's bytes, or a directory's names, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _target(path: str | Path) -> Path:
    """Where a file goes that is asked for at `path`: a link stays, and what it names is written.

    Raises:
        OSError: it is a device or a pipe, which a file must not take the place of.
    """
    path = Path(path)
    if path.is_symlink():
        path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "it is a device or a pipe", str(path))
    return path


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.stem}.{uuid.uuid4().hex[:12]}{path.suffix}")
