"""Reports a failure as one line and an exit code.

0: success. 1: the work failed (out of memory, parity broken). 2: invalid input. 128 + N: stopped by signal N.
"""

from __future__ import annotations

import difflib
import errno
import gc
import io
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)
_LONGEST = 580  # characters of an error line; longer messages, which quote long input, are cut in the middle


class UserError(ValueError):
    """Invalid user input. The message is the line that the user sees: what was given, what is allowed, the fix.

    Non-printable characters in the message, such as line breaks and escape codes, are shown as escapes.

    Attributes:
        without: fields of a training's spec and their values, with which there would be an answer, of nearly that run.
    """

    def __init__(self, message: str, **without: object) -> None:
        self.without = without
        half = _LONGEST // 2 - 3
        message = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
        super().__init__(message if len(message) <= _LONGEST else f"{message[:half]} ... {message[-half:]}")


class NothingFits(UserError):
    """No policy fits a budget."""


class WorkFailed(RuntimeError):
    """The work failed although the input was valid. The message is what the user sees, advice included."""


class Interrupted(KeyboardInterrupt):
    """A signal stopped the work. The message says what was saved and how to continue."""

    def __init__(self, message: str, number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.number = number


_SIGPIPE = 13  # Windows does not define SIGPIPE
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # disk full, quota exceeded, read-only


def one_line(error: object, limit: int | None = None) -> str:
    """Returns the text of `error` on one line, at most `limit` characters; its type if it has no text."""
    return (" ".join(str(error).split()) or type(error).__name__)[:limit]


def why_untraceable(error: BaseException) -> str:
    """Returns one line on an error that was not foreseen: where it was raised, its type and its text."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    where = "" if at is None else f"{at.tb_frame.f_globals.get('__name__', '')}.{at.tb_frame.f_code.co_name}"
    return f"the step cannot be traced: {where} raised {type(error).__name__}: {one_line(error, 200)}"


def did_you_mean(given: str, known: Iterable[str], form: str = "{}") -> str:
    """Returns "; did you mean ...?" with the name in `known` that is closest to `given`; "" if none is close.

    Two words of three letters that share two are different words: ppo is not dpo.
    """
    close = difflib.get_close_matches(given, list(known), n=1, cutoff=0.6 if len(given) > 3 else 0.7)
    return f"; did you mean '{form.format(close[0])}'?" if close else ""


def is_oom(error: BaseException) -> bool:
    """Whether `error` is an out-of-memory error of a device or of the host."""
    import torch
    from accelerate.utils.memory import should_reduce_batch_size

    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    said = all(isinstance(part, str) for part in error.args)  # accelerate looks for words in it
    return isinstance(error, Exception) and said and should_reduce_batch_size(error)


@contextmanager
def never_fatal(what: str) -> Iterator[None]:
    """Logs a failure inside as one warning: a report must not cost the run that it describes."""
    try:
        yield
    except Exception as error:
        logger.warning("%s failed; training is not affected: %s: %s", what, type(error).__name__, one_line(error))


def run(main: Callable[[], int | None]) -> None:
    """Run a script's `main` and exit with the project's codes; `CKPT_FT_TRACEBACK=1` shows tracebacks instead."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore", FutureWarning)  # libraries emit them about each other
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an ASCII stream must not make a run fail
    try:
        code = main() or 0
    except BrokenPipeError:  # the reader has exited, as in `| head -1`: not an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for data that is flushed at exit
        code = 128 + _SIGPIPE
    except (Exception, KeyboardInterrupt) as error:
        if not _is_foreseen(error) or os.environ.get("CKPT_FT_TRACEBACK") == "1":
            raise
        if isinstance(error, (UserError, WorkFailed, KeyboardInterrupt)):
            said = str(error)
        else:
            said = _why_not_imported(error) if isinstance(error, ImportError) else one_line(error, _LONGEST)
        if said or not isinstance(error, Interrupted):  # only one of several ranks prints it
            _end_progress_bars()
            print(f"error: {said or 'interrupted'}", file=sys.stderr, flush=True)
        code = _exit_code(error)
    sys.exit(code)


def _end_progress_bars() -> None:
    """Closes progress bars, so that the next output on stderr starts on a new line."""
    if "tqdm" in sys.modules:
        from tqdm import tqdm

        for one in gc.get_objects():
            if issubclass(type(one), tqdm):
                one.close()


def _is_foreseen(error: BaseException) -> bool:
    if isinstance(error, (UserError, WorkFailed, KeyboardInterrupt, ImportError)):
        return True
    return error.errno in _DISK if isinstance(error, OSError) else is_oom(error)


def _why_not_imported(error: BaseException) -> str:
    """Returns the line for a missing package or for versions that clash: the first error, which transformers hides."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"the package {error.name.partition('.')[0]} is not installed (CKPT_FT_TRACEBACK=1 shows who needs it)"
    return (
        f"the installed libraries do not fit each other: {one_line(error, 300)}; install them with `pip install -c "
        "constraints.txt`, or uninstall the one that fails (CKPT_FT_TRACEBACK=1 shows where)"
    )


def _exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 128 + (error.number if isinstance(error, Interrupted) else signal.SIGINT)
    return 2 if isinstance(error, UserError) else 1
