"""How a block is called: what its arguments are to the call of the block before it, and what it makes of them."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

_ATOMS = (bool, int, float, str, type(None), torch.dtype, torch.device)

Wire = tuple[str, Any]  # ("output", which of the block before), ("argument", which of it), ("value", what), or _NEW
_NEW: Wire = "new", None
_OBJECT = object()  # in the place of one that is neither a tensor nor a plain value


class Call:
    """A call of a block: what it was given and what it returned, tensors held weakly."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given, self.spec = tree_flatten((args, kwargs))
        self.given = [_reference(leaf) for leaf in given]
        self.returned: list[Any] = []
        self.returned_spec: TreeSpec | None = None
        self.outputs: list[Wire] = []  # what each output is to the arguments

    def returns(self, out: Any) -> None:
        """Note what came of it."""
        leaves, self.returned_spec = tree_flatten(out)
        self.returned = [_reference(leaf) for leaf in leaves]
        self.outputs = [_wire(leaf, ("argument", self.given)) for leaf in self.returned]

    def wires(self, before: Call) -> list[Wire]:
        """What each argument is to the call of the block before; what that handed on is an argument of both."""
        return [_wire(leaf, ("argument", before.given), ("output", before.returned)) for leaf in self.given]

    def holders(self, wires: list[Wire]) -> list[tuple[int, int, int]]:
        """How many hold each argument that the block before made: its Python object, C++ object, storage."""
        found = []
        for (kind, _), leaf in zip(wires, self.given, strict=True):
            if kind == "output":
                tensor = leaf()
                storage = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
                found.append((sys.getrefcount(tensor), tensor._use_count(), storage))
        return found

    def passed_on(self, before: Call, wires: list[Wire]) -> Any:
        """What the block before returned, of this call's arguments: all that was new has to be among them."""
        handed = {at: self.given[k]() for k, (kind, at) in enumerate(wires) if kind == "output"}
        leaves = []
        for k, (leaf, (kind, at)) in enumerate(zip(before.returned, before.outputs, strict=True)):
            leaves.append(leaf if kind == "value" else self.given[at]() if kind == "argument" else handed[k])
        assert before.returned_spec is not None, "it has returned"
        return tree_unflatten(leaves, before.returned_spec)


def are_known(wires: list[Wire]) -> bool:
    """Whether every argument comes from the call before, or is a plain value."""
    return _NEW not in wires


def are_handed_on(outputs: list[Wire], wires: list[Wire]) -> bool:
    """Whether whatever is new among a block's `outputs` is an argument of the next, whose wires these are."""
    handed = {at for kind, at in wires if kind == "output"}
    return all(wire != _NEW or k in handed for k, wire in enumerate(outputs))


def _reference(leaf: Any) -> Any:
    """What keeps no tensor alive: objects may hold some (a KV cache)."""
    if isinstance(leaf, Tensor):
        return weakref.ref(leaf)
    return leaf if isinstance(leaf, _ATOMS) else _OBJECT


def _wire(leaf: Any, *sources: tuple[str, list[Any]]) -> Wire:
    if isinstance(leaf, weakref.ref):
        tensor = leaf()
        assert isinstance(tensor, Tensor), "it is in use"
        mere = _is_mere(tensor)
        for kind, leaves in sources:
            for at, other in enumerate(leaves):
                if isinstance(other, weakref.ref) and other() is tensor:
                    return _NEW if kind == "output" and not mere else (kind, at)
        return _NEW
    return _NEW if leaf is _OBJECT else ("value", (type(leaf), leaf))


def _is_mere(tensor: Tensor) -> bool:
    """Whether nothing depends on the values of what a block has made: they are not known (values.py) and no counts."""
    return tensor.is_floating_point() and "_value" not in vars(tensor)
