"""Reports errors before the end of the first step as one-line input errors; later errors keep their traceback.

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
