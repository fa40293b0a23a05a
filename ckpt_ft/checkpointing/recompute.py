"""Runs a module's forward under activation checkpointing so that its second run repeats the first exactly.

`Checkpointed` stands in for `module.forward` as an instance attribute: hooks (FSDP's, accelerate's) stay outside of
the region, state-dict keys do not change, and a deep copy of the model gets its own copies. The tensors that the first
run saves for backward are dropped (`dropped_tensors.py`). The second run starts from the first run's arguments
(`arguments.py`), module state (`module_state.py`) and random state (restored only if the first run drew from it), and
gets the kept operator outputs (`selective.py`). In verified steps, it is checked that both runs save the same tensors
(`verify.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ckpt_ft.errors import UserError

from . import rng
from .arguments import ATOMS, Call, Inputs, leaves
from .dropped_tensors import DroppedTensors, RunComplete, pop_hooks, push_hooks
from .kv_cache import is_cache
from .module_contents import Contents
from .module_state import ModuleState, StateBeforeFirstRun
from .selective import Selection, compiled_contexts
from .standin import StandIn
from .verify import SavedTensorProof, TensorComparison

_MOST_STRUCTURES = 64  # the number of ways of being called that a region remembers


class Checkpointed(StandIn):
    """A module's forward under activation checkpointing; acts where gradients are on, in train and eval mode alike."""

    def __init__(self, module: nn.Module, selection: Selection | None) -> None:
        super().__init__(module)
        self.selection = selection
        self.state = ModuleState()
        self.inputs = Inputs(module)
        self.calls = 0
        self.structures: set[Any] = set()  # of earlier calls: mode, kinds of arguments, what is trained

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or torch.jit.is_tracing():  # a TorchScript graph cannot call Python again
            return self.forward(*args, **kwargs)
        if not self.module.training and any(map(is_cache, (*args, *kwargs.values()))):  # decoding with gradients
            return self.forward(*args, **kwargs)
        return self.run(args, kwargs)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():  # the compiler sees to random state and buffers itself
            forward = functools.partial(self.forward, **kwargs) if kwargs else self.forward
            if self.selection is None:
                return checkpoint(forward, *args, use_reentrant=False)
            context_fn = functools.partial(compiled_contexts, self.selection)
            return checkpoint(forward, *args, use_reentrant=False, context_fn=context_fn)
        return RegionCall(self.forward, runs(self, args, kwargs), self.inputs, args, kwargs)()

    def comparison(self, structure: Any) -> TensorComparison | None:
        """Return a comparison if this call of the region, whose arguments have this `structure`, is verified."""
        self.calls += 1
        changed = structure not in self.structures
        if changed and len(self.structures) < _MOST_STRUCTURES:
            self.structures.add(structure)
        return self.verification.region(self.name, self.module, self.calls, changed)


def runs(region: Checkpointed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[FirstRun, SecondRun]:
    """Return the contexts of a region's first and second run with these arguments."""
    given = [leaf for leaf in (*leaves(args), *leaves(kwargs)) if type(leaf) not in ATOMS]
    tensors = [leaf for leaf in given if isinstance(leaf, torch.Tensor)]
    others = [leaf for leaf in given if not isinstance(leaf, torch.Tensor)] if len(tensors) < len(given) else ()
    contents = region.state.contents(region.module, others)
    first = FirstRun(region, contents, (region.module.training, tuple(map(type, args)), tuple(kwargs)), tensors)
    return first, SecondRun(first)


class RegionCall(DroppedTensors):
    """One call of a region, which drops all tensors that it saves for backward except its inputs."""

    def __init__(
        self,
        forward: Callable[..., Any],
        contexts: tuple[FirstRun, SecondRun],
        inputs: Inputs,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        super().__init__()
        self.call = Call(forward, contexts, inputs, args, kwargs)

    def __call__(self) -> Any:
        """The first run."""
        push_hooks(self.pack, self.unpack)
        try:
            return self.call()
        finally:
            pop_hooks()

    def repeat(self) -> None:
        """The second run."""
        self.call.rerun()


class FirstRun:
    """Context of the first run; records the state from which the second run must start."""

    __slots__ = (
        "comparison", "contents", "devices", "ended", "keeping", "parameters", "proof", "random", "region",
        "replaying", "state", "structure",
    )  # fmt: skip

    def __init__(
        self, region: Checkpointed, contents: Contents, structure: tuple[Any, ...], given: list[torch.Tensor]
    ) -> None:
        self.region, self.contents, self.structure, self.ended = region, contents, structure, False
        # where the region may draw random numbers besides the CPU
        self.devices = {x.device for x in (*contents.parameters[:1], *given) if not (x.is_cpu or x.is_meta)}
        self.keeping = self.replaying = _NOTHING
        if region.selection is not None:
            self.keeping, self.replaying = region.selection.contexts()

    @property
    def device_type(self) -> str:
        return next((device.type for device in self.devices), "cpu")

    def drawn(self) -> rng.Snapshot:
        """Return the states of the generators that the region may draw from."""
        return rng.snapshot(*self.devices, host=True, own=self.contents.generators)

    def __enter__(self) -> None:
        region = self.region
        comparison = self.comparison = region.comparison((*self.structure, self.contents.trained))
        self.state = StateBeforeFirstRun(region.state, self.contents, region.module.training)
        self.random = self.drawn()
        self.proof: SavedTensorProof | None = None
        if comparison is not None:
            self.proof = SavedTensorProof(comparison)
            self.proof.enter_first_run()
        self.keeping.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *exception: Any) -> None:
        self.keeping.__exit__(kind, *exception)
        if self.proof is not None:
            self.proof.exit()
        if kind is not None:  # a run that failed, or was stopped inside of another region's second run
            return
        self.random = self.random.moved(self.drawn())
        self.state.end()
        if self.comparison is not None:  # not before: bitsandbytes casts a bias once, in its first forward
            self.parameters = [(self.comparison.saved(p, name), p) for name, p in self.state.parameters()]
        self.ended = True


class SecondRun:
    """Context of the second run; restores the first run's initial generators and modules, and undoes this on exit."""

    __slots__ = ("before", "first", "tensors", "there")

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
        self.before = first.random.now() if first.comparison is None else first.drawn()
        if first.comparison is not None:
            self.tensors = [(first.comparison.saved(x, name), x) for name, x in first.state.tensors()]
        self.there = first.state.restore()
        first.random.restore()
        if first.proof is not None:
            first.proof.enter_second_run()
        first.replaying.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *exception: Any) -> None:
        first = self.first
        first.replaying.__exit__(kind, *exception)
        if first.proof is not None:
            first.proof.exit()
        self.before.restore()
        first.state.undo(self.there)
        del self.there
        if first.comparison is not None and (kind is None or issubclass(kind, RunComplete)):
            for slot, tensor in (*first.parameters, *self.tensors):  # which the second run must leave unchanged
                first.comparison.restored(slot, tensor)
            self.tensors = []


_NOTHING: AbstractContextManager[Any] = nullcontext()
