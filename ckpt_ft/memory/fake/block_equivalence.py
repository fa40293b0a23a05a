"""Whether blocks of a model are built alike, so that one runs as the other does, and whether they are called alike.

Built alike: everything that a block consists of is compared: its modules' classes and attributes, its tensors'
shapes, the hooks and policies on it. What several blocks share (configurations, rotary tables) is the same object in
each. What cannot be compared counts as different: then both blocks are traced, which costs time; skipping a block that
differs would give a wrong answer.

Called alike: each argument is compared with that of an earlier call: the same tensor, the same output of the block
before, or an equal plain value.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range, slice)
_BY_HANDLE = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")  # a module's, keyed by numbers of their own
_DICTS = (dict, OrderedDict)
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # a tensor with any is never skipped
_FORWARD = "forward"  # an instance attribute where a policy has replaced it; it changes from step to step
_LATEST = 8  # kinds that a block is compared with


class BuiltAlike:
    """Compares the blocks of one list, each with the last block of each kind before it.

    An object of which two blocks hold one each may be held by no third one: blocks that share an object in pairs (the
    frame of a segment) have different roles.

    Args:
        apart: for each block, whether it is a kind of its own in any case.
    """

    def __init__(self, blocks: Sequence[nn.Module], apart: Sequence[bool]) -> None:
        self.blocks, self.apart = blocks, apart
        self._owners: dict[int, tuple[int, Any]] = {}  # of what a block has for itself, by id: the block's number
        self._pairs: dict[tuple[int, int], _Pair | None] = {}  # None: they are not built alike

    def kinds(self) -> list[int]:
        """The kind of each block, a number, under the policy that is applied now."""
        owners = dict(self._owners)
        found: list[int] = []
        last: list[tuple[int, int]] = []  # the last block of each kind, and the kind, the latest at the end
        for number in range(len(self.blocks)):
            for before, kind in reversed(last[-_LATEST:]):
                if self._are_alike(before, number, owners):
                    last.remove((before, kind))
                    break
            else:
                kind = max(found, default=-1) + 1
            found.append(kind)
            last.append((number, kind))
        return found

    def _are_alike(self, one: int, other: int, owners: dict[int, tuple[int, Any]]) -> bool:
        if self.apart[one] or self.apart[other]:
            return False
        if (one, other) not in self._pairs:
            pair = _Pair(self._owners, (one, other), {})
            self._pairs[one, other] = pair if pair.same(self.blocks[one], self.blocks[other]) else None
        known = self._pairs[one, other]
        if known is None:
            return False
        policies = _Pair(owners, known.numbers, dict(known.met))
        return all(policies.same(vars(a).get(_FORWARD), vars(b).get(_FORWARD)) for a, b in known.modules)


class _Pair:
    """Two blocks with these `numbers`, compared side by side. `met`: id of an object of the first -> the other's."""

    def __init__(self, owners: dict[int, tuple[int, Any]], numbers: tuple[int, int], met: dict[int, Any]) -> None:
        self.owners, self.numbers, self.met = owners, numbers, met
        self.kept: list[Any] = []  # temporaries, so that no id is given twice
        self.modules: list[tuple[nn.Module, nn.Module]] = []

    def same(self, one: Any, other: Any) -> bool:
        if one is other:
            return True
        if type(one) is not type(other):
            return False
        if isinstance(one, _ATOMS):
            return one == other or self._are_own_numbers(one, other)
        if id(one) in self.met:
            return self.met[id(one)] is other
        self.met[id(one)] = other
        if isinstance(one, tuple):
            return len(one) == len(other) and all(map(self.same, one, other))
        if not (self._is_own(one, self.numbers[0]) and self._is_own(other, self.numbers[1])):
            return False
        if isinstance(one, list):
            return len(one) == len(other) and all(map(self.same, one, other))
        if isinstance(one, Tensor):
            return self._same_tensor(one, other)
        if isinstance(one, nn.Module):
            self.modules.append((one, other))
            return self._same_items(*({k: v for k, v in vars(m).items() if k != _FORWARD} for m in (one, other)))
        if isinstance(one, dict):
            return self._same_items(one, other) and (type(one) in _DICTS or self._same_state(one, other))
        if isinstance(one, MethodType):
            return one.__func__ is other.__func__ and self.same(one.__self__, other.__self__)
        return self._same_state(one, other)

    def _are_own_numbers(self, one: Any, other: Any) -> bool:
        """Whether these are the blocks' own numbers, or names that contain them ("layers.3.mlp")."""
        if type(one) is str:
            parts = one.split("."), other.split(".")
            numbers = tuple(map(str, self.numbers))
            return len(parts[0]) == len(parts[1]) and all(
                a == b or (a, b) == numbers for a, b in zip(*parts, strict=True)
            )
        return type(one) is int and (one, other) == self.numbers

    def _is_own(self, value: Any, number: int) -> bool:
        """Whether no other block than `number` has this object."""
        if isinstance(value, MethodType) or (isinstance(value, dict) and not value):
            return True
        return self.owners.setdefault(id(value), (number, value))[0] == number

    def _same_items(self, one: dict[Any, Any], other: dict[Any, Any]) -> bool:
        if list(one) != list(other):
            return False
        for key, value in one.items():
            there = other[key]
            if type(key) is str and key.endswith(_BY_HANDLE) and value:
                value, there = list(value.values()), list(there.values())
                self.kept.append((value, there))
            if value is there or (type(value) in _DICTS and not value and value == there):  # most of a module
                continue
            if not self.same(value, there):
                return False
        return True

    def _same_tensor(self, one: Tensor, other: Tensor) -> bool:
        if one.layout is not torch.strided or other.layout is not torch.strided:
            return False
        described = ((t.shape, t.stride(), t.dtype, t.device, t.requires_grad, t.is_leaf) for t in (one, other))
        hooked = any(getattr(t, name) for t in (one, other) for name in _HOOKS)
        return len(set(described)) == 1 and not hooked and self.same(one.grad, other.grad)

    def _same_state(self, one: Any, other: Any) -> bool:
        """Whether copies of both would be made of the same parts."""
        try:
            made = one.__reduce_ex__(2), other.__reduce_ex__(2)
        except Exception:
            return False
        self.kept.append(made)
        if isinstance(made[0], str) or isinstance(made[1], str):  # a global: a function, a class
            return False
        return all(map(self._same_part, *made)) and len(made[0]) == len(made[1])

    def _same_part(self, one: Any, other: Any) -> bool:
        if hasattr(one, "__next__") and hasattr(other, "__next__"):  # the items of a list or dict
            one, other = list(one), list(other)
            self.kept.append((one, other))
        return self.same(one, other)


# What an argument is: ("output", of the block before, which), ("argument", of the call a unit before, which),
# ("value", what), or _NEW
Source = tuple[str, Any]
_NEW: Source = "new", None
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_OBJECT = object()  # in place of one that is neither a tensor nor a plain value


class Call:
    """A call of a block: its arguments and results. Tensors and KV caches are held weakly."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given, self.spec = tree_flatten((args, kwargs))
        self.given = [_reference(leaf) for leaf in given]
        self.formats = [_format(leaf) for leaf in given]
        self.returned: list[Any] = []
        self.returned_spec: TreeSpec | None = None
        self.outputs: list[Source] = []  # what each result is to the arguments
        self.made: dict[int, Any] = {}  # the formats of the results that are new

    def returns(self, out: Any) -> None:
        """Note the results."""
        leaves, self.returned_spec = tree_flatten(out)
        self.returned = [_reference(leaf) for leaf in leaves]
        self.outputs = [_source(leaf, ("argument", self.given)) for leaf in self.returned]
        self.made = {at: _format(leaf) for at, leaf in enumerate(leaves) if self.outputs[at] == _NEW}

    def sources(self, like: Call, before: Call) -> list[Source]:
        """What each argument is, given the call `like` it a unit before, and that of the block `before`."""
        return [_source(leaf, ("argument", like.given), ("output", before.returned)) for leaf in self.given]

    def reference_counts(self, sources: list[Source]) -> list[tuple[int, int, int]]:
        """References to each argument that the block before made: to its Python object, C++ object, storage."""
        found = []
        for (kind, _), leaf in zip(sources, self.given, strict=True):
            if kind == "output":
                tensor = leaf()
                storage = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
                found.append((sys.getrefcount(tensor), tensor._use_count(), storage))
        return found

    def hands_on(self, sources: list[Source]) -> bool:
        """Whether each new result has a counterpart of the same format among the arguments."""
        handed = {at: self.formats[k] for k, (kind, at) in enumerate(sources) if kind == "output"}
        return all(handed.get(at) == made for at, made in self.made.items())

    def passed_on(self, like: Call, sources: list[Source]) -> Any:
        """What a skipped block returns: the results of `like`, with arguments in the place of new ones."""
        handed = {at: self.given[k]() for k, (kind, at) in enumerate(sources) if kind == "output"}
        leaves = []
        for k, (leaf, (kind, at)) in enumerate(zip(like.returned, like.outputs, strict=True)):
            leaves.append(leaf if kind == "value" else self.given[at]() if kind == "argument" else handed[k])
        assert like.returned_spec is not None, "it has returned"
        return tree_unflatten(leaves, like.returned_spec)


def are_known(sources: list[Source]) -> bool:
    """Whether every argument comes from an earlier call, or is a plain value."""
    return _NEW not in sources


class CallKinds:
    """Groups the calls of a list of blocks in one forward by their arguments.

    An output of the block before counts as the same argument for all; for the first block, the second one's call says
    which arguments these are.
    """

    def __init__(self) -> None:
        self._met: list[Any] = []  # tensors
        self._calls: list[tuple[TreeSpec, list[Source]]] = []
        self._before: Call | None = None

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: Call) -> None:
        """The next block is called."""
        before = self._before.returned if self._before is not None else []
        given = [_source(leaf, ("tensor", self._met), ("output", before)) for leaf in call.given]
        for at, leaf in enumerate(call.given):
            if isinstance(leaf, weakref.ref) and given[at] == _NEW:
                given[at] = "tensor", len(self._met)
                self._met.append(leaf)
        if len(self._calls) == 1 and len(given) == len(self._calls[0][1]):
            first = self._calls[0][1]
            first[:] = [source if source[0] == "output" else own for own, source in zip(first, given, strict=True)]
        self._calls.append((call.spec, given))
        self._before = call

    def kinds(self) -> list[int]:
        """The kind of each call, a number."""
        return [self._calls.index(call) for call in self._calls]


def _reference(leaf: Any) -> Any:
    """Keeps no tensor alive; other objects might."""
    if isinstance(leaf, Tensor) or _is_cache(leaf):
        return weakref.ref(leaf)
    return leaf if isinstance(leaf, _PLAIN) else _OBJECT


def _is_cache(leaf: Any) -> bool:
    """Whether it is a KV cache of transformers: each block has its own place in it, and reads no other."""
    known = sys.modules.get("transformers.cache_utils")
    return known is not None and isinstance(leaf, known.Cache)


def _format(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else None


def _source(leaf: Any, *earlier: tuple[str, list[Any]]) -> Source:
    if isinstance(leaf, weakref.ref):
        given = leaf()
        for kind, leaves in earlier:
            for at, other in enumerate(leaves):
                if isinstance(other, weakref.ref) and other() is given:
                    return _NEW if kind == "output" and not _has_no_value(given) else (kind, at)
        return _NEW
    return _NEW if leaf is _OBJECT else ("value", (type(leaf), leaf))


def _has_no_value(made: Any) -> bool:
    """Whether nothing can depend on the values of what a block returned: no known ones (values.py), and no counts."""
    return isinstance(made, Tensor) and made.is_floating_point() and "_value" not in vars(made)
