"""What stands for a discarded tensor until backward asks for it, and how its cheap call is run again to rebuild it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from ckpt_ft.checkpointing import rng
from ckpt_ft.checkpointing.tensor_identity import View, looked_at, version_of, view_of, written_to

CLAIM = "_ckpt_ft_claim"
_rebuilding = threading.RLock()  # backward has one thread per device
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_set_grad = torch._C._set_grad_enabled

Saved = tuple[torch.Tensor, int]  # a tensor and its version when it was saved


class CheapCall(Protocol):
    """A norm, an activation, a product, ...: what is cheap to run once more."""

    random: bool  # draws random numbers
    inplace: bool  # writes its output over its first argument

    @property
    def forward(self) -> Callable[..., Any]:
        """The call as it is first made."""

    def state(self) -> Any:
        """What `again` needs to know of the moment of the first call: parameters, mode."""

    def again(self, state: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Build the same graph on the same inputs as `forward` did, without its side effects.

        Raises RuntimeError when what `state` tells of has changed since.
        """


class Discarded:
    """Stands for a tensor that one of a cheap call's own nodes saved."""

    __slots__ = ("__weakref__", "source")

    def __init__(self, source: Frame) -> None:
        self.source: Frame | torch.Tensor = source

    def get(self) -> torch.Tensor:
        """The tensor, rebuilt with all others of its cheap call when first asked for."""
        if type(self.source) is Frame:
            if torch.is_grad_enabled():
                raise RuntimeError(
                    "double backward (create_graph=True) through an activation that the policy 'pointwise' discarded; "
                    "train this model without 'pointwise'"
                )
            with _rebuilding:
                if type(self.source) is Frame:
                    self.source.rebuild()
        return self.source  # type: ignore[return-value]


class Reader(Discarded):
    """Stands for a tensor on the storage of a cheap call's `index`-th output that a node outside of it saved."""

    __slots__ = ("index", "view")

    def __init__(self, source: Frame, index: int, view: View) -> None:
        self.source, self.index, self.view = source, index, view


class Handed:
    """A tensor handed on to the saved-tensor hooks that were active around the model (offload, `save_on_cpu`)."""

    __slots__ = ("packed", "unpack")

    def __init__(self, packed: Any, unpack: Callable[[Any], torch.Tensor]) -> None:
        self.packed, self.unpack = packed, unpack

    def get(self) -> torch.Tensor:
        """What the outer hook gives back."""
        return self.unpack(self.packed)


class Claim:
    """Says that a storage holds a cheap call's output and can be rebuilt, as long as nobody writes into it."""

    __slots__ = ("casts", "frame", "index", "version")

    def __init__(self, frame: Frame, index: int, output: torch.Tensor) -> None:
        self.frame, self.index = frame, index
        self.version = output._version  # views and detached aliases count together
        self.casts: dict[Any, Frame] | None = None

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether what `tensor`, an alias of the storage, holds is still the cheap call's output."""
        return tensor._version == self.version and self.frame.args is not None

    def discard(self, tensor: torch.Tensor) -> Reader:
        """A handle in place of `tensor`, which the claim covers."""
        handle = Reader(self.frame, self.index, view_of(tensor))
        self.frame.readers.append(weakref.ref(handle))
        return handle


class Input:
    """A tensor that a cheap call was given."""

    __slots__ = ("held", "requires_grad")

    def __init__(self, held: Discarded | Handed | Saved, requires_grad: bool) -> None:
        self.held, self.requires_grad = held, requires_grad

    def get(self) -> torch.Tensor:
        """A leaf with the input's value."""
        tensor = unpack(self.held).detach()
        return tensor.requires_grad_() if self.requires_grad else tensor


class Frame:
    """One run of a cheap call in one forward pass, and the handles that depend on it."""

    __slots__ = ("args", "autocast", "call", "depth", "internals", "kwargs", "random", "readers", "state")

    def __init__(
        self, call: CheapCall, args: list[Any], kwargs: dict[str, Any], depth: int, device: torch.device
    ) -> None:
        self.call, self.depth = call, depth
        self.args: list[Any] | None = args  # None once rebuilt
        self.kwargs = kwargs
        self.internals: list[weakref.ref[Discarded] | None] = []
        self.readers: list[weakref.ref[Reader]] = []
        self.state = call.state()
        self.random = rng.snapshot(device) if call.random else None
        self.autocast = _autocast(device.type) if torch._C._is_any_autocast_enabled() else None

    def rebuild(self) -> None:
        """Make the call again, fill every handle that is still wanted, let go of the inputs."""
        if self.args is None:
            return
        args = [value.get() if type(value) is Input else value for value in self.args]
        kwargs = self.kwargs and {k: v.get() if type(v) is Input else v for k, v in self.kwargs.items()}
        saved: list[torch.Tensor] = []
        grad = torch.is_grad_enabled()
        _set_grad(True)
        _push_hooks(saved.append, _never)
        try:
            if self.call.inplace:  # the rebuilt input may have other readers
                args[0] = args[0].clone()
            if self.autocast is None and self.random is None and not torch._C._is_any_autocast_enabled():
                output = self.call.again(self.state, args, kwargs)
            else:
                with _autocast_as(self.autocast), _random_as(self.random):
                    output = self.call.again(self.state, args, kwargs)
        finally:
            _pop_hooks()
            _set_grad(grad)
        if len(saved) != len(self.internals):
            raise RuntimeError(
                f"{self.call} saved {len(self.internals)} tensors for backward in forward but {len(saved)} when "
                "recomputed: it does not repeat itself, so 'pointwise' cannot treat it"
            )
        for internal, tensor in zip(self.internals, saved, strict=True):
            if internal is not None and (handle := internal()) is not None:
                handle.source = tensor if tensor.grad_fn is None else tensor.detach()
        saved.clear()  # its tensors' nodes hold the hook, which holds the list
        self._fill_readers(output if isinstance(output, tuple) else (output,))
        self.args, self.kwargs, self.internals, self.readers, self.random = None, {}, [], [], None

    def _fill_readers(self, outputs: tuple[Any, ...]) -> None:
        shared: dict[tuple[int, View], torch.Tensor] = {}
        for reference in self.readers:
            if (handle := reference()) is not None:
                key = (handle.index, handle.view)
                tensor = shared.get(key)
                if tensor is None:
                    tensor = shared[key] = looked_at(outputs[handle.index], handle.view)
                handle.source = tensor


def claim_on(tensor: torch.Tensor) -> Claim | None:
    """The claim that covers `tensor`, if any."""
    claim: Claim | None = getattr(tensor.untyped_storage(), CLAIM, None)
    return claim if claim is not None and claim.covers(tensor) else None


def unpack(packed: Discarded | Handed | Saved) -> torch.Tensor:
    """The other saved-tensor hook."""
    kind = type(packed)
    if kind is not tuple:
        if kind is not Handed and type(packed.source) is not Frame:  # type: ignore[union-attr]
            return packed.source  # type: ignore[union-attr,return-value]
        return packed.get()  # type: ignore[union-attr]
    tensor, version = packed  # type: ignore[misc]
    if version_of(tensor) != version:
        raise written_to(tensor, version, view_of(tensor))
    return tensor


def _autocast(device_type: str) -> tuple[str, torch.dtype] | None:
    return (device_type, torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else None


@contextmanager
def _autocast_as(first: tuple[str, torch.dtype] | None) -> Iterator[None]:
    """Autocast as it was in the first run: backward usually runs without."""
    if first is not None:
        with torch.autocast(first[0], dtype=first[1]):
            yield
        return
    device_types = [kind for kind in ("cpu", torch._C._get_accelerator().type) if torch.is_autocast_enabled(kind)]
    with torch.autocast(device_types[0] if device_types else "cpu", enabled=False):
        yield


@contextmanager
def _random_as(first: rng.Snapshot | None) -> Iterator[None]:
    """The generators as they were before the first run."""
    if first is None:
        yield
        return
    now = first.now()
    first.restore()
    try:
        yield
    finally:
        now.restore()


def _never(packed: Any) -> torch.Tensor:
    raise AssertionError("the graph of a recompute is never run backward")
