"""What a region's modules hold at one moment, found by walking their attributes, and shallow copies of it.

`Contents` lists the containers, tensors, arrays and generators of the modules and of the plain objects that they refer
to. `Copies` has a shallow copy of every container, tells whether an entry has changed, and puts the entries back.
"""

from __future__ import annotations

import operator
import sys
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from threading import local
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ckpt_ft.compat.modules import BUFFERS, REPLICATE, buffers_of, children_of, parameters_of
from ckpt_ft.compat.tensors import FakeTensor

from .libraries import CONFIG, is_class
from .tensor_identity import is_array

# of parameters, buffers, submodules and hooks
TABLES = tuple(name for name, held in vars(nn.Module()).items() if isinstance(held, dict) and "state_dict" not in name)
_tables = operator.itemgetter(*TABLES)
_global_tables = [held for held in vars(nn.modules.module).values() if isinstance(held, OrderedDict)]
_OWN = frozenset(vars(nn.Module()))
_NOT_RESTORED = frozenset({"forward", "_ckpt_ft_applied", REPLICATE})
_DEEPEST, _MOST_CONTAINERS = 4, 256  # nesting depth of containers and objects, and their number in one region
_KINDS = (torch.Tensor, torch.Generator, nn.Module, tuple, dict, list, deque, set)  # that hold state
_MAX_ENTRIES = 100_000  # entries; longer containers are not copied
_MAX_SEARCHED = 1000  # entries; in longer containers we look for nothing
_ENGINES = frozenset({"accelerate", "ckpt_ft", "deepspeed", "torch"})  # their objects count both runs
_STATEFUL = frozenset({"collections", "queue", "weakref", "_weakrefset"})  # of Python's own modules
_MISSING = object()
_values_of = dict.values  # not `__getitem__`, by which DeepSpeed's tables learn what a module reads
Container = Any  # a dict, list, deque or set
Place = tuple[nn.Module, str, Any]  # module, table or attribute name, key


def modules_in(module: nn.Module) -> dict[nn.Module, None]:
    """Return `module` and all its submodules once each (four times as fast as `module.modules()`)."""
    found, rest = {module: None}, [module]
    while rest:
        for child in children_of(rest.pop()).values():
            if child is not None and child not in found:
                found[child] = None
                rest.append(child)
    return found


def has(module: nn.Module, name: str) -> bool:
    """Whether `module` has an attribute `name` other than parameters, buffers or submodules; faster than `hasattr`."""
    return name in module.__dict__ or hasattr(type(module), name)


class Contents:
    """The contents of a region's modules at one moment: valid as long as `copies.unchanged()`.

    Attributes:
        modules: the region's module and all its submodules.
        copies: their containers (attributes, tables, containers in attributes), with shallow copies.
        extra: the containers in attributes and inside these, and the attribute tables of plain objects and of modules
            that are referred to without being submodules.
        held: their tensors other than parameters, each with its place and container (None in a tuple).
        arrays: their numpy arrays, each with its place; they are not restored, only compared in verified steps.

    Args:
        given: objects beside the modules that the forward may write: its arguments.
    """

    __slots__ = (
        "arrays", "copies", "extra", "generators", "given", "held", "module", "modules",
        "parameters",
    )  # fmt: skip

    def __init__(self, module: nn.Module, given: Sequence[Any] = ()) -> None:
        self.module, self.modules, self.given = module, modules_in(module), given
        found = [value for inner in self.modules for value in parameters_of(inner).values()]
        self.parameters = [value for value in found if value is not None]
        self.extra: list[Container] = []
        self.arrays: list[tuple[Place, Any]] = []
        self.generators: list[torch.Generator] = []
        self.held: list[tuple[Place, Container | None, torch.Tensor]] = []
        attributes = [inner.__dict__ for inner in self.modules]
        tables = [*chain.from_iterable(map(_tables, attributes)), *_global_tables]
        tables = [table for table in tables if isinstance(table, dict)]  # those of a TorchScript module are none
        seen = set(map(id, attributes))
        for inner in self.modules:
            self._add_buffers(inner)
            self._add_values(inner.__dict__, inner, "", seen, _DEEPEST)
        for value in given:
            self._add(value, (module, "an argument", type(value).__name__), None, seen, _DEEPEST)
        dicts = [value for value in self.extra if isinstance(value, dict)]
        others = [value for value in self.extra if not isinstance(value, dict)]
        self.copies = Copies([*attributes, *tables, *dicts], others)

    @property
    def trained(self) -> tuple[bool, ...]:
        return tuple([value.requires_grad for value in self.parameters])

    def _add_buffers(self, module: nn.Module) -> None:
        for key, value in buffers_of(module).items():
            if value is not None:
                self.held.append(((module, BUFFERS, key), buffers_of(module), value))

    def _add_values(self, container: Container, owner: nn.Module, path: str, seen: set[int], depth: int) -> None:
        entries = container.items() if isinstance(container, dict) else enumerate(container)
        kept = None if isinstance(container, (set, tuple)) else container
        for key, value in entries:
            if not (_is_atom(type(value)) or (key in _OWN and not path)):  # type: ignore[arg-type]
                self._add(value, (owner, path, key), kept, seen, depth)

    def _add(self, value: Any, place: Place, container: Container | None, seen: set[int], depth: int) -> None:
        """Add a value and its contents; `container` is None if its entry there cannot be replaced."""
        if isinstance(value, torch.Tensor):
            if not isinstance(value, nn.Parameter) and (type(value) is torch.Tensor or not place[1]):
                self.held.append((place, container, value))
        elif is_array(value):
            self.arrays.append((place, value))
        elif isinstance(value, torch.Generator):
            self.generators.append(value)
        elif depth and id(value) not in seen and len(self.extra) < _MOST_CONTAINERS:
            seen.add(id(value))
            owner, path = place[0], ".".join(map(str, filter(None, place[1:])))
            if isinstance(value, nn.Module):  # not a submodule: one that the region only refers to
                for inner in modules_in(value):
                    if inner not in self.modules and (inner is value or id(inner) not in seen):
                        seen.add(id(inner))
                        self.extra += [inner.__dict__, buffers_of(inner)]
                        self._add_buffers(inner)
                return
            containers = [value] if isinstance(value, (tuple, dict, list, deque, set)) else []
            if containers and _makes_entries(type(value)):  # type: ignore[arg-type]
                return
            if _keeps_state(type(value)):  # type: ignore[arg-type]
                containers.append(value.__dict__)
            for one in containers:
                is_table = one is not value  # the attributes of a plain object
                if not isinstance(one, tuple) and (is_table or len(one) <= _MAX_ENTRIES):
                    self.extra.append(one)
                if is_table or isinstance(one, tuple) or len(one) <= _MAX_SEARCHED:
                    self._add_values(one, owner, path, seen, depth - 1)


@cache
def _is_atom(kind: type) -> bool:
    """Whether `Contents._add` finds nothing in objects of this class."""
    return not (
        issubclass(kind, _KINDS) or hasattr(kind, "__array__") or _keeps_state(kind)  # type: ignore[arg-type]
    )


@cache
def _keeps_state(kind: type) -> bool:
    """Whether objects of this class are plain Python objects, whose attributes a forward may write."""
    if kind in (SimpleNamespace, local):
        return True
    if kind.__dictoffset__ == 0 or issubclass(kind, (type, FunctionType)):
        return False
    package = kind.__module__.partition(".")[0]
    built_in = package in _ENGINES or (package in sys.stdlib_module_names and package not in _STATEFUL)
    return not (built_in or is_class(kind, CONFIG))


@cache
def _makes_entries(kind: type) -> bool:
    """Whether a container makes or loads its entries when it is asked for them, by code in Python."""
    return any(isinstance(getattr(kind, name, None), FunctionType) for name in ("__iter__", "items", "values"))


class Copies:
    """Dictionaries and other containers (lists, deques, sets), with shallow copies of them from one moment.

    `unchanged` runs three times in each call of a region.
    """

    __slots__ = ("dicts", "entries", "of_dicts", "of_others", "others", "sizes")

    def __init__(self, dicts: list[dict[Any, Any]], others: list[Container]) -> None:
        self.dicts, self.others = dicts, others
        self.of_dicts, self.of_others = list(map(_table_copy, dicts)), list(map(list, others))
        self.entries, self.sizes = [*_entries(self.of_dicts, self.of_others)], _sizes(dicts, others)

    def unchanged(self) -> bool:
        """Whether the containers have the same entries as at that moment."""
        dicts, others = self.dicts, self.others
        return _sizes(dicts, others) == self.sizes and all(map(operator.is_, _entries(dicts, others), self.entries))

    def now(self) -> Copies:
        return Copies(self.dicts, self.others)

    def changed(self) -> Iterator[tuple[Container, Any]]:
        pairs = zip((*self.dicts, *self.others), (*self.of_dicts, *self.of_others), strict=True)
        for container, copied in pairs:
            here, there = map(_values, (container, copied))
            if len(here) != len(there) or not all(map(operator.is_, here, there)):
                yield container, copied

    def put(self, zero3: bool) -> None:
        for container, copied in self.changed():
            if isinstance(container, dict):
                _put_entries(container, copied, zero3)
            elif not isinstance(container, set):
                container.clear()
                container.extend(copied)
            elif not zero3:  # DeepSpeed's sets of parameters to release, which the second run adds to
                container.clear()
                container.update(copied)

    def without_graphs(self) -> None:
        """Replace tensors that have a graph by leaves with the same values."""
        for copy in self.of_dicts:
            copy |= {key: _leaf(value) for key, value in copy.items()}
        for values in self.of_others:
            values[:] = map(_leaf, values)
        self.entries = [*_entries(self.of_dicts, self.of_others)]


def _put_entries(container: dict[Any, Any], copy: dict[Any, Any], zero3: bool) -> None:
    if all(type(key) is int for key in (*container, *copy)):  # a table of hooks, whose order matters
        container.clear()
        container.update(copy)
        return
    for key in dict.fromkeys((*copy, *container)):
        wanted, now = copy.get(key, _MISSING), container.get(key, _MISSING)
        if wanted is now or key in _NOT_RESTORED or is_managed(wanted) or is_managed(now):
            continue
        if zero3 and not (isinstance(wanted, torch.Tensor) or isinstance(now, torch.Tensor)):
            continue  # DeepSpeed's counters in attributes must count both runs
        if wanted is _MISSING:
            del container[key]
        else:
            container[key] = wanted
    if type(container) is dict and container.keys() == copy.keys() and [*container] != [*copy]:
        for key in copy:  # the order matters in a cache that drops its oldest entry
            container[key] = container.pop(key)


def _table_copy(table: dict[Any, Any]) -> dict[Any, Any]:
    """Copy without `__getitem__`, by which DeepSpeed's tables learn that a module reads the parameters of another."""
    return dict(table) if type(table) is dict else dict(dict.items(table))


def _leaf(value: Any) -> Any:
    has_graph = isinstance(value, torch.Tensor) and value.grad_fn is not None
    return value.detach().requires_grad_() if has_graph else value


def _values(container: Container) -> Any:
    return _values_of(container) if isinstance(container, dict) else container


def _entries(dicts: list[dict[Any, Any]], others: list[Container]) -> Iterator[Any]:
    return chain(chain.from_iterable(map(_values_of, dicts)), chain.from_iterable(others))


def _sizes(dicts: list[dict[Any, Any]], others: list[Container]) -> list[int]:
    return [*map(len, dicts), *map(len, others)]


def is_managed(value: Any) -> bool:
    """Whether the value is sharded by FSDP2 or offloaded by accelerate."""
    return isinstance(value, torch.Tensor) and (isinstance(value, DTensor) or value.is_meta)


def without_values(value: torch.Tensor) -> bool:
    return isinstance(value, FakeTensor) or value.is_meta
