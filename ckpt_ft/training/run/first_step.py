"""What fails before a step has been made is what was given, and is said in one line; later it is a traceback.

with FirstStep("training cannot begin with these flags") as first:
    first.begins()
    ...                 # a step
    first.made()
"""

from __future__ import annotations

import errno
from types import TracebackType

from ckpt_ft.reading import library_reads

_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
_WRAPPED = ("PytorchStreamWriter failed", "unexpected pos", "I/O error", "IoError")  # by torch and safetensors


class FirstStep:
    """Inside, until `made`, whatever a library raises is a UserError. Memory and disks that are full stay what they
    are.

    Args:
        trying: what it is that fails, until the step begins.
    """

    def __init__(self, trying: str) -> None:
        self.trying: str | None = trying

    def begins(self) -> None:
        """The flags were good enough to begin with."""
        if self.trying is not None:
            self.trying = "the first step failed (CKPT_FT_TRACEBACK=1 shows where)"

    def made(self) -> None:
        """A step has been made: what fails from here on is no fault of the input's."""
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
    """Whether a write failed: the system's word for it, or what torch and safetensors make of that."""
    if isinstance(error, OSError):
        return error.errno in _WRITING
    return any(text in str(error) for text in _WRAPPED)
