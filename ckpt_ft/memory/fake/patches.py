"""What a trace patches in torch, transformers and Python while it runs. Imitating a GPU is up to rules/cuda.py."""

from __future__ import annotations

import gc
import logging
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ckpt_ft.memory.record.recorder import Recorder

from .values import Values


@contextmanager
def unnoticed() -> Iterator[None]:
    """transformers builds attention masks for fake tensors that it skips for real ones: let it see real ones."""
    if "transformers" not in sys.modules:
        yield
        return
    from transformers.utils import import_utils

    with patch.object(import_utils, "is_fake_tensor", lambda x: False, create=True):
        yield


@contextmanager
def tensors_of_fakes() -> Iterator[None]:
    """torch.tensor([a, b]) reads 0-dim tensors behind every mode's back: a fake one has to be asked first."""
    make = torch.tensor

    def numbers(data: Any) -> Any:
        if isinstance(data, (list, tuple)):
            return [numbers(item) for item in data]
        return data.item() if type(data) is FakeTensor and data.dim() == 0 else data

    def tensor(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        return make(data if isinstance(data, Tensor) else numbers(data), *args, **kwargs)

    with patch.object(torch, "tensor", tensor):
        yield


@contextmanager
def device_calls(recorder: Recorder) -> Iterator[None]:
    """What a step asks of its device by Python's functions is told to the tracker, also where there is no device."""

    def forget_peaks(device: Any = None) -> None:
        """The record has the whole step."""

    answers = {
        "empty_cache": recorder.empty_cache,
        "synchronize": recorder.await_device,
        "reset_peak_memory_stats": forget_peaks,
    }
    with ExitStack() as stack:
        for module in (torch.cuda, torch.accelerator):
            for name, answer in answers.items():
                stack.enter_context(patch.object(module, name, answer, create=True))
        yield


@contextmanager
def lists_of_fakes(recorder: Recorder, values: Values) -> Iterator[None]:
    """`tolist` copies a tensor to the host once; a fake one asks for each number, and the host waits each time."""
    each = FakeTensor.tolist

    def tolist(tensor: FakeTensor) -> Any:
        numbers = values.numbers(tensor) if tensor.dim() else None
        if numbers is None:
            return each(tensor)
        if not recorder.is_ignored(tensor):
            recorder.await_device()
        return numbers

    with patch.object(FakeTensor, "tolist", tolist):
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Random numbers as they were, and reference cycles freed between steps rather than whenever Python chooses to.

    Python's and numpy's too: a forward draws its masks or its LayerDrop from them, and data its augmentation. What an
    op refuses is raised; that torch logs it too is left out.
    """
    enabled, python, drawn = gc.isenabled(), random.getstate(), numpy.random.get_state()
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    silent, logger.disabled = logger.disabled, True
    gc.disable()
    gc.freeze()  # collections look at what the step makes, not at what was there
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        logger.disabled = silent
        random.setstate(python)
        numpy.random.set_state(drawn)
        gc.unfreeze()
        if enabled:
            gc.enable()
