"""Ctrl-C in a trace: what Python's signal handlers do waits until torch is not in the middle of something.

A KeyboardInterrupt that rises wherever Python happens to be is lost in the callback of a weak reference, may leave a
patch in place, and ends the process (SIGABRT) in Python that torch's C++ calls where it lets no exception through:
`find_torch_dispatch_rule` in torch/_library/simple_registry.py, once for every op under a dispatch mode. At the
beginning of an op it is an exception like any other.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Interrupts:
    """While entered, signal handlers wait for `deliver`, at the latest until exit.

    A signal that comes a second time while `passing` is true is not kept waiting: the step may hang. Python delivers
    signals to its main thread alone, so in another thread this does nothing.
    """

    def __init__(self) -> None:
        self.passing = False
        self.waiting: dict[int, FrameType | None] = {}  # signals that came, with where
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in sorted(signal.valid_signals()):  # SIGINT, which raises, among the first, and last on exit
                handler = signal.getsignal(number)
                if callable(handler) and not isinstance(handler, signal.Handlers):
                    self._handlers[number] = handler
                    signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: Any) -> None:
        self.passing = False
        for number, handler in reversed(self._handlers.items()):
            signal.signal(number, handler)
        self.deliver()

    def deliver(self) -> None:
        """Call the handlers of the signals that came: raises KeyboardInterrupt for Ctrl-C."""
        while self.waiting:
            number, frame = self.waiting.popitem()
            self._handlers[number](number, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        again = number in self.waiting
        self.waiting[number] = frame
        if again and self.passing:
            self.passing = False  # what it raises runs into code that puts things back
            self.deliver()
