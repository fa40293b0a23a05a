"""Reads files that may be edited, truncated or foreign: our own JSON, YAML, and files that libraries read for us."""

from __future__ import annotations

import errno
import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import yaml
from annotated_types import Ge, Gt, Le, Lt

from .errors import UserError, WorkFailed, is_oom, one_line

if TYPE_CHECKING:
    from torch import nn

_MOST = 2**62  # bytes or counts: larger numbers are invalid
Count = Annotated[int, Ge(1), Le(_MOST)]
Bytes = Annotated[int, Ge(0), Le(_MOST)]
Seconds = Annotated[float, Gt(0), Lt(float("inf"))]

T = TypeVar("T")


def read_json(kind: type[T], text: str | bytes, source: str, meant: str) -> T:
    """Parse JSON of `json.dumps(asdict(it))` into the dataclass `kind`: strict types, unknown fields are ignored.

    meant: what `source` should contain, for the error.

    Raises:
        UserError: the JSON does not match; the message names the field and the reason.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(f"{source}: not {meant} ({place + ': ' if place else ''}{first['msg']})") from error


def load_yaml(path: str | Path, source: str) -> Any:
    """Returns the content of a YAML or .json file; `source` names it in the error.

    Raises:
        UserError: it cannot be read, or it is neither.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        return json.loads(text) if Path(path).suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise UserError(f"{source}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueErrors of encodings, dates and numbers
        raise UserError(
            f"{source} is not valid {'JSON' if Path(path).suffix == '.json' else 'YAML'}: {one_line(error, 300)}"
        ) from error


def load_entries(path: str | Path, source: str, meant: str) -> dict[str, Any]:
    """Returns the entries of a YAML or JSON file, which `meant` describes.

    Raises:
        UserError: as `load_yaml`, or the file has no entries.
    """
    content = load_yaml(path, source) or {}
    if not isinstance(content, dict):
        raise UserError(f"{source}: expected {meant}, found {type(content).__name__}")
    return {str(key): value for key, value in content.items()}


@contextmanager
def library_reads(what: str, **without: object) -> Iterator[None]:
    """Context manager for library calls on user input (files, flags): turns any exception into a one-line error.

    Damaged input can make a library raise anything (KeyError, RecursionError, an exception of its own). Out-of-memory
    errors are not caused by the input and pass unchanged.

    Raises:
        UserError: `what` and the reason, for any other exception raised inside, `without` what caused it.
    """
    try:
        yield
    except (UserError, WorkFailed):
        raise
    except Exception as error:
        if is_oom(error):
            raise
        raise UserError(f"{what}: {one_line(f'{type(error).__name__}: {error}', 400)}", **without) from error


def require_package(package: str, flag: str) -> None:
    """Raises UserError if `package`, which `flag` needs, is not installed."""
    if importlib.util.find_spec(package) is None:
        name = package.replace("_", "-")
        raise UserError(f"{flag} needs {package}, which is not installed: pip install {name}")


def require_weights(model: nn.Module) -> None:
    """Raises ValueError for a parameter on the meta device: diffusers ignores weights that a file lacks."""
    lacking = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if lacking:
        raise ValueError(f"its weights lack {lacking[0]} and {len(lacking) - 1} others")


_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
_WRAPPED = ("PytorchStreamWriter failed", "unexpected pos", "I/O error", "IoError")  # of torch and safetensors


class FirstStep:
    """Turns library errors into `UserError` until `made` is called. Out-of-memory and full-disk errors are unchanged.

    Args:
        trying: start of the error message, until the step begins.
    """

    def __init__(self, trying: str) -> None:
        self.trying: str | None = trying

    def begins(self) -> None:
        """Mark the start of the first step: setup succeeded with these flags."""
        if self.trying is not None:
            self.trying = "the first step failed (CKPT_FT_TRACEBACK=1 shows where)"

    def made(self) -> None:
        """Mark the end of the first step: the input does not cause later errors."""
        self.trying = None

    def __enter__(self) -> FirstStep:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.trying is None or not isinstance(error, Exception) or is_of_the_disk(error):
            return
        with library_reads(self.trying):
            raise error


def is_of_the_disk(error: Exception) -> bool:
    """Whether a write failed, by errno or by the messages of torch and safetensors."""
    if isinstance(error, OSError):
        return error.errno in _WRITING
    return any(text in str(error) for text in _WRAPPED)
