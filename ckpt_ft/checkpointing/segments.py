"""A run of consecutive blocks as one checkpoint: only the first block's input is kept (Chen et al. 2016, section 3).

The model loops over its own blocks and gives each of them a mask and keyword arguments, so a run cannot be wrapped in
one module. Instead its blocks share a frame: saved-tensor hooks drop what they save, and the first that backward
asks for re-runs all of them in order. A block joins the frame of the one before it when that one's output is, as the
same object, among its arguments; otherwise it starts a frame of its own, and stays correct.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from .recompute import Checkpointed, FirstRun, SecondRun, _device, runs
from .selective import Selection


class Segment:
    """What the blocks of a run share: the frame that is open, held weakly, for saved tensors keep it alive."""

    def __init__(self) -> None:
        self.open: Callable[[], _Frame | None] = _no_frame
        self.joined = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"open": _no_frame, "joined": 0}


def _no_frame() -> None:
    return None


class SegmentMember(Checkpointed):
    """The forward of a block in a segment."""

    def __init__(self, module: nn.Module, selection: Selection | None, segment: Segment, last: bool) -> None:
        super().__init__(module, selection)
        self.segment, self.last = segment, last

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            return super().run(args, kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        frame = self.segment.open()
        if frame is None or not frame.feeds(leaves):
            frame = _Frame()
        else:
            self.segment.joined += 1
        out = frame.call(self, leaves, spec, _device(self.module, args, kwargs))
        self.segment.open = _no_frame if self.last else weakref.ref(frame)
        return out


class _Link:
    """An argument that is an output of an earlier call in the frame."""

    __slots__ = ("call", "leaf")

    def __init__(self, call: int, leaf: int) -> None:
        self.call, self.leaf = call, leaf


class _Held:
    """A tensor argument from outside: detached, or the frame would hold the graph that holds the frame."""

    __slots__ = ("requires_grad", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.requires_grad, self.version = tensor.detach(), tensor.requires_grad, tensor._version

    def again(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                "an input of a checkpointed segment was changed in place after its forward; clone it before"
            )
        return self.tensor.detach().requires_grad_(self.requires_grad)


class _Frame:
    """Calls of blocks, and the tensors that they save: dropped in forward, made again by re-running all calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[SegmentMember, list[Any], TreeSpec, SecondRun, _Autocast]] = []
        self.outputs: dict[int, tuple[weakref.ref[torch.Tensor], _Link]] = {}
        self.saved: list[tuple[torch.Size, torch.dtype]] = []
        self.recomputed: dict[int, torch.Tensor] = {}

    def feeds(self, leaves: list[Any]) -> bool:
        """Whether an output of the last call is among `leaves`."""
        last = len(self.calls) - 1
        return any((link := self.link(leaf)) is not None and link.call == last for leaf in leaves)

    def link(self, leaf: Any) -> _Link | None:
        ref, link = self.outputs.get(id(leaf), (None, None))
        return link if ref is not None and ref() is leaf else None

    def call(self, member: SegmentMember, leaves: list[Any], spec: TreeSpec, device: torch.device) -> Any:
        held = [self.link(leaf) or (_Held(leaf) if _is_variable(leaf) else leaf) for leaf in leaves]
        first: FirstRun
        first, second = runs(member, device)
        self.calls.append((member, held, spec, second, _Autocast(device.type)))
        args, kwargs = tree_unflatten(leaves, spec)
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack), first:
            out = member.forward(*args, **kwargs)
        for index, leaf in enumerate(tree_leaves(out)):
            if isinstance(leaf, torch.Tensor):
                self.outputs[id(leaf)] = weakref.ref(leaf), _Link(len(self.calls) - 1, index)
        return out

    def pack(self, tensor: torch.Tensor) -> int:
        self.saved.append((tensor.shape, tensor.dtype))
        return len(self.saved) - 1

    def unpack(self, slot: int) -> torch.Tensor:
        if slot not in self.recomputed:
            self.recomputed.clear()
            self.recompute()
        return self.recomputed.pop(slot)

    def recompute(self) -> None:
        made = 0

        def pack(tensor: torch.Tensor) -> int:
            nonlocal made
            if (tensor.shape, tensor.dtype) != self.saved[made]:
                raise RuntimeError(
                    f"a segment's second run saved a tensor of {tuple(tensor.shape)} {tensor.dtype} where its first "
                    f"saved {tuple(self.saved[made][0])} {self.saved[made][1]}: a block depends on state outside of it"
                )
            self.recomputed[made] = tensor.detach()
            made += 1
            if made == len(self.saved):
                raise _Complete
            return made - 1

        with torch.autograd.graph.saved_tensors_hooks(pack, _never), torch.enable_grad():
            try:
                self.rerun()
            except _Complete:
                return
        raise RuntimeError(f"a segment's second run saved {made} tensors where its first saved {len(self.saved)}")

    def rerun(self) -> None:
        outputs: list[list[Any]] = []
        for member, held, spec, second, autocast in self.calls:
            leaves = [
                outputs[leaf.call][leaf.leaf]
                if isinstance(leaf, _Link)
                else leaf.again()
                if isinstance(leaf, _Held)
                else leaf
                for leaf in held
            ]
            args, kwargs = tree_unflatten(leaves, spec)
            with autocast.context(), second:
                outputs.append(tree_leaves(member.forward(*args, **kwargs)))


class _Complete(Exception):
    """Every tensor is there; the rest of the second run is not needed."""


class _Autocast:
    """Autocast as it was in forward."""

    def __init__(self, device_type: str) -> None:
        kind = device_type if torch.amp.is_autocast_available(device_type) else "cpu"
        self.arguments = {
            "device_type": kind,
            "dtype": torch.get_autocast_dtype(kind),
            "enabled": torch.is_autocast_enabled(kind),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }

    def context(self) -> AbstractContextManager[Any]:
        return torch.autocast(**self.arguments)  # type: ignore[arg-type]


def _never(packed: int) -> torch.Tensor:
    raise AssertionError("nothing runs backward through a segment's second run")


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, nn.Parameter)
