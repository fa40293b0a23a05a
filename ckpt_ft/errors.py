"""How a failure reaches a person: one line and an exit code.

0 done, 1 the work failed (out of memory, parity broken), 2 what the user gave cannot work.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


class UserError(ValueError):
    """What the user gave cannot work. The message is the line they see: what was given, what is allowed, the fix."""


class WorkFailed(RuntimeError):
    """The input was good and the work still failed. The message is what they see, advice included."""


def one_line(error: object, limit: int | None = None) -> str:
    """What `error` says, on one line, for a message of ours: at most `limit` characters, its type where it is mute."""
    return (" ".join(str(error).split()) or type(error).__name__)[:limit]


def run(main: Callable[[], int | None]) -> None:
    """Run a script's `main` and exit with the project's codes; `CKPT_FT_TRACEBACK=1` shows tracebacks instead."""
    try:
        code = main() or 0
    except (UserError, WorkFailed) as error:
        if os.environ.get("CKPT_FT_TRACEBACK") == "1":
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = 2 if isinstance(error, UserError) else 1
    sys.exit(code)
