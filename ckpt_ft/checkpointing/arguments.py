"""Saves a region's arguments, so that recomputation gets the originals.

A block may write into a list or dict among its arguments (HRNet's branches, DenseNet's growing list of features, a
cache of frames), or in place into a tensor anywhere among them (a block that starts with an in-place ReLU). The first
run gets the caller's own objects, because the caller reads what was written. The second run gets copies of the
original containers, and of the tensors that were written to. A KV cache counts as a container: its layers have tensors
that are not written in place.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import UserDict, deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from ckpt_ft.compat.tensors import FakeTensor
from ckpt_ft.errors import UserError

from .autocast import any_autocast, autocast_as, autocast_now
from .dropped_tensors import saved_tensor
from .tensor_identity import is_wrapper, version_of

_SEQUENCES = (list, tuple, deque)
_PLAIN = (torch.Tensor, bool, int, float, str, type(None))
ATOMS = frozenset(_PLAIN[1:])
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _is_record(value: Any) -> bool:
    """Whether `value` is an object whose attributes count as entries: a dataclass, a KV cache or a layer of one."""
    if isinstance(value, (UserDict, SimpleNamespace)) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    ):
        return hasattr(value, "__dict__")
    module = sys.modules.get("transformers.cache_utils")
    return module is not None and isinstance(
        value, (module.Cache, module.CacheLayerMixin, module.LinearAttentionCacheLayerMixin)
    )


def changeable(value: Any) -> bool:
    """Whether `value`, or a container in it, can be written into."""
    if isinstance(value, _PLAIN):
        return False
    if isinstance(value, tuple):
        return any(changeable(item) for item in value)
    return isinstance(value, (list, dict, set, deque)) or _is_record(value)


def leaves(value: Any) -> Iterator[Any]:
    """Return all values in `value` that are no containers, in the order of `rebuild`."""
    if isinstance(value, _PLAIN):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, _SEQUENCES):
        for item in value:
            yield from leaves(item)
    elif _is_record(value):
        yield from leaves(vars(value))
    elif not isinstance(value, set):
        yield value


def rebuild(value: Any, leaf: Callable[[Any], Any], made: dict[int, Any] | None = None) -> Any:
    """Return `value` with new containers and `leaf` of all other values; shared containers stay shared."""
    if isinstance(value, _PLAIN):
        return leaf(value)
    made = {} if made is None else made
    if id(value) in made:
        return made[id(value)]
    if isinstance(value, tuple):
        items = [rebuild(item, leaf, made) for item in value]
        if all(item is old for item, old in zip(items, value, strict=True)):
            return value
        return _tuple_like(value, items)
    if not isinstance(value, (list, deque, dict, set)) and not _is_record(value):
        return leaf(value)
    new = made[id(value)] = copy.copy(value)
    if isinstance(value, dict):
        for key, item in value.items():
            new[key] = rebuild(item, leaf, made)
    elif isinstance(value, (list, deque)):
        for index, item in enumerate(value):
            new[index] = rebuild(item, leaf, made)
    elif not isinstance(value, set):
        vars(new).update({key: rebuild(item, leaf, made) for key, item in vars(value).items()})
    return new


def _tuple_like(value: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    """Return `items` in a tuple of the class of `value`, whose own constructor may take other arguments."""
    kind: Any = type(value)
    if hasattr(kind, "n_fields"):  # torch.return_types
        return kind(items)
    new = tuple.__new__(kind, items)
    if hasattr(new, "__dict__"):
        vars(new).update(vars(value))
    return new


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors among an argument's leaves; raises UserError for an iterator, which the first run would exhaust."""
    for leaf in leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif not isinstance(leaf, _PLAIN) and isinstance(leaf, Iterator):
            raise UserError(
                f"a checkpointed block was given a {type(leaf).__name__}, which its first run uses up: its second run "
                "would find nothing in it; give it a list"
            )


class Inputs:
    """The tensors among a region's arguments that it writes into in place, as found in its first call.

    This call copies all tensors except fake ones, which have no values: in a trace all steps copy alike.
    """

    def __init__(self, module: nn.Module) -> None:
        self.kind = type(module).__name__
        self.written: set[Key] | None = None

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Input]:
        """Before the first run: returns the tensors among the arguments, with copies of those that the run writes.

        Raises:
            UserError: an argument can be read only once.
        """
        inputs: dict[int, Input] = {}
        named: tuple[tuple[int | str, Any], ...] = (*enumerate(args), *kwargs.items())
        for name, value in named:
            if isinstance(value, torch.Tensor):
                inputs.setdefault(id(value), Input((name, DIRECT), value))
            elif not isinstance(value, _PLAIN):
                for index, tensor in enumerate(_tensors(value)):
                    inputs.setdefault(id(tensor), Input((name, index), tensor))
        if self.written is None or self.written:
            for given in inputs.values():
                if not given.fixed if self.written is None else given.key in self.written:
                    given.copy = given.tensor.detach().clone().requires_grad_(given.tensor.requires_grad)
        return list(inputs.values())

    def after(self, inputs: list[Input]) -> None:
        """After the first run: takes the result of `before` and frees the copies of tensors that were not written."""
        written = set()
        for given in inputs:
            if version_of(given.tensor) == given.version:
                given.copy = None
                if given.unpack is not None:
                    del given.tensor
                continue
            written.add(given.key)
            if given.copy is None and not given.fixed:
                raise UserError(
                    f"{self.kind} modified its {given} in place and did not in its first call; "
                    "recomputation would start from the modified values: clone that input in the block's forward"
                )
        if self.written is None:
            self.written = written


class Input:
    """A tensor among a region's arguments, with its value before the first run if that run writes into it.

    A positional tensor, or a keyword tensor that needs a gradient, is saved as an autograd node saves its own:
    `offload` can move it, and an outer checkpoint drops it. If its value is copied, only its shape is saved, because
    an outer checkpoint counts the saved tensors.
    """

    __slots__ = ("attributes", "copy", "key", "tensor", "unpack", "version")

    def __init__(self, key: Key, tensor: torch.Tensor) -> None:
        self.key, self.tensor, self.version = key, tensor, version_of(tensor)
        self.attributes = dict(vars(tensor))
        self.copy: torch.Tensor | None = None
        self.unpack: Callable[[], torch.Tensor] | None = None  # returns the saved tensor

    @property
    def fixed(self) -> bool:
        """Whether it is never copied: fake tensors have no values; parameters and inference tensors stay unwritten."""
        return isinstance(self.tensor, (FakeTensor, nn.Parameter)) or self.tensor.is_inference()

    def __str__(self) -> str:
        return f"argument {self.key[0]!r}"

    def save(self) -> None:
        """Before the first run."""
        name, place = self.key
        if place != DIRECT or not (isinstance(name, int) or self.tensor.requires_grad):
            return
        if self.copy is None and not self.tensor.is_inference():
            self.unpack = saved_tensor(self.tensor)
        elif (shape := self.shape()) is not None:
            saved_tensor(shape)

    def shape(self) -> torch.Tensor | None:
        """One element expanded to the input's shape, which an outer checkpoint sees for written inputs and others."""
        x = self.tensor
        plain = x.layout is torch.strided and not (x.is_nested or x.is_inference() or is_wrapper(x))
        return x.new_empty(()).expand(x.shape) if plain else None

    def value_for_rerun(self) -> torch.Tensor:
        """Return the value for the second run: not a leaf, because the run may write into it again."""
        if self.copy is not None:
            value = self.copy.clone()
        elif self.unpack is not None:
            value = alias(self.unpack())
        else:
            if version_of(self.tensor) != self.version and not self.fixed:
                raise RuntimeError(
                    f"the {self} of a checkpointed block was changed in place after the block's forward; clone it "
                    "before"
                )
            value = self.tensor if self.fixed else alias(self.tensor)
        if not vars(value):
            vars(value).update(self.attributes)
        return value


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias for the second run, so that hooks registered on it do not act in the running backward."""
    if not tensor.requires_grad or forward_ad.unpack_dual(tensor).tangent is not None:  # a detached tensor has none
        return tensor
    return tensor.detach().requires_grad_()


Key = tuple[int | str, int]  # which argument, and which tensor of those in it
DIRECT = -1  # the argument itself is the tensor


class Call:
    """One call of a region: the first run gets the caller's own arguments, the second run their original values."""

    __slots__ = ("arguments", "autocast", "device", "first", "forward", "given", "inputs", "second", "tensors")

    def __init__(
        self,
        forward: Callable[..., Any],
        runs: tuple[Any, Any],
        inputs: Inputs,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.forward, self.inputs = forward, inputs
        self.first, self.second = runs
        self.autocast = autocast_now(self.first.device_type)
        self.device = torch.get_default_device()  # `with torch.device(...)`: the second run makes tensors there too
        self.given: Arguments | None = (args, kwargs)
        self.tensors = inputs.before(args, kwargs)
        for given in self.tensors:
            given.save()
        known: dict[int, Any] = {id(given.tensor): given for given in self.tensors}
        self.arguments: Arguments = rebuild((args, kwargs), lambda leaf: known.get(id(leaf), leaf))

    def __call__(self) -> Any:
        """The first run."""
        assert self.given is not None
        (args, kwargs), self.given = self.given, None
        with self.first:
            out = self.forward(*args, **kwargs)
        self.inputs.after(self.tensors)
        self.tensors = []
        return out

    def rerun(
        self,
        made: Callable[[Any], Any] | None = None,
        result: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None = None,
    ) -> Any:
        """Run again; return the output, or `result` of the output and the arguments, which may have been written into.

        made: maps a leaf of the arguments to the value that replaces it, which may be the leaf itself.
        """
        found: dict[int, torch.Tensor] = {}  # a tensor that is given twice in the first run is one in the second

        def of_first_run(leaf: Any) -> Any:
            if type(leaf) is not Input:
                return leaf if made is None else made(leaf)
            if id(leaf) not in found:
                found[id(leaf)] = leaf.value_for_rerun()
            return found[id(leaf)]

        args, kwargs = rebuild(self.arguments, of_first_run)  # each time: backward may run again (retain_graph)
        moved = torch.get_default_device() != self.device
        autocast = autocast_as(self.autocast) if self.autocast or any_autocast() else nullcontext()
        with autocast, self.device if moved else nullcontext(), self.second:
            out = self.forward(*args, **kwargs)
            return out if result is None else result(out, args, kwargs)


def nothing() -> None:
    """Return None."""
