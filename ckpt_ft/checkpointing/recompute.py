"""Runs a module's forward under activation checkpointing so that its second run repeats the first exactly.

`Checkpointed` stands in for `module.forward` as an instance attribute: hooks (FSDP's, accelerate's) stay outside of
the region, state-dict keys stay as they are, and a deep copy of the model gets copies of its own. The work is done by
`torch.utils.checkpoint` without reentrant autograd; added are, in either run, the random state (kept only where the
first run drew from it), the buffers (`buffers.py`), kept operator outputs (`selective.py`), and a KV cache that is
never written twice.
"""

from __future__ import annotations

import functools
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from . import rng
from .buffers import Buffers, swap_in, swap_out
from .selective import Selection, compiled_contexts
from .standin import StandIn

_CACHE_ARGUMENTS = ("past_key_values", "past_key_value", "layer_past", "cache_params")


class Checkpointed(StandIn):
    """A module's forward under activation checkpointing; acts where gradients are on, in train and eval mode alike."""

    def __init__(self, module: nn.Module, selection: Selection | None) -> None:
        super().__init__(module)
        self.selection = selection
        self.buffers = Buffers(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if self.module.training:
            args, kwargs = _without_cache(self.module, args, kwargs)
        elif any(_is_cache(value) for value in (*args, *kwargs.values())):  # decoding with gradients
            return self.forward(*args, **kwargs)
        return self.run(args, kwargs)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forward = functools.partial(self.forward, **kwargs) if kwargs else self.forward
        if torch.compiler.is_compiling():  # the compiler sees to random state and buffers itself
            if self.selection is None:
                return checkpoint(forward, *args, use_reentrant=False)
            context_fn = functools.partial(compiled_contexts, self.selection)
            return checkpoint(forward, *args, use_reentrant=False, context_fn=context_fn)
        return checkpoint(
            forward,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=functools.partial(runs, self, _device(self.module, args, kwargs)),
        )


def runs(region: Checkpointed, device: torch.device) -> tuple[FirstRun, SecondRun]:
    """The contexts of a region's first and second run."""
    first = FirstRun(region, device)
    return first, SecondRun(first)


class FirstRun:
    """Notes what the second run must find as the first one did."""

    def __init__(self, region: Checkpointed, device: torch.device) -> None:
        self.region, self.device = region, device
        self.keeping: AbstractContextManager[Any] = nullcontext()
        self.replaying: AbstractContextManager[Any] = nullcontext()
        if region.selection is not None:
            self.keeping, self.replaying = region.selection.contexts()

    def __enter__(self) -> None:
        self.buffers = self.region.buffers.before()
        self.random: rng.Snapshot | None = rng.snapshot(self.device)
        self.keeping.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self.keeping.__exit__(*exception)
        self.buffers = self.region.buffers.after(self.buffers)
        if self.random == rng.snapshot(self.device):
            self.random = None


class SecondRun:
    """Sets generators and buffers to where the first run found them, and back to where the second one did."""

    def __init__(self, first: FirstRun) -> None:
        self.first = first

    def __enter__(self) -> None:
        first = self.first
        self.current = swap_in(first.buffers)
        if first.random is not None:
            self.random = rng.snapshot(first.device)
            first.random.restore()
        first.replaying.__enter__()

    def __exit__(self, *exception: Any) -> None:
        first = self.first
        first.replaying.__exit__(*exception)
        if first.random is not None:
            self.random.restore()
        swap_out(first.buffers, self.current)
        self.current = []


def _device(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Where the region runs: the device of the first tensor it is given, else of its parameters."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.device
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def _without_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments without a KV cache, which a second run would write again (as transformers' own layers drop it)."""
    if getattr(module, "_can_checkpoint_with_cache", False):  # only reads it (transformers >= 5.23)
        return args, kwargs
    if any(_is_cache(value) for value in args):
        args = tuple(None if _is_cache(value) else value for value in args)
    dropped = {key: None for key, value in kwargs.items() if _is_cache(value) or key in _CACHE_ARGUMENTS}
    if kwargs.get("use_cache"):
        dropped["use_cache"] = False  # type: ignore[assignment]
    return args, {**kwargs, **dropped} if dropped else kwargs


def _is_cache(value: Any) -> bool:
    kind = getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)
    return kind is not None and isinstance(value, kind)
