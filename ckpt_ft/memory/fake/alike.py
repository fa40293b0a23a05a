"""Whether two blocks of a model are built alike, so that one runs as the other does.

Compared is all that a block consists of: its modules' classes and attributes, its tensors' shapes, the hooks and
stand-ins that sit on it. Configurations, rotary tables and whatever else several blocks share is the same object in
each. What does not compare is different: it costs time to trace two blocks that are alike, and a wrong answer to take
two that are not for alike.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from types import MethodType
from typing import Any

import torch
from torch import nn

_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range, slice)
_BY_HANDLE = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")  # a module's, by numbers of their own
_DICTS = (dict, OrderedDict)
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # a tensor with any is not left out


_STANDS_IN = "forward"  # a policy's, on the instance: it comes and goes, what is below it stays


class Alike:
    """Compares blocks of one list, each with the one before it.

    An object that two blocks hold one of each may be held by no third: blocks that share it in pairs (the frame of a
    segment) take turns with it.

    Args:
        apart: of each block but the last, whether it and the next are different anyway.
    """

    def __init__(self, blocks: Sequence[nn.Module], apart: Sequence[bool]) -> None:
        self._owners: dict[int, tuple[int, Any]] = {}  # of what a block has for itself: the block's number
        self._pairs: list[_Pair | None] = []  # None: they are not built alike
        for number, (one, other) in enumerate(pairwise(blocks)):
            pair = _Pair(self._owners, number)
            self._pairs.append(pair if not apart[number] and pair.same(one, other) else None)

    def as_they_stand(self) -> list[bool]:
        """Of each block but the last whether the next one is like it, with what stands in for forwards now."""
        owners = dict(self._owners)
        return [pair is not None and pair.stand_alike(owners) for pair in self._pairs]


class _Pair:
    """Two blocks side by side: what corresponds in them."""

    def __init__(self, owners: dict[int, tuple[int, Any]], number: int) -> None:
        self.owners, self.number = owners, number
        self.met: dict[int, Any] = {}  # id of what the first block has -> what the other has in its place
        self.kept: list[Any] = []  # temporaries, so that no id is given twice
        self.modules: list[tuple[nn.Module, nn.Module]] = []

    def stand_alike(self, owners: dict[int, tuple[int, Any]]) -> bool:
        """Whether what stands in for the modules' forwards is alike too."""
        pair = _Pair(owners, self.number)
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
        if not (self._owned(one, self.number) and self._owned(other, self.number + 1)):
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
            numbers = str(self.number), str(self.number + 1)
            return len(parts[0]) == len(parts[1]) and all(
                a == b or (a, b) == numbers for a, b in zip(*parts, strict=True)
            )
        return type(one) is int and (one, other) == (self.number, self.number + 1)

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
