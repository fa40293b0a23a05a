"""What a trace changes around the step that it runs, and puts back: the model's tensors, Python's collector, calls.

What stands for a GPU is not here but in rules/cuda.py.
"""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckpt_ft.memory.record.tracker import Tracker

from .fakes import Fakes
from .values import Values, attach, holds_sizes

_TORCH = frozenset(vars(nn.Module()))  # a module's attributes that are torch's own
_CACHE = type(functools.cache(lambda: None))


def fake_wrapped(tensor: Any, fakes: Fakes) -> Tensor:
    """The same of what a tensor subclass wraps (a quantised weight's codes and scales); of a DTensor the whole."""
    if isinstance(tensor, DTensor):
        return fakes.like(tensor)
    names, context = tensor.__tensor_flatten__()
    inner = {name: fakes.like(getattr(tensor, name)) for name in names}
    wrapped: Tensor = type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
    return wrapped


@contextmanager
def faked_model(model: nn.Module, fakes: Fakes) -> Iterator[None]:
    """Fakes in place of every tensor that `model` holds: parameters, buffers, attributes, lists and dicts of them.

    Ties are kept. Afterwards no module holds a fake, also where its forward put one (a cache of positions).
    """
    made: dict[int, Tensor] = {}
    tables: list[tuple[dict[Any, Any] | list[Any], dict[Any, Any]]] = []  # and what was in them

    def fake(value: Any) -> Any:
        if isinstance(value, tuple) and any(isinstance(item, Tensor) for item in value):
            items = [fake(item) for item in value]
            return value._make(items) if hasattr(value, "_make") else type(value)(items)
        if not isinstance(value, Tensor):
            return value
        if id(value) not in made:
            is_parameter = isinstance(value, nn.Parameter)
            if not is_traceable_wrapper_subclass(value):
                made[id(value)] = fakes.parameter(value) if is_parameter else fakes.like(value)
            else:
                new = fake_wrapped(value, fakes)
                made[id(value)] = nn.Parameter(new, value.requires_grad) if is_parameter else new
            _hook(made[id(value)], value)
            if holds_sizes(value):
                attach(made[id(value)], value)
        return made[id(value)]

    modes = {module: module.training for module in model.modules()}  # a step may change them
    try:
        for module in modes:
            for table in _tables(module):
                before = _content(table)
                tables.append((table, before))
                for key, value in before.items():
                    new = fake(value)
                    if new is not value:
                        table[key] = new
        made.clear()  # what the model lets go of (FSDP2 of whole parameters) is free
        with _fresh_caches(model):
            yield
    finally:
        for table, before in tables:
            _put_back(table, before)
        for module, training in modes.items():
            module.training = training


def _hook(fake: Tensor, like: Tensor) -> None:
    """Give `fake` the user's hooks on gradients of `like`: they may make tensors, or step an optimizer in backward.

    DeepSpeed's stay: what they do is done by rules of ours (memory/distributed/).
    """
    for name, register in (
        ("_backward_hooks", fake.register_hook),
        ("_post_accumulate_grad_hooks", fake.register_post_accumulate_grad_hook),
    ):
        for hook in (getattr(like, name, None) or {}).values():
            if not getattr(getattr(hook, "func", hook), "__module__", "").startswith("deepspeed."):
                register(hook)


def tensors_held(module: nn.Module) -> dict[tuple[int, Any, int], Tensor]:
    """The tensors that `module` itself holds beside its parameters and buffers, by where it holds them."""
    found = {}
    for number, table in enumerate(_tables(module)):
        for key, value in _content(table).items() if number >= 2 else ():
            for place, item in enumerate(value if isinstance(value, tuple) else (value,)):
                if isinstance(item, Tensor):
                    found[number, key, place] = item
    return found


def _tables(module: nn.Module) -> Iterator[dict[Any, Any] | list[Any]]:
    """Where `module` holds tensors: its own tables, and the lists and dicts among its attributes (PEFT's indices)."""
    yield from (module._parameters, module._buffers, module.__dict__)
    for name, value in list(vars(module).items()):
        if type(value) in (list, dict) and name not in _TORCH:
            yield value


def _content(table: dict[Any, Any] | list[Any]) -> dict[Any, Any]:
    return dict(table) if isinstance(table, dict) else dict(enumerate(table))


def _put_back(table: dict[Any, Any] | list[Any], before: dict[Any, Any]) -> None:
    """Take fakes out of `table`; what stood in their places is there again."""
    faked = [key for key, value in _content(table).items() if _holds_fake(value)]
    if isinstance(table, list):
        if faked or any(isinstance(value, Tensor) for value in before.values()):
            table[:] = before.values()
        return
    for key in faked:
        if key not in before:
            del table[key]
    for key, value in before.items():
        if isinstance(value, Tensor) or key in faked:
            table[key] = value


def _holds_fake(value: Any) -> bool:
    return type(value) is FakeTensor or (isinstance(value, tuple) and any(map(_holds_fake, value)))


@contextmanager
def _fresh_caches(model: nn.Module) -> Iterator[None]:
    """Methods that remember their results (`functools.lru_cache`) begin with none, and forget those of the trace.

    Qwen-Image's rotary frequencies are such: real ones from before are not the step's, and fakes would outlive it.
    """
    with ExitStack() as stack:
        for kind in {kind for module in model.modules() for kind in type(module).__mro__}:
            for name, method in list(vars(kind).items()):
                if _remembers(method):
                    stack.enter_context(patch.object(kind, name, functools.cache(inspect.unwrap(method))))
        yield


def _remembers(method: Any) -> bool:
    """Whether `method` is a cache, or a function around one of its own, as `lru_cache_unless_export` of diffusers."""
    around = inspect.isfunction(method) and hasattr(method, "__wrapped__")
    held = [method, *(cell.cell_contents for cell in method.__closure__ or ())] if around else [method]
    return any(isinstance(one, _CACHE) and one.__wrapped__ is inspect.unwrap(method) for one in held)


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
def device_calls(tracker: Tracker) -> Iterator[None]:
    """What a step asks of its device by Python's functions is told to the tracker, also where there is no device."""

    def forget_peaks(device: Any = None) -> None:
        """The record has the whole step."""

    answers = {
        "empty_cache": tracker.empty_cache,
        "synchronize": tracker.await_device,
        "reset_peak_memory_stats": forget_peaks,
    }
    with ExitStack() as stack:
        for module in (torch.cuda, torch.accelerator):
            for name, answer in answers.items():
                stack.enter_context(patch.object(module, name, answer, create=True))
        yield


@contextmanager
def lists_of_fakes(tracker: Tracker, values: Values) -> Iterator[None]:
    """`tolist` copies a tensor to the host once; a fake one asks for each number, and the host waits each time."""
    each = FakeTensor.tolist

    def tolist(tensor: FakeTensor) -> Any:
        numbers = values.numbers(tensor) if tensor.dim() else None
        if numbers is None:
            return each(tensor)
        if not tracker.is_ignored(tensor):
            tracker.await_device()
        return numbers

    with patch.object(FakeTensor, "tolist", tolist):
        yield


@contextmanager
def quiet() -> Iterator[bool]:
    """Yields whether objects may be frozen (`gc.freeze`): not if the caller has frozen some, which nothing could tell
    from ours afterwards.

    Random numbers as they were, and reference cycles freed between steps rather than whenever Python chooses to.

    Python's and numpy's too: a forward draws its masks or its LayerDrop from them, and data its augmentation. What an
    op refuses is raised; that torch logs it too is left out.
    """
    enabled, python, drawn = gc.isenabled(), random.getstate(), numpy.random.get_state()
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    silent, logger.disabled = logger.disabled, True
    gc.disable()
    freezes = not gc.get_freeze_count()
    if freezes:
        gc.freeze()  # collections then look only at what the step makes
    try:
        with torch.random.fork_rng(devices=[]):
            yield freezes
    finally:
        logger.disabled = silent
        random.setstate(python)
        numpy.random.set_state(drawn)
        if freezes:
            gc.unfreeze()
        if enabled:
            gc.enable()
