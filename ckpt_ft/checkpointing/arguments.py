"""What a region is given, kept for its second run as its first run found it.

A block may write into a list or dict that it is given (HRNet's branches, DenseNet's growing list of features, a cache
of frames), or in place into a tensor (a block that starts with an in-place ReLU). The first run is given the caller's
own objects, for the caller reads what was written; the second run gets copies of the containers as they were, and of
the tensors that were written to. A KV cache is a container: its layers hold tensors and are not written in place.
"""

from __future__ import annotations

import copy
import sys
from collections import UserDict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ckpt_ft.errors import UserError

from .tensor_identity import is_wrapper, version_of

_SEQUENCES = (list, tuple, deque)
_ATOMS = (torch.Tensor, bool, int, float, str, type(None))
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def is_cache(value: Any) -> bool:
    """Whether `value` is a KV cache of transformers."""
    kind = getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)
    return kind is not None and isinstance(value, kind)


def _is_record(value: Any) -> bool:
    """Whether `value` is an object that holds tensors in its attributes: a KV cache, a layer of one, a UserDict."""
    if isinstance(value, UserDict):
        return True
    module = sys.modules.get("transformers.cache_utils")
    return module is not None and isinstance(
        value, (module.Cache, module.CacheLayerMixin, module.LinearAttentionCacheLayerMixin)
    )


def changeable(value: Any) -> bool:
    """Whether `value`, or a container in it, can be written into."""
    if isinstance(value, _ATOMS):
        return False
    if isinstance(value, tuple):
        return any(changeable(item) for item in value)
    return isinstance(value, (list, dict, set, deque)) or _is_record(value)


def leaves(value: Any) -> Iterator[Any]:
    """Everything in `value` that is no container, in the order in which `rebuild` meets it."""
    if isinstance(value, _ATOMS):
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
    """`value` with its containers made anew and `leaf` of everything else; what was one container stays one."""
    if isinstance(value, _ATOMS):
        return leaf(value)
    made = {} if made is None else made
    if id(value) in made:
        return made[id(value)]
    if isinstance(value, tuple):
        items = [rebuild(item, leaf, made) for item in value]
        if all(item is old for item, old in zip(items, value, strict=True)):
            return value
        return value._make(items) if hasattr(value, "_make") else tuple(items)
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
        new.__dict__ = {key: rebuild(item, leaf, made) for key, item in vars(value).items()}
    return new


class Inputs:
    """Which tensors among its arguments a region writes into in place; learned in its first call.

    That call copies all of them, but for fake ones, which have no value to keep: a trace's first step is like others.
    """

    def __init__(self, module: nn.Module) -> None:
        self.kind = type(module).__name__
        self.written: set[int | str] | None = None

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Input]:
        """To be called before the first run: the inputs with a gradient, with copies of those that it writes."""
        named: tuple[tuple[int | str, Any], ...] = (*enumerate(args), *kwargs.items())
        inputs = [Input(key, value) for key, value in named if isinstance(value, torch.Tensor) and value.requires_grad]
        if self.written is None or self.written:
            for given in inputs:
                if not given.fake if self.written is None else given.key in self.written:
                    given.copy = given.tensor.detach().clone().requires_grad_()
        return inputs

    def after(self, inputs: list[Input]) -> None:
        """To be called after the first run with what `before` gave; the copies of inputs left alone are dropped."""
        written = set()
        for given in inputs:
            if given.tensor._version == given.version:
                given.copy = None
                continue
            written.add(given.key)
            if given.copy is None and not given.fake:
                raise UserError(
                    f"{self.kind} wrote in place into its {given} and had not in its first call; its second run "
                    "would start from what it wrote: clone that input in the block's forward"
                )
        if self.written is None:
            self.written = written


class Input:
    """A tensor that a region is given, and its value from before the first run where that one writes into it."""

    __slots__ = ("copy", "fake", "key", "tensor", "version")

    def __init__(self, key: int | str, tensor: torch.Tensor) -> None:
        self.key, self.tensor, self.version = key, tensor, version_of(tensor)
        self.fake = isinstance(tensor, FakeTensor)
        self.copy: torch.Tensor | None = None

    def __str__(self) -> str:
        return f"argument {self.key!r}"

    def shape(self) -> torch.Tensor | None:
        """One element in the input's shape: what a checkpoint around the region's sees of it, written to or not."""
        x = self.tensor
        return None if x.is_inference() or is_wrapper(x) else x.new_empty(()).expand(x.shape)

    def again(self) -> torch.Tensor:
        """For the second run: the value that the first one found; no leaf, for it may be written into once more."""
        if self.copy is not None:
            return self.copy.clone()
        if version_of(self.tensor) != self.version and not self.fake:
            raise RuntimeError(
                f"the {self} of a checkpointed block was changed in place after the block's forward; clone it before"
            )
        return self.tensor


class Call:
    """One call of a region: the caller's own arguments in the first run, in the second what the first one found.

    Attributes:
        saved: positional arguments for `torch.utils.checkpoint`, which hands them back to the second run, and behind
            them the `named` ones: what it saves, `offload` can park. Of those that are kept here, no more than their
            shape: a checkpoint around this one counts what is saved.
    """

    __slots__ = (
        "changeable",
        "first",
        "forward",
        "given",
        "inputs",
        "kept",
        "kwargs",
        "named",
        "saved",
        "second",
        "tensors",
    )

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
        self.changeable = changeable(args) or any(changeable(value) for value in kwargs.values())
        self.kwargs: dict[str, Any]
        args, self.kwargs = rebuild((args, kwargs), _same) if self.changeable else (args, kwargs)
        self.kept = {x.key: x for x in self.tensors if x.copy is not None}
        for key, value in enumerate(args):
            if isinstance(value, torch.Tensor) and value.is_inference():  # which autograd does not save
                self.kept[key] = Input(key, value)
        named = {x.key: x.tensor for x in self.tensors if isinstance(x.key, str)}
        self.kwargs = {key: value for key, value in self.kwargs.items() if key not in named}
        self.named = tuple(named)
        kept, given = self.kept, (*enumerate(args), *named.items())
        self.saved = tuple(kept[key].shape() if key in kept else value for key, value in given)

    def __call__(self, *saved: Any) -> Any:
        if self.given is None:
            return self.again(saved)
        (args, kwargs), self.given = self.given, None
        with self.first:
            out = self.forward(*args, **kwargs)
        self.inputs.after(self.tensors)
        self.tensors, self.saved = [], ()
        return out

    def again(self, saved: tuple[Any, ...]) -> Any:
        """The second run."""
        behind = len(saved) - len(self.named)
        args: list[Any] = list(saved[:behind])
        kwargs: dict[str, Any] = {**self.kwargs, **dict(zip(self.named, saved[behind:], strict=True))}
        if self.changeable:  # once more: backward may run again (retain_graph)
            args, kwargs = rebuild((args, kwargs), _same)
        for key, given in self.kept.items():
            if isinstance(key, int):
                args[key] = given.again()
            else:
                kwargs[key] = given.again()
        with self.second:
            return self.forward(*args, **kwargs)


def _same(value: Any) -> Any:
    return value
