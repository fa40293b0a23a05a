"""Writes files and directories atomically, and names the cache directory.

Content is written next to its target under a hidden name, flushed to the disk and then renamed; renaming within a
directory is atomic on POSIX. So a killed run, a full disk or a concurrent process never leaves a partial file.
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

_PARTIAL = re.compile(r"^\..*\.[0-9a-f]{12}(\.\w+)?$")  # names that `_beside` returns


def cache_root() -> Path:
    """Cache directory: `$CKPT_FT_CACHE`, or `ckpt_ft` in `$XDG_CACHE_HOME` (default `~/.cache`)."""
    own = os.environ.get("CKPT_FT_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ckpt_ft"


def make_parents(path: Path) -> None:
    """Create the parent directory of `path`. Only the owner can access the cache (0700)."""
    root = cache_root()
    if root in path.parents and not root.exists():
        root.parent.mkdir(parents=True, exist_ok=True)
        root.mkdir(mode=0o700, exist_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)


def write(path: str | Path, content: str | Callable[[Path], object]) -> Path:
    """Write `path` atomically; creates its directory if it does not exist.

    content: the text, or a function that writes a file to a given path, which has the suffix of `path`.

    Raises:
        OSError: `path` cannot be written; an existing file is unchanged.
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
    except OSError as error:  # a full disk names no file, and another error the partial one
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        partial.unlink(missing_ok=True)


def check_writable(path: str | Path, flag: str) -> None:
    """Raises UserError if `write` cannot write the file that `flag` names. Call this before long work."""
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
    """Delete temporary files in `directory` that killed processes left more than a day ago."""
    for path in directory.glob(".*"):
        if _PARTIAL.search(path.name) and path.lstat().st_mtime < time.time() - 24 * 3600:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def make_directory(path: Path, fill: Callable[[Path], object]) -> Path:
    """Returns the directory `path`, filled by `fill(directory)` the first time; safe for concurrent processes.

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
        if not path.is_dir():  # otherwise another process has created the same directory
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return path


def made_once(name: str, fill: Callable[[Path], object]) -> Path:
    """Returns the directory `name` of the cache, filled by `fill(directory)` the first time.

    Raises:
        UserError: the directory cannot be created.
        OSError: the disk is full.
    """
    path = cache_root() / name
    try:
        return make_directory(path, fill)
    except (FileExistsError, FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise UserError(
            f"{path} cannot be made ({error.strerror}: {error.filename}); CKPT_FT_CACHE names another directory for "
            "what is made once"
        ) from error


def flush_tree(directory: Path) -> None:
    """Flush all files in `directory` from the page cache to the disk."""
    for path in [*directory.rglob("*"), directory]:
        flush(path)


def flush(path: Path) -> None:
    """Flush a file's content, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _target(path: str | Path) -> Path:
    """Returns the path to write to, which for a link is its target; raises OSError for a device or a pipe."""
    path = Path(path)
    if path.is_symlink():
        path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "it is a device or a pipe", str(path))
    return path


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.stem}.{uuid.uuid4().hex[:12]}{path.suffix}")
