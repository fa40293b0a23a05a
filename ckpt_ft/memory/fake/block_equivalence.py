"""Finds blocks of a model that are built alike, so that one runs as the other does.

Everything that a block consists of is compared: its modules' classes and attributes, its tensors' shapes, the hooks
and policies on it. What several blocks share (configurations, rotary tables) is the same object in each. What cannot
be compared counts as different: then both blocks are traced, which costs time; skipping a block that differs would
give a wrong answer.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from ckpt_ft.memory.distributed.fsdp2 import sharded_alike

_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range, slice)
_BY_HANDLE = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")  # a module's tables, keyed by handle numbers
_DICTS = (dict, OrderedDict)
_MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # a tensor with any is never skipped
_FORWARD = "forward"  # an instance attribute where a policy has replaced it; it changes from step to step
_LATEST = 8  # kinds that a block is compared with


def _runs(attribute: str) -> bool:
    """Whether what a module has under this name matters to a step; policies are compared apart."""
    return attribute != _FORWARD and "state_dict" not in attribute


class BlockComparison:
    """Compares the blocks of one list, each with the last block of each kind before it.

    An object that differs between two blocks must belong to one block alone: blocks that share an object in pairs
    (the frame of a segment) have different roles. Blocks are compared before a step, because a block that has run
    holds results that a skipped one does not. Later steps compare only the policies on them, or everything if anything
    else has changed.

    Args:
        unique: for each block, whether it equals no other in any case.
    """

    def __init__(self, blocks: Sequence[nn.Module], unique: Sequence[bool]) -> None:
        self.blocks, self.unique = blocks, unique
        self._modules = [module for block in blocks for module in block.modules()]
        self._states: list[object] = []  # what may change between steps, besides policies
        self._forwards: list[weakref.ref[Any]] = []  # of policies; `self` where there is none
        self._found: list[int] = []
        self._owners: dict[int, tuple[int, Any]] = {}  # of what a block has for itself, by id: the block's number
        self._pairs: dict[tuple[int, int], _Pair | None] = {}  # None: they are not built alike

    def kinds(self) -> list[int]:
        """The kind of each block, a number, under the currently applied policy."""
        states: list[object] = [
            p.requires_grad for m in self._modules for p in m._parameters.values() if p is not None
        ]
        states += [(m.training, *(list(getattr(m, hooks)) for hooks in _MODULE_HOOKS)) for m in self._modules]
        forwards = [vars(module).get(_FORWARD, self) for module in self._modules]
        if states != self._states:
            self._states, self._owners, self._pairs = states, {}, {}
        elif all(before() is now for before, now in zip(self._forwards, forwards, strict=True)):
            return self._found
        self._forwards = [weakref.ref(forward) for forward in forwards]
        owners = dict(self._owners)
        self._found = found = []
        last: dict[int, int] = {}  # of each kind: its last block, the latest at the end
        for number in range(len(self.blocks)):
            latest = list(last.items())[-_LATEST:]
            kind = next((k for k, before in reversed(latest) if self._are_equal(before, number, owners)), len(last))
            last.pop(kind, None)
            last[kind] = number
            found.append(kind)
        return found

    def _are_equal(self, one: int, other: int, owners: dict[int, tuple[int, Any]]) -> bool:
        if self.unique[one] or self.unique[other]:
            return False
        if (one, other) not in self._pairs:
            pair = _Pair(self._owners, (one, other), {})
            self._pairs[one, other] = pair if pair.same(self.blocks[one], self.blocks[other]) else None
        known = self._pairs[one, other]
        if known is None:
            return False
        policies = _Pair(owners, known.numbers, dict(known.matched))
        return all(policies.same(vars(a).get(_FORWARD), vars(b).get(_FORWARD)) for a, b in known.modules)


class _Pair:
    """Two blocks with these `numbers`, compared side by side.

    matched: the second block's objects by the ids of those of the first that they were compared with.
    """

    def __init__(self, owners: dict[int, tuple[int, Any]], numbers: tuple[int, int], matched: dict[int, Any]) -> None:
        self.owners, self.numbers, self.matched = owners, numbers, matched
        self.kept: list[Any] = []  # temporaries, so that no id is given twice
        self.modules: list[tuple[nn.Module, nn.Module]] = []

    def same(self, one: Any, other: Any) -> bool:
        if one is other:
            return True
        if type(one) is not type(other):
            return False
        if isinstance(one, _ATOMS):
            return one == other or self._are_own_numbers(one, other)
        if id(one) in self.matched:
            return self.matched[id(one)] is other
        self.matched[id(one)] = other
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
            return self._same_items(*({k: v for k, v in vars(m).items() if _runs(k)} for m in (one, other)))
        if isinstance(one, dict):
            return self._same_items(one, other) and (type(one) in _DICTS or self._same_state(one, other))
        if isinstance(one, FSDPState):
            return sharded_alike(one, other)
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
        described = (
            (t.shape, t.stride(), t.dtype, t.device, t.requires_grad, t.is_leaf, getattr(t, "placements", None))
            for t in (one, other)
        )
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
