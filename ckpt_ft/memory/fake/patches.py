"""Patches torch, transformers and Python while a trace runs. rules/cuda.py imitates the GPU.

Signals are deferred to the beginning of the step's next op. A KeyboardInterrupt that is raised at an arbitrary place
is lost in the callback of a weak reference, may leave a patch in place, and aborts the process (SIGABRT) in Python
code that torch's C++ calls without letting exceptions through: `find_torch_dispatch_rule` in
torch/_library/simple_registry.py, once for every op under a dispatch mode. At the beginning of an op it is an ordinary
exception.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import Any
from unittest.mock import patch

import numpy
import torch
from torch import Tensor

from ckpt_ft.compat.patches import patched
from ckpt_ft.compat.tensors import FakeTensor
from ckpt_ft.memory.record.events import EMPTIED
from ckpt_ft.memory.record.recorder import Recorder

from .values import Values


@contextmanager
def unnoticed() -> Iterator[None]:
    """transformers builds attention masks for fake tensors that it skips for real ones: hide that they are fake."""
    library = sys.modules.get("transformers.utils.import_utils")
    # A function of transformers that returns False, too, because dynamo traces into it.
    with patched(is_fake_tensor=library.is_torch_fx_proxy) if library is not None else nullcontext():
        yield


@contextmanager
def tensors_of_fakes() -> Iterator[None]:
    """torch.tensor([a, b]) reads tensors without dispatch, which fails on fakes: read those by `tolist`."""
    make = torch.tensor

    def numbers(data: Any) -> Any:
        if isinstance(data, (list, tuple)):
            return [numbers(item) for item in data]
        return data.tolist() if type(data) is FakeTensor else data

    def tensor(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        return make(data if isinstance(data, Tensor) else numbers(data), *args, **kwargs)

    with patched(make_tensor=tensor):
        yield


@contextmanager
def inference_with_counters() -> Iterator[None]:
    """Let torch.inference_mode only turn gradients off: it makes no version counters, which views of fakes need."""

    def enter(guard: Any) -> None:
        guard.prev = torch.is_grad_enabled()
        torch.set_grad_enabled(not guard.mode)

    with patch.multiple(torch.inference_mode, __enter__=enter, __exit__=torch.no_grad.__exit__):
        yield


@contextmanager
def device_calls(recorder: Recorder) -> Iterator[None]:
    """Records what a step asks of its device by Python functions, and makes them work without a device."""
    answers = {
        "empty_cache": partial(recorder.mark, EMPTIED),
        "synchronize": recorder.await_device,
        "reset_peak_memory_stats": lambda device=None: None,  # the record has the whole step
    }
    with patched(on_cuda=answers, on_accelerator=answers):
        yield


@contextmanager
def triton_launches(recorder: Recorder) -> Iterator[None]:
    """Launches of Triton kernels (Liger's, TRL's) do nothing: a kernel writes into tensors that its caller made."""

    def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
        recorder.note("kernels written in Triton are counted by the tensors that they are given, not in the seconds")

    with patched(triton_kernel=run, triton_autotuner=run) if "triton.runtime" in sys.modules else nullcontext():
        yield


@contextmanager
def lists_of_fakes(recorder: Recorder, values: Values) -> Iterator[None]:
    """Makes `tolist` of a fake tensor one copy to the host, as on a real tensor, instead of one for each number."""
    each = FakeTensor.tolist

    def tolist(tensor: FakeTensor) -> Any:
        numbers = values.numbers(tensor) if tensor.dim() else None
        if numbers is None:
            return each(tensor)
        if not recorder.is_on_host(tensor):
            recorder.await_device()
        return numbers

    with patched(fakes_tolist=tolist):
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Restores random states afterwards, and lets reference cycles be freed between steps only.

    Python's and numpy's random states too: a forward may draw masks or LayerDrop from them, and data its augmentation.
    torch's log, which is about a run, is off unless TORCH_LOGS is set; what stops a trace is raised.
    """
    enabled, python, drawn = gc.isenabled(), random.getstate(), numpy.random.get_state()
    handle = logging.Logger.handle

    def of_others(logger: logging.Logger, record: logging.LogRecord) -> None:
        if "TORCH_LOGS" in os.environ or not logger.name.startswith("torch"):
            handle(logger, record)

    gc.disable()
    gc.collect(1)  # what is there now is old: collections of younger generations look only at what the steps make
    try:
        with torch.random.fork_rng(devices=[]), patch.object(logging.Logger, "handle", of_others):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(drawn)
        if enabled:
            gc.enable()


class Interrupts:
    """Defers signal handlers, while entered, to the next call of `deliver`, or to the exit.

    Within `passing_on`, a second signal is handled at once. In other threads than the main one this does nothing.
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
        """While steps run, a signal that comes a second time is handled at once, since the step may hang."""
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
