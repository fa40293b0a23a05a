"""Saves a region's arguments, so that recomputation gets the originals.

A block may write into a list or dict among its arguments (HRNet's branches, DenseNet's growing list of features, a
cache of frames), or in place into a tensor (a block that starts with an in-place ReLU), which may be a positional or
keyword argument or inside of a container. The first run gets the caller's own objects, because the caller reads what
was written. The second run gets copies of the original containers, and of the tensors that were written to. A KV cache
counts as a container: its layers have tensors that are not written in place.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import UserDict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from ckpt_ft.compat.autograd import forward_level
from ckpt_ft.compat.tensors import FakeTensor
from ckpt_ft.errors import UserError

from .dropped_tensors import same, saved_tensor
from .tensor_identity import is_array, is_wrapper, version_of

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
    return isinstance(value, (list, dict, set, deque)) or _is_record(value) or is_array(value)


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
        return value._make(items) if hasattr(value, "_make") else tuple(items)
    if is_array(value):
        made[id(value)] = value.copy()
        return made[id(value)]
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


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors among the leaves of an argument.

    Raises:
        UserError: the argument contains an iterator, which the first run would exhaust.
    """
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
    """A tensor among a region's arguments, with its value before the first run if that run writes into it."""

    __slots__ = ("copy", "key", "tensor", "version")

    def __init__(self, key: Key, tensor: torch.Tensor) -> None:
        self.key, self.tensor, self.version = key, tensor, version_of(tensor)
        self.copy: torch.Tensor | None = None

    @property
    def fixed(self) -> bool:
        """Whether it is never copied: fake tensors have no values; parameters and inference tensors stay unwritten."""
        return isinstance(self.tensor, (FakeTensor, nn.Parameter)) or self.tensor.is_inference()

    @property
    def is_direct(self) -> bool:
        """Whether the argument itself is the tensor."""
        return self.key[1] == DIRECT

    def __str__(self) -> str:
        return f"argument {self.key[0]!r}"

    def shape(self) -> torch.Tensor | None:
        """One element expanded to the input's shape, which an outer checkpoint sees for written inputs and others."""
        x = self.tensor
        plain = x.layout is torch.strided and not (x.is_nested or x.is_inference() or is_wrapper(x))
        return x.new_empty(()).expand(x.shape) if plain else None

    def value_for_rerun(self) -> torch.Tensor:
        """Return the value for the second run: not a leaf, because the run may write into it again."""
        if self.copy is not None:
            return self.copy.clone()
        self.check()
        return self.tensor if self.fixed else alias(self.tensor)

    def check(self) -> None:
        """Raise RuntimeError if the tensor was written to since the first run."""
        if version_of(self.tensor) != self.version and not self.fixed:
            raise RuntimeError(
                f"the {self} of a checkpointed block was changed in place after the block's forward; clone it before"
            )


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias for the second run, so that hooks registered on it do not act in the running backward."""
    if not tensor.requires_grad or forward_level(forward_ad) >= 0:  # a detached tensor has no tangent
        return tensor
    return tensor.detach().requires_grad_()


Key = tuple[int | str, int]  # which argument, and which tensor of those in it
DIRECT = -1  # the argument itself is the tensor


class Call:
    """One call of a region: the first run gets the caller's own arguments, the second run their original values.

    Positional tensors, and keyword tensors that need a gradient, are saved as an autograd node saves its own:
    `offload` can move them, and an outer checkpoint drops them. For a tensor whose value is copied only the
    shape is saved, because an outer checkpoint counts the saved tensors.
    """

    __slots__ = (
        "args", "attributes", "copied", "first", "forward", "given", "held", "inputs", "kwargs", "remade", "saved",
        "second", "tensors",
    )  # fmt: skip

    def __init__(
        self,
        forward: Callable[..., Any],
        runs: tuple[AbstractContextManager[Any], AbstractContextManager[Any]],
        inputs: Inputs,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.forward, self.inputs = forward, inputs
        self.first, self.second = runs
        self.given: Arguments | None = (args, kwargs)
        self.tensors = inputs.before(args, kwargs)
        self.attributes = {id(x.tensor): dict(own) for x in self.tensors if (own := vars(x.tensor))}
        self.remade = changeable(args) or any(map(changeable, kwargs.values()))
        if self.remade:
            args, kwargs = rebuild((args, kwargs), same)
        else:  # tuples of tensors that need gradients
            self.remade = any(map(_needs_gradient, (*args, *kwargs.values())))
        self.copied = {given.key[0]: given for given in self.tensors if given.copy is not None and given.is_direct}
        self.saved: list[tuple[int | str, int, Callable[[], Any]]] = []  # name, identity and how to get a tensor
        self.args, self.kwargs = list(args), dict(kwargs)
        for key, value in enumerate(args):
            if isinstance(value, torch.Tensor):
                self._save(key, value)
        for name, value in kwargs.items():
            if isinstance(value, torch.Tensor) and value.requires_grad:
                self._save(name, value)
        saved = {key for key, _, _ in self.saved}
        self.held = {id(x.tensor): x for x in self.tensors if not (x.is_direct and x.key[0] in saved)}

    def _save(self, key: int | str, tensor: torch.Tensor) -> None:
        given = self.copied.get(key)
        if given is None and tensor.is_inference():  # which autograd does not save
            given = self.copied[key] = Input((key, DIRECT), tensor)
        shape = tensor if given is None else given.shape()
        self.saved.append((key, id(tensor), nothing if shape is None else saved_tensor(shape)))
        if isinstance(key, int):
            self.args[key] = None
        else:
            self.kwargs[key] = None

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
        """The second run.

        Args:
            made: maps a leaf of the arguments to the value that replaces it, which may be the leaf itself.
            result: computes the return value from the output and the arguments, which may have been written into.
        """
        found: dict[int, Any] = {}  # tensors that are the same in the first run are the same in the second
        for key, identity, unpack in self.saved:
            if identity not in found:
                given = self.copied.get(key)
                found[identity] = alias(unpack()) if given is None else given.value_for_rerun()

        def of_first_run(leaf: Any) -> Any:
            if made is not None:
                leaf = made(leaf)
            given = self.held.get(id(leaf))
            if given is not None and id(leaf) not in found:
                found[id(leaf)] = given.value_for_rerun()
            return found.get(id(leaf), leaf) if isinstance(leaf, torch.Tensor) else leaf

        args, kwargs = self.args, self.kwargs
        if made is not None or self.remade or any(given.copy is not None for given in self.held.values()):
            args, kwargs = rebuild((args, kwargs), of_first_run)  # each time: backward may run again (retain_graph)
        else:
            for given in self.held.values():
                given.check()
        args, kwargs = list(args), dict(kwargs)
        for key, identity, _ in self.saved:
            if isinstance(key, int):
                args[key] = found[identity]
            else:
                kwargs[key] = found[identity]
        for identity, own in self.attributes.items():
            if identity in found and not vars(found[identity]):  # an alias
                vars(found[identity]).update(own)
        with self.second:
            out = self.forward(*args, **kwargs)
            return out if result is None else result(out, tuple(args), kwargs)


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, tuple) and any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves(value))


def nothing() -> None:
    """Return None."""
