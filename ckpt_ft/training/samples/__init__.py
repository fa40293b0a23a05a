"""Built-in models and data, made offline and cached."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ckpt_ft.errors import UserError
from ckpt_ft.files import cache_root, make_directory


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
