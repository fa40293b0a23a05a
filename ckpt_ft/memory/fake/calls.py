"""How a block is called: what its arguments are to calls before it, and what it makes of them."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

_ATOMS = (bool, int, float, str, type(None), torch.dtype, torch.device)

# ("output", which of the block before), ("argument", which of the call a unit before), ("value", what), or _NEW
Wire = tuple[str, Any]
_NEW: Wire = "new", None
_OBJECT = object()  # in the place of one that is neither a tensor nor a plain value


class Call:
    """A call of a block: what it was given and what it returned, tensors and KV caches held weakly."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given, self.spec = tree_flatten((args, kwargs))
        self.given = [_reference(leaf) for leaf in given]
        self.formats = [_format(leaf) for leaf in given]
        self.returned: list[Any] = []
        self.returned_spec: TreeSpec | None = None
        self.outputs: list[Wire] = []  # what each output is to the arguments
        self.made: dict[int, Any] = {}  # the formats of those that are new

    def returns(self, out: Any) -> None:
        """Note what came of it."""
        leaves, self.returned_spec = tree_flatten(out)
        self.returned = [_reference(leaf) for leaf in leaves]
        self.outputs = [_wire(leaf, ("argument", self.given)) for leaf in self.returned]
        self.made = {at: _format(leaf) for at, leaf in enumerate(leaves) if self.outputs[at] == _NEW}

    def wires(self, like: Call, before: Call) -> list[Wire]:
        """What each argument is to `like`, the call a unit before, and to that of the block `before`."""
        return [_wire(leaf, ("argument", like.given), ("output", before.returned)) for leaf in self.given]

    def holders(self, wires: list[Wire]) -> list[tuple[int, int, int]]:
        """How many hold each argument that the block before made: its Python object, C++ object, storage."""
        found = []
        for (kind, _), leaf in zip(wires, self.given, strict=True):
            if kind == "output":
                tensor = leaf()
                storage = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
                found.append((sys.getrefcount(tensor), tensor._use_count(), storage))
        return found

    def passed_on(self, like: Call, wires: list[Wire]) -> Any:
        """What `like` returned, of this call's arguments: what stands for all that was new is among them."""
        handed = {at: self.given[k]() for k, (kind, at) in enumerate(wires) if kind == "output"}
        leaves = []
        for k, (leaf, (kind, at)) in enumerate(zip(like.returned, like.outputs, strict=True)):
            leaves.append(leaf if kind == "value" else self.given[at]() if kind == "argument" else handed[k])
        assert like.returned_spec is not None, "it has returned"
        return tree_unflatten(leaves, like.returned_spec)


class Manners:
    """How the blocks of a list are called in one forward, as numbers: the same of calls that are given the same.

    An output of the block before is the same to all of them; the first block's is told by the second one's call.
    """

    def __init__(self) -> None:
        self._met: list[Any] = []  # tensors
        self._calls: list[tuple[TreeSpec, list[Wire]]] = []
        self._before: Call | None = None

    def add(self, call: Call) -> None:
        """The next block is called."""
        before = self._before.returned if self._before is not None else []
        given = [_wire(leaf, ("tensor", self._met), ("output", before)) for leaf in call.given]
        for at, leaf in enumerate(call.given):
            if isinstance(leaf, weakref.ref) and given[at] == _NEW:
                given[at] = "tensor", len(self._met)
                self._met.append(leaf)
        if len(self._calls) == 1 and len(given) == len(self._calls[0][1]):
            first = self._calls[0][1]
            first[:] = [wire if wire[0] == "output" else own for own, wire in zip(first, given, strict=True)]
        self._calls.append((call.spec, given))
        self._before = call

    def numbers(self) -> list[int]:
        """Of each call."""
        return [self._calls.index(call) for call in self._calls]


def are_known(wires: list[Wire]) -> bool:
    """Whether every argument comes from the call before, or is a plain value."""
    return _NEW not in wires


def are_handed_on(call: Call, wires: list[Wire]) -> bool:
    """Whether for whatever is new among what `call` returns its arguments, whose wires these are, have a like."""
    handed = {at: call.formats[k] for k, (kind, at) in enumerate(wires) if kind == "output"}
    return all(handed.get(at) == made for at, made in call.made.items())


def _reference(leaf: Any) -> Any:
    """What keeps no tensor alive: objects may hold some."""
    if isinstance(leaf, Tensor) or _is_cache(leaf):
        return weakref.ref(leaf)
    return leaf if isinstance(leaf, _ATOMS) else _OBJECT


def _is_cache(leaf: Any) -> bool:
    """Whether it is a KV cache of transformers': each block has a place of its own in it, and reads no other."""
    known = sys.modules.get("transformers.cache_utils")
    return known is not None and isinstance(leaf, known.Cache)


def _format(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else None


def _wire(leaf: Any, *sources: tuple[str, list[Any]]) -> Wire:
    if isinstance(leaf, weakref.ref):
        given = leaf()
        for kind, leaves in sources:
            for at, other in enumerate(leaves):
                if isinstance(other, weakref.ref) and other() is given:
                    return _NEW if kind == "output" and not _is_mere(given) else (kind, at)
        return _NEW
    return _NEW if leaf is _OBJECT else ("value", (type(leaf), leaf))


def _is_mere(made: Any) -> bool:
    """Whether nothing depends on the values of what a block has made: they are not known (values.py) and no counts."""
    return isinstance(made, Tensor) and made.is_floating_point() and "_value" not in vars(made)
