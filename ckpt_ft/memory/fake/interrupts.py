"""Defers signals during a trace to the beginning of the step's next op.

A KeyboardInterrupt that is raised at an arbitrary place is lost in the callback of a weak reference, may leave a patch
in place, and aborts the process (SIGABRT) in Python code that torch's C++ calls without letting exceptions through:
`find_torch_dispatch_rule` in torch/_library/simple_registry.py, once for every op under a dispatch mode. At the
beginning of an op it is an ordinary exception.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupts:
    """Defers signal handlers, while entered, to the next call of `deliver`, or to the exit.

    Within `passing_on`, a signal that comes a second time is handled at once, since the step may hang. Python delivers
    signals to its main thread only, so in other threads this does nothing.
    """

    def __init__(self) -> None:
        self._passing = False
        self.waiting: dict[int, FrameType | None] = {}  # signals that came, with the frame
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in sorted(signal.valid_signals()):  # SIGINT, which raises, comes early; on exit it comes late
                handler = signal.getsignal(number)
                if callable(handler) and not isinstance(handler, signal.Handlers):
                    self._handlers[number] = handler
                    signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._passing = False
        for number, handler in reversed(self._handlers.items()):
            signal.signal(number, handler)
        self.deliver()

    @contextmanager
    def passing_on(self) -> Iterator[None]:
        """The steps run: a signal that comes twice is not deferred."""
        self._passing = True
        try:
            yield
        finally:
            self._passing = False

    def deliver(self) -> None:
        """Call the deferred handlers; raises KeyboardInterrupt for Ctrl-C."""
        while self.waiting:
            number, frame = self.waiting.popitem()
            self._handlers[number](number, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        again = number in self.waiting
        self.waiting[number] = frame
        if again and self._passing:
            self._passing = False  # the exception runs through code that restores state
            self.deliver()
