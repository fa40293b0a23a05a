"""Runs a module's forward under activation checkpointing so that its second run repeats the first exactly.

`Checkpointed` stands in for `module.forward` as an instance attribute: hooks (FSDP's, accelerate's) stay outside of
the region, state-dict keys stay as they are, and a deep copy of the model gets copies of its own. The work is done by
`torch.utils.checkpoint` without reentrant autograd; added are, in either run, the arguments as the first run found
them (`arguments.py`), the random state (kept only where the first run drew from it), the buffers (`buffers.py`),
tensors in attributes (`attributes.py`), the parameters and modes (`parameters.py`), hooks (`hooks.py`), and kept
operator outputs (`selective.py`).
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ckpt_ft.errors import UserError

from . import parameters, rng
from .arguments import Arguments, Call, Inputs, is_cache, leaves
from .attributes import Attributes, put
from .buffers import Buffers, swap_in, swap_out
from .hooks import hooks_on, swap
from .parameters import Found, modules_in
from .selective import Selection, compiled_contexts
from .standin import StandIn

_CACHE_ARGUMENTS = ("past_key_values", "past_key_value", "layer_past", "cache_params")


class Checkpointed(StandIn):
    """A module's forward under activation checkpointing; acts where gradients are on, in train and eval mode alike."""

    def __init__(self, module: nn.Module, selection: Selection | None) -> None:
        super().__init__(module)
        self.selection = selection
        self.buffers = Buffers()
        self.attributes = Attributes()
        self.inputs = Inputs(module)
        self.keeps_cache = getattr(module, "_can_checkpoint_with_cache", False)  # only reads it (transformers >= 5.23)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if self.module.training:
            if not self.keeps_cache:
                args, kwargs = _without_cache(args, kwargs)
        elif any(is_cache(value) for value in (*args, *kwargs.values())):  # decoding with gradients
            return self.forward(*args, **kwargs)
        return self.run(args, kwargs)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():  # the compiler sees to random state and buffers itself
            forward = functools.partial(self.forward, **kwargs) if kwargs else self.forward
            if self.selection is None:
                return checkpoint(forward, *args, use_reentrant=False)
            context_fn = functools.partial(compiled_contexts, self.selection)
            return checkpoint(forward, *args, use_reentrant=False, context_fn=context_fn)
        # the runs' contexts are entered by the call: torch's own are left to `set_checkpoint_debug_enabled`
        call = Call(self.forward, runs(self, args, kwargs), self.inputs, args, kwargs)
        return checkpoint(call, *call.saved, use_reentrant=False, preserve_rng_state=False)


def runs(region: Checkpointed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[FirstRun, SecondRun]:
    """The contexts of a region's first and second run with these arguments."""
    modules = modules_in(region.module)
    first = FirstRun(region, modules, _accelerators(modules, args, kwargs))
    return first, SecondRun(first)


class FirstRun:
    """Notes what the second run must find as the first one did."""

    __slots__ = (
        "attributes", "buffers", "devices", "found", "hooks", "keeping", "modules", "random", "region", "replaying",
    )  # fmt: skip

    def __init__(self, region: Checkpointed, modules: dict[nn.Module, None], devices: set[torch.device]) -> None:
        self.region, self.modules, self.devices = region, modules, devices
        self.found: Found | None = None  # as it ended, once it has
        self.keeping: AbstractContextManager[Any] = nullcontext()
        self.replaying: AbstractContextManager[Any] = nullcontext()
        if region.selection is not None:
            self.keeping, self.replaying = region.selection.contexts()

    @property
    def device_type(self) -> str:
        return next((device.type for device in self.devices), "cpu")

    def __enter__(self) -> None:
        self.buffers = self.region.buffers.before(self.modules)
        self.attributes = self.region.attributes.before(self.modules, self.region.module.training)
        self.random = rng.snapshot(*self.devices, host=True)
        self.keeping.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *exception: Any) -> None:
        self.keeping.__exit__(kind, *exception)
        if kind is not None:  # a run that failed, or was stopped inside of another region's second run
            return
        for buffer in self.buffers:
            buffer.look()
        self.attributes = self.region.attributes.after(self.attributes, self.modules, self.region.module.training)
        self.random = self.random.moved(rng.snapshot(*self.devices, host=True))
        self.found, self.hooks = Found(self.modules), hooks_on(self.modules)


class SecondRun:
    """Sets generators, buffers and modules to where the first run found them, and back to where the second one did."""

    __slots__ = ("attributes", "buffers", "first", "hooks", "random", "swapped")

    def __init__(self, first: FirstRun) -> None:
        self.first = first

    def __enter__(self) -> None:
        first = self.first
        if first.found is None:
            kind = type(first.region.module).__name__
            raise UserError(
                f"{kind}: its forward runs a backward of its own (torch.autograd.grad) over what a checkpoint has "
                f"dropped; re-run only its parts (modules:mlp), or take 'pointwise' or 'offload'"
            )
        self.swapped, self.hooks = first.found.swap_in(), hooks_on(first.modules)
        if self.hooks != first.hooks:
            swap(self.hooks, first.hooks)
        self.buffers = swap_in(first.buffers)
        self.attributes = put(first.attributes)
        self.random = first.random.now()
        first.random.restore()
        first.replaying.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self.first.replaying.__exit__(*exception)
        self.random.restore()
        put(self.attributes)
        swap_out(self.buffers)
        if self.hooks != self.first.hooks:
            swap(self.first.hooks, self.hooks)
        parameters.swap_out(self.swapped)
        self.attributes, self.buffers = [], []


def _accelerators(modules: dict[nn.Module, None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[torch.device]:
    """Where the region may draw random numbers besides the CPU: the devices of what it is given and of its weights."""
    parameter = next((p for module in modules for p in module._parameters.values() if p is not None), None)
    given = (parameter, *leaves(args), *leaves(kwargs))
    return {x.device for x in given if isinstance(x, torch.Tensor) and not (x.is_cpu or x.is_meta)}


def _without_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Arguments without a KV cache, which nobody reads in training and which holds memory."""
    if any(is_cache(value) for value in args):
        args = tuple(None if is_cache(value) else value for value in args)
    dropped = {key: None for key, value in kwargs.items() if is_cache(value) or key in _CACHE_ARGUMENTS}
    if kwargs.get("use_cache"):
        dropped["use_cache"] = False  # type: ignore[assignment]
    return args, {**kwargs, **dropped} if dropped else kwargs
