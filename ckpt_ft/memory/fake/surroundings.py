"""What a trace changes around the step that it runs, and puts back: the model's tensors, Python's collector, calls.

What stands for a GPU is not here but in rules/cuda.py.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckpt_ft.memory.record.tracker import Tracker


def fake_like(tensor: Tensor) -> Tensor:
    """A fake CPU tensor of the same shape, strides and dtype; call it under FakeTensorMode."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def fake_wrapped(tensor: Any) -> Tensor:
    """The same of what a tensor subclass wraps (a quantised weight's codes and scales); of a DTensor the whole."""
    if isinstance(tensor, DTensor):
        return fake_like(tensor)
    names, context = tensor.__tensor_flatten__()
    inner = {name: fake_like(getattr(tensor, name)) for name in names}
    wrapped: Tensor = type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
    return wrapped


@contextmanager
def faked_model(model: nn.Module) -> Iterator[None]:
    """Fakes in place of every tensor that `model` holds: parameters, buffers, attributes, lists of them; ties kept."""
    fakes: dict[int, Tensor] = {}
    restore: list[tuple[dict[str, Any], str, Any]] = []

    def fake(value: Any) -> Any:
        if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
            return type(value)(fake(item) for item in value)
        if not isinstance(value, Tensor):
            return value
        if id(value) not in fakes:
            new = fake_wrapped(value) if is_traceable_wrapper_subclass(value) else fake_like(value)
            fakes[id(value)] = nn.Parameter(new, value.requires_grad) if isinstance(value, nn.Parameter) else new
        return fakes[id(value)]

    try:
        for module in model.modules():
            restore.append((module.__dict__, "training", module.training))  # a step may change its mode
            for table in (module._parameters, module._buffers, module.__dict__):
                for key, value in list(table.items()):
                    new = fake(value)
                    if new is not value:
                        restore.append((table, key, value))
                        table[key] = new
        fakes.clear()  # what the model lets go of (FSDP2 of whole parameters) is free
        yield
    finally:
        for table, key, value in restore:
            table[key] = value


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
def cache_of(tracker: Tracker) -> Iterator[None]:
    """Whoever empties the caching allocator's cache empties that of the step that is traced."""
    with (
        patch.object(torch.cuda, "empty_cache", tracker.empty_cache),
        patch.object(torch.accelerator, "empty_cache", tracker.empty_cache),
    ):
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Random numbers as they were; reference cycles freed between steps rather than whenever Python chooses to.

    What an op refuses is raised; that torch logs it too is left out.
    """
    enabled, logger = gc.isenabled(), logging.getLogger("torch._subclasses.fake_tensor")
    silent, logger.disabled = logger.disabled, True
    gc.disable()
    gc.freeze()  # collections look at what the step makes, not at what was there
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        logger.disabled = silent
        gc.unfreeze()
        if enabled:
            gc.enable()
