"""Runs a module's forward under activation checkpointing so that its second run repeats the first exactly.

`Checkpointed` stands in for `module.forward` as an instance attribute: hooks (FSDP's, accelerate's) stay outside of
the region, state-dict keys stay as they are, and a deep copy of the model gets copies of its own. The work is done by
`torch.utils.checkpoint` without reentrant autograd. Added are, for the second run, the arguments as the first run
found them (`arguments.py`), the state of the modules (`module_state.py`), the random state (restored only where the
first run drew from it) and kept operator outputs (`selective.py`); in verified steps also the proof that both runs
save the same tensors (`verify.py`).
"""

from __future__ import annotations

import functools
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils.checkpoint import checkpoint

from ckpt_ft.errors import UserError

from . import rng
from .arguments import Arguments, Call, Inputs, is_cache, leaves
from .module_state import ModuleState, StateBeforeFirstRun, modules_in
from .selective import Selection, compiled_contexts
from .standin import StandIn
from .verify import SavedTensorProof, TensorComparison

_MOST_STRUCTURES = 64  # ways of being called that a region remembers


class Checkpointed(StandIn):
    """A module's forward under activation checkpointing; acts where gradients are on, in train and eval mode alike."""

    def __init__(self, module: nn.Module, selection: Selection | None) -> None:
        super().__init__(module)
        self.selection = selection
        self.state = ModuleState()
        self.inputs = Inputs(module)
        self.keeps_cache = getattr(module, "_can_checkpoint_with_cache", False)  # only reads it (transformers >= 5.23)
        self.dropped = _DroppedCaches()
        self.calls = 0
        self.structures: set[Any] = set()  # of calls so far: mode, kinds of arguments, what is trained

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if self.module.training:
            if not self.keeps_cache:
                args, kwargs = self.dropped.without_cache(self.module, args, kwargs)
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
        contexts = runs(self, args, kwargs)
        if contexts is None:
            return self.forward(*args, **kwargs)
        # the runs' contexts are entered by the call: torch's own are left to `set_checkpoint_debug_enabled`
        call = Call(self.forward, contexts, self.inputs, args, kwargs)
        return checkpoint(call, *call.saved, use_reentrant=False, preserve_rng_state=False, determinism_check=_LIGHT)

    def comparison(self, structure: Any) -> TensorComparison | None:
        """A comparison if this call of the region is to be verified; `structure` is how it is called."""
        self.calls += 1
        changed = structure not in self.structures
        if changed and len(self.structures) < _MOST_STRUCTURES:
            self.structures.add(structure)
        return self.verification.region(self.name, self.module, self.calls, changed)


def runs(region: Checkpointed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[FirstRun, SecondRun] | None:
    """The contexts of a region's first and second run with these arguments.

    None if layers of it are still lazy: their first call makes parameters, which no second run can repeat.
    """
    modules = modules_in(region.module)
    if any(isinstance(module, LazyModuleMixin) for module in modules):
        return None
    first = FirstRun(region, modules, args, kwargs)
    return first, SecondRun(first)


class FirstRun:
    """Notes what the second run must find as the first one did."""

    __slots__ = (
        "comparison",
        "devices",
        "ended",
        "found",
        "keeping",
        "modules",
        "parameters",
        "proof",
        "random",
        "region",
        "replaying",
        "structure",
    )  # fmt: skip

    def __init__(
        self, region: Checkpointed, modules: dict[nn.Module, None], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.region, self.modules, self.ended = region, modules, False
        self.devices = _accelerators(modules, args, kwargs)
        self.structure = (region.module.training, tuple(map(type, args)), tuple(kwargs))
        self.keeping: AbstractContextManager[Any] = nullcontext()
        self.replaying: AbstractContextManager[Any] = nullcontext()
        if region.selection is not None:
            self.keeping, self.replaying = region.selection.contexts()

    @property
    def device_type(self) -> str:
        return next((device.type for device in self.devices), "cpu")

    def __enter__(self) -> None:
        region = self.region
        self.found = StateBeforeFirstRun(region.state, self.modules, region.module.training)
        self.comparison = comparison = region.comparison((*self.structure, self.found.trained))
        self.random = rng.snapshot(*self.devices, host=True)
        self.proof: SavedTensorProof | None = None
        if comparison is not None:
            self.proof = SavedTensorProof(comparison)
            self.parameters = [(comparison.saved(p, name), p) for name, p in self.found.parameters()]
            self.proof.enter_first_run()
        self.keeping.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *exception: Any) -> None:
        self.keeping.__exit__(kind, *exception)
        if self.proof is not None:
            self.proof.exit()
        if kind is not None:  # a run that failed, or was stopped inside of another region's second run
            return
        self.found.end()
        self.random = self.random.moved(rng.snapshot(*self.devices, host=True))
        self.ended = True


class SecondRun:
    """Sets generators and modules to where the first run found them, and back to where the second one did."""

    __slots__ = ("before", "first", "random", "state", "there")

    def __init__(self, first: FirstRun) -> None:
        self.first = first

    def __enter__(self) -> None:
        first = self.first
        if not first.ended:
            kind = type(first.region.module).__name__
            raise UserError(
                f"{kind}: its forward runs a backward of its own (torch.autograd.grad) over what a checkpoint has "
                f"dropped; re-run only its parts (modules:mlp), or take 'pointwise' or 'offload'"
            )
        if first.comparison is not None and first.proof is not None:
            self.before = rng.snapshot(*first.devices, host=True)
            self.state = [(first.comparison.saved(x, name), x) for name, x in first.found.tensors()]
            for change in first.found.changes():
                first.comparison.note(change)
        self.there = first.found.restore()
        self.random = first.random.now()
        first.random.restore()
        if first.proof is not None:
            first.proof.enter_second_run()
        first.replaying.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *exception: Any) -> None:
        first = self.first
        first.replaying.__exit__(kind, *exception)
        if first.proof is not None:
            first.proof.exit()
        self.random.restore()
        first.found.undo(self.there)
        del self.there
        if first.comparison is not None and (kind is None or kind.__name__ in _ENDS):
            self._prove(first.comparison)

    def _prove(self, comparison: TensorComparison) -> None:
        """That the second run left random state, parameters, buffers and attributes as it found them."""
        first = self.first
        for slot, tensor in (*first.parameters, *self.state):
            comparison.restored(slot, tensor)
        self.state = []
        if moved := self.before.moved(rng.snapshot(*first.devices, host=True)).states:
            comparison.differs(0, f"random state: the second run drew from {', '.join(map(str, moved))}")


_ENDS = ("_StopRecomputationError", "_Complete")  # how a second run is stopped once all saved tensors are there
_LIGHT = "default"


def _accelerators(modules: dict[nn.Module, None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[torch.device]:
    """Where the region may draw random numbers besides the CPU: the devices of what it is given and of its weights."""
    parameter = next((p for module in modules for p in module._parameters.values() if p is not None), None)
    given = (parameter, *leaves(args), *leaves(kwargs))
    return {x.device for x in given if isinstance(x, torch.Tensor) and not (x.is_cpu or x.is_meta)}


class _DroppedCaches:
    """KV caches that a region was given in training and not handed on: nobody reads them, and they hold memory."""

    def __init__(self) -> None:
        self.last: weakref.ref[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.last = None

    def without_cache(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The arguments without a cache of transformers, unless it holds something that the block would read.

        Raises:
            UserError: the same cache comes a second time, so the block would have read what it wrote the first time.
        """
        caches = [value for value in (*args, *kwargs.values()) if is_cache(value)]
        if not caches or any(map(_is_filled, caches)):
            return args, kwargs
        if self.last is not None and self.last() is caches[0]:
            raise UserError(
                f"{type(module).__name__} was given the same KV cache twice in training, and reads in its second call "
                "what it wrote in its first; train without a cache (use_cache=False), or with 'pointwise' or 'offload'"
            )
        self.last = weakref.ref(caches[0])
        args = tuple(None if is_cache(value) else value for value in args)
        kwargs = {key: None if is_cache(value) else value for key, value in kwargs.items()}
        return args, {**kwargs, "use_cache": False} if kwargs.get("use_cache") else kwargs


def _is_filled(cache: Any) -> bool:
    """Whether a cache of transformers holds keys and values, or states, of any layer."""
    parts = [getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    if any(part is not None for part in parts):
        return any(part is not None and _is_filled(part) for part in parts)
    return any(getattr(layer, "is_initialized", True) for layer in getattr(cache, "layers", [None]))
