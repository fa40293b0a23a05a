"""Whether two blocks of a model are built alike, so that one runs as the other does.

Compared is all that a block consists of: its modules' classes and attributes, its tensors' shapes, the hooks and
stand-ins that sit on it. Configurations, rotary tables and whatever else several blocks share is the same object in
each. What does not compare is different: it costs time to trace two blocks that are alike, and a wrong answer to take
two that are not for alike.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn

_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range, slice)
_BY_HANDLE = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")  # a module's, by numbers of their own
_DICTS = (dict, OrderedDict)
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # a tensor with any is not left out
_STANDS_IN = "forward"  # a policy's, on the instance: it comes and goes, what is below it stays
_KINDS = 8  # the latest, that a block is compared with
Owners = dict[int, tuple[int, Any]]  # of what a block has for itself, by id: the block's number


class Alike:
    """Compares blocks of one list, each with the last one of each kind before it.

    An object that two blocks hold one of each may be held by no third: blocks that share it in pairs (the frame of a
    segment) take turns with it.

    Args:
        apart: of each block, whether it is a kind of its own anyway.
    """

    def __init__(self, blocks: Sequence[nn.Module], apart: Sequence[bool]) -> None:
        self.blocks, self.apart = blocks, apart
        self._owners: Owners = {}
        self._pairs: dict[tuple[int, int], _Pair | None] = {}  # None: they are not built alike

    def kinds(self) -> list[int]:
        """Of each block its kind, a number, with what stands in for forwards now."""
        owners = dict(self._owners)
        found: list[int] = []
        last: list[tuple[int, int]] = []  # of each kind the last block and the kind, the latest at the end
        for number in range(len(self.blocks)):
            for before, kind in reversed(last[-_KINDS:]):
                if self._are_alike(before, number, owners):
                    last.remove((before, kind))
                    break
            else:
                kind = max(found, default=-1) + 1
            found.append(kind)
            last.append((number, kind))
        return found

    def _are_alike(self, one: int, other: int, owners: Owners) -> bool:
        if self.apart[one] or self.apart[other]:
            return False
        if (one, other) not in self._pairs:
            pair = _Pair(self._owners, one, other)
            self._pairs[one, other] = pair if pair.same(self.blocks[one], self.blocks[other]) else None
        known = self._pairs[one, other]
        return known is not None and known.stand_alike(owners)


class _Pair:
    """Two blocks side by side, by their numbers: what corresponds in them."""

    def __init__(self, owners: Owners, number: int, other_number: int) -> None:
        self.owners, self.numbers = owners, (number, other_number)
        self.met: dict[int, Any] = {}  # id of what the first block has -> what the other has in its place
        self.kept: list[Any] = []  # temporaries, so that no id is given twice
        self.modules: list[tuple[nn.Module, nn.Module]] = []

    def stand_alike(self, owners: Owners) -> bool:
        """Whether what stands in for the modules' forwards is alike too."""
        pair = _Pair(owners, *self.numbers)
        pair.met = dict(self.met)
        forwards = ((vars(one).get(_STANDS_IN), vars(other).get(_STANDS_IN)) for one, other in self.modules)
        return all(pair.same(*both) for both in forwards)

    def same(self, one: Any, other: Any) -> bool:
        if one is other:
            return True
        if type(one) is not type(other):
            return False
        if isinstance(one, _ATOMS):
            return one == other or self._numbered(one, other)
        if id(one) in self.met:
            return self.met[id(one)] is other
        self.met[id(one)] = other
        if isinstance(one, tuple):
            return len(one) == len(other) and all(map(self.same, one, other))
        if not (self._owned(one, self.numbers[0]) and self._owned(other, self.numbers[1])):
            return False
        if isinstance(one, list):
            return len(one) == len(other) and all(map(self.same, one, other))
        if isinstance(one, torch.Tensor):
            return self._same_tensor(one, other)
        if isinstance(one, nn.Module):
            self.modules.append((one, other))
            return self._same_items(_but_forward(one), _but_forward(other))
        if isinstance(one, dict):
            return self._same_items(one, other) and (type(one) in _DICTS or self._same_state(one, other))
        if isinstance(one, MethodType):
            return one.__func__ is other.__func__ and self.same(one.__self__, other.__self__)
        return self._same_state(one, other)

    def _numbered(self, one: Any, other: Any) -> bool:
        """Whether these are the blocks' own numbers, or names that hold them ("layers.3.mlp")."""
        if type(one) is str:
            parts = one.split("."), other.split(".")
            numbers = tuple(map(str, self.numbers))
            return len(parts[0]) == len(parts[1]) and all(
                a == b or (a, b) == numbers for a, b in zip(*parts, strict=True)
            )
        return type(one) is int and (one, other) == self.numbers

    def _owned(self, value: Any, number: int) -> bool:
        """Whether no other block than `number` has met `value`; remembered."""
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

    def _same_tensor(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        if one.layout is not torch.strided or other.layout is not torch.strided:
            return False
        described = ((t.shape, t.stride(), t.dtype, t.device, t.requires_grad, t.is_leaf) for t in (one, other))
        hooked = any(getattr(t, name) for t in (one, other) for name in _HOOKS)
        return len(set(described)) == 1 and not hooked and self.same(one.grad, other.grad)

    def _same_state(self, one: Any, other: Any) -> bool:
        """What copies of them would be made of."""
        try:
            made = one.__reduce_ex__(2), other.__reduce_ex__(2)
        except Exception:
            return False
        self.kept.append(made)
        if isinstance(made[0], str) or isinstance(made[1], str):  # a global: a function, a class
            return False
        return all(map(self._same_part, *made)) and len(made[0]) == len(made[1])

    def _same_part(self, one: Any, other: Any) -> bool:
        if hasattr(one, "__next__") and hasattr(other, "__next__"):  # what a list or dict holds
            one, other = list(one), list(other)
            self.kept.append((one, other))
        return self.same(one, other)


def _but_forward(module: nn.Module) -> dict[str, Any]:
    attributes = vars(module)
    if _STANDS_IN not in attributes:
        return attributes
    return {name: value for name, value in attributes.items() if name != _STANDS_IN}
