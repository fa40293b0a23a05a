"""Defers SIGINT (Ctrl-C) and SIGTERM (sent by schedulers) until the step and a checkpoint are finished.

A second signal stops the process immediately.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any

import torch
from accelerate import PartialState

from ckpt_ft.errors import Interrupted
from ckpt_ft.redact import redacted

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_OF_THE_START = ("resume_from_checkpoint", "overwrite_output_dir")  # flags that a resumed run must not repeat
_SAME = 1.0  # seconds: a launcher forwards a signal that the terminal has already sent to its ranks


class Stop:
    """Context manager that defers SIGINT and SIGTERM to the end of the step.

    Attributes:
        signal: the number of the received signal, or None.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._came = 0.0
        self._process = os.getpid()
        self._before: dict[int, Any] = {}
        self._sum: torch.Tensor | None = None

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers in the main thread only
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def agreed(self) -> bool:
        """Whether to stop after this step. Called on every rank after every step; all get the same answer.

        With several ranks, returns the previous step's answer, whose all-reduce is already done, so no rank waits.
        """
        state = PartialState()
        if state.num_processes == 1:
            return self.signal is not None
        answer = self._sum is not None and bool(self._sum.item())
        self._sum = torch.tensor(float(self.signal is not None), device=state.device)
        torch.distributed.all_reduce(self._sum)
        return answer

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a data loader worker, which inherits the handler
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if self.signal is None:
            self.signal, self._came = number, time.monotonic()
            name = signal.Signals(number).name
            os.write(2, f"\n{name}: finishing this step and a checkpoint; once more stops at once\n".encode())
        elif time.monotonic() - self._came > _SAME:
            raise Interrupted(
                "stopped at once; --resume_from_checkpoint latest goes on from the last checkpoint", number
            )


def stopped(number: int | None, checkpoint: str | None) -> Interrupted:
    """Returns the error for a run that stopped and left `checkpoint`; the main process says how to resume."""
    number = signal.SIGTERM if number is None else number  # another rank got the signal
    said = f"stopped by {signal.Signals(number).name}; {checkpoint} is whole. To go on:\n{resuming_command()}"
    return Interrupted(said if PartialState().is_main_process else "", number)


def resuming_command() -> str:
    """Returns this process's command, changed to resume from the last checkpoint, without secrets."""
    kept: list[str] = []
    stays = True  # whether to keep a flag and its values
    for token in sys.argv[1:]:
        if token.startswith("--"):
            stays = token.partition("=")[0][2:].replace("-", "_") not in _OF_THE_START
        if stays:
            kept.append(token)
    launcher = ["accelerate", "launch", "-q"] if PartialState().num_processes > 1 else ["python"]
    return shlex.join([*launcher, sys.argv[0], *redacted(kept), "--resume_from_checkpoint", "latest"])
