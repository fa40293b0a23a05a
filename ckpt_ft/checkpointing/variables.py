"""Finds the variables outside of modules that a region's code can change: its second run would change them again.

A forward may count in a class attribute or a global variable, append to a list in a closure or a default argument, or
call an object that does. `Reached` reads which variables the code of the region's modules and hooks names, and the
functions and classes that this code names in turn, without running it. It does not read the code of PyTorch, of the
engines whose objects count both runs, of Python's own library, and of those for downloads and versions.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dis import get_instructions, hasname
from functools import cache, partial
from itertools import chain
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from .libraries import CONFIG, is_a

ENGINES = frozenset({"accelerate", "ckpt_ft", "deepspeed", "torch"})
MAX_ENTRIES = 1000  # entries; in longer containers we look for nothing
_PLAIN = (bool, int, float, str, bytes, type(None), BuiltinFunctionType, torch.Tensor, torch.dtype, torch.device)
_LIBRARIES = ENGINES | sys.stdlib_module_names | {"huggingface_hub", "numpy", "packaging", "psutil", "scipy", "triton"}
_MAX_VISITED = 20_000  # functions and objects to look at
_METHODS = (FunctionType, classmethod, staticmethod, property)
_NAMED = frozenset(hasname)
_HOLDERS = (FunctionType, MethodType, partial)
_MISSING = object()


class Variables:
    """Variables outside of modules, as a container of their names and values in turn.

    Args:
        owner: a class, a namespace, a closure's cell, a function, or an object with slots.
        names: the names in it; None for all of a class.
        described: names them in errors.
    """

    __slots__ = ("__weakref__", "described", "names", "owner")

    def __init__(self, owner: Any, names: Collection[str] | None, described: str) -> None:
        self.owner, self.names, self.described = owner, names, described

    def __str__(self) -> str:
        return self.described

    @property
    def settable(self) -> bool:
        """Whether code sets these variables; it changes only what those of a function or method hold."""
        return not isinstance(self.owner, _HOLDERS)

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self.items())

    def items(self) -> Collection[tuple[str, Any]]:
        """The names that have a value, and the values."""
        if self.names is None:
            return vars(self.owner).items()
        owner = self.owner
        if isinstance(owner, dict):
            return [(name, owner[name]) for name in self.names if name in owner]
        try:
            found = [(name, getattr(owner, name, _MISSING)) for name in self.names]
            return [entry for entry in found if entry[1] is not _MISSING]
        except ValueError:  # an empty cell
            return ()

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(self.owner, dict):
            self.owner[name] = value
        else:
            setattr(self.owner, name, value)

    def clear(self) -> None:
        """Nothing, as `extend` replaces all."""

    def extend(self, wanted: list[Any]) -> None:
        """Set the variables to these names and values."""
        now, values = dict(self.items()), dict(zip(wanted[::2], wanted[1::2], strict=True))
        for name in now.keys() - values.keys():
            if isinstance(self.owner, dict):
                del self.owner[name]
            else:
                delattr(self.owner, name)
        for name, value in values.items():
            if name not in now or now[name] is not value:
                self[name] = value


class Reached:
    """The variables that a region's code reaches. Each is one `Variables` as long as this lives."""

    def __init__(self) -> None:
        self.found: dict[tuple[int, str], Variables] = {}
        self.used: set[str] = set()  # names in the code so far
        self.waiting: dict[str, list[Any]] = {}  # methods that no code so far names

    def search(self, modules: Iterable[nn.Module], forward: Callable[..., Any]) -> list[Variables]:
        """Return what the code of `modules`, of their hooks and of `forward` reaches."""
        rest: list[Any] = [forward]
        for module in modules:
            rest += (type(module), *vars(module).values())
        self.used.add("forward")
        seen: dict[int, Any] = {}
        while rest and len(seen) < _MAX_VISITED:
            value = rest.pop()
            if id(value) not in seen and not _is_plain(type(value)):  # type: ignore[arg-type]
                seen[id(value)] = value
                rest.extend(self._next(value))  # `+=` would ask a subclass of list
        return list(self.found.values())

    def _next(self, value: Any) -> Iterable[Any]:
        """Add the variables of a function or class; return what to look at behind a value."""
        if isinstance(value, FunctionType):
            return () if _is_foreign(value.__globals__.get("__name__")) else self._of_function(value)
        if isinstance(value, type):
            bases = (*value.__mro__, *type.mro(type(value))[:-2])  # and its metaclass, up to `type`
            return [inner for base in bases if not _is_foreign(base.__module__) for inner in self._of_class(base)]
        if isinstance(value, MethodType):
            return value.__func__, *self._add(value, ("__self__",), f"the object of {value.__qualname__}")
        if isinstance(value, partial):
            return value.func, *self._add(value, ("args", "keywords"), "an argument of a functools.partial")
        if isinstance(value, property):
            return value.fget, value.fset
        if isinstance(value, dict):
            return dict.values(value) if len(value) <= MAX_ENTRIES else ()  # its own may load them
        if isinstance(value, (list, tuple, set, deque)):
            return value if len(value) <= MAX_ENTRIES else ()
        if is_a(value, CONFIG):
            return ()
        if isinstance(value, nn.Module):
            return (type(value),)
        if _is_foreign(type(value).__module__):
            return (getattr(value, "__wrapped__", None),)  # of a static or class method, or functools.lru_cache
        return type(value), getattr(value, "__dict__", None)

    def _of_function(self, function: FunctionType) -> Iterator[Any]:
        names, read, stored = _names(function.__code__)
        namespace, home = function.__globals__, function.__qualname__
        for name in names - self.used:
            yield from self.waiting.pop(name, ())
        self.used |= names
        held = "__dict__", *(name for name in ("__defaults__", "__kwdefaults__") if getattr(function, name))
        yield from self._add(function, held, f"an argument's default or an attribute of {home}")
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            yield from self._add(cell, ("cell_contents",), f"'{name}', which {home} uses")
        for name in (read & namespace.keys()) | stored:
            yield from self._add(namespace, (name,), f"the global variable '{name}'")
            value = namespace.get(name)
            if isinstance(value, ModuleType) and not _is_foreign(value.__name__):
                for inner in names & vars(value).keys():
                    yield from self._add(vars(value), (inner,), f"'{name}.{inner}'")

    def _of_class(self, kind: type) -> Iterator[Any]:
        yield from self._add(kind, None, f"a class attribute of {kind.__name__}")
        for name, value in vars(kind).items():
            if isinstance(value, _METHODS) and name not in self.used and not name.startswith("__"):
                self.waiting.setdefault(name, []).append(value)
            else:
                yield value

    def _add(self, owner: Any, names: tuple[str, ...] | None, described: str) -> Iterable[Any]:
        key = id(owner), "" if names is None else names[0]
        if key not in self.found:
            self.found[key] = Variables(owner, names, described)
        return () if names is None else (value for _, value in self.found[key].items())


class _Names(NamedTuple):
    """The names that code uses, with those of functions in it."""

    all: frozenset[str]  # of globals and attributes
    read: frozenset[str]  # of globals
    stored: frozenset[str]  # of globals that it sets


_NAMES: dict[int, tuple[CodeType, _Names]] = {}  # by id; the code object is kept so that its id stays its own


def _names(code: CodeType) -> _Names:
    if id(code) not in _NAMES:
        found = [_names(inner) for inner in code.co_consts if isinstance(inner, CodeType)]
        named = [(step.opname, step.argval) for step in get_instructions(code) if step.opcode in _NAMED]
        read = {name for op, name in named if "ATTR" not in op and op != "LOAD_METHOD"}
        stored = {name for op, name in named if op == "STORE_GLOBAL"}
        own = _Names(frozenset(code.co_names), frozenset(read), frozenset(stored))
        _NAMES[id(code)] = code, _Names(*(parts[0].union(*parts[1:]) for parts in zip(own, *found, strict=True)))
    return _NAMES[id(code)][1]


@cache
def _is_plain(kind: type) -> bool:
    return issubclass(kind, _PLAIN)


@cache
def _is_foreign(module: str | None) -> bool:
    return str(module).partition(".")[0] in _LIBRARIES
