"""Restores the state of a region's modules for recomputation, so that the second run starts like the first.

Between a region's first run in forward and its second run in backward, the state of its modules can change: through
the first run itself (BatchNorm's statistics, a counter, the last frames of a causal convolution) or through other code
(a LoRA scale set around forward, train or eval mode, PEFT's hooks for one forward). The second run must start from the
same state as the first and must leave no change behind.

* **Entries.** Before the first run, all containers of the modules are copied shallowly: attributes, tables of
  parameters, buffers, submodules and hooks, and the lists, dicts and sets in attributes. Entries that have
  changed are restored for the second run, and the newer entries are put back after it.
* **Tensors written in place**, mostly buffers (Bulò et al. 2018, arXiv:1712.02616, handle BatchNorm's). A copy must
  exist before the write. The region finds out in its first call in train and in eval mode which tensors it writes, and
  then copies only those. Running statistics of norms are always copied in train mode, because those writes do not
  increment the version. Tensors of up to 4 KiB are copied once, and again when their version changes. A larger tensor
  that is first written in a later call raises an error once.
* **Variables outside of the modules** that the region's code reaches (`variables.py`) are looked for in the region's
  first two calls and in those of a new kind. Those that change are from then on copied and restored as entries are.
* **Parameters** are never copied. A parameter that was replaced (`functional_call`) is restored as an entry. An
  in-place write, `p.data = ...` or a changed `requires_grad` raises an error that names the parameter. Parameters
  that FSDP2, ZeRO-3 or accelerate gather, shard or move are left to these libraries.

Writes that do not increment the version (`x.data`, numpy) are detected in a region's first call and in verified steps.
"""

from __future__ import annotations

import inspect
import operator
import pickle
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from threading import local
from types import FunctionType, GeneratorType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from ckpt_ft.errors import UserError
from ckpt_ft.policy import SWAPPED
from ckpt_ft.units import MIB, format_bytes

from . import rng
from .libraries import ADAPTED, CONFIG, is_a, is_class
from .tensor_identity import as_stored, flat, is_array, looked_at, version_of, view_of
from .variables import ENGINES, MAX_ENTRIES, Reached, Variables
from .verify import fingerprint

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called", "_backward_pre_hooks",
    "_backward_hooks",
)  # fmt: skip
_tables = operator.itemgetter(
    "_parameters", "_buffers", "_modules", *_HOOKS, "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs"
)
_global_tables = [getattr(nn.modules.module, f"_global{name}") for name in _HOOKS]
_OWN = frozenset(vars(nn.Module()))
_NOT_RESTORED = frozenset({"forward", "_ckpt_ft_applied", "_replicate_for_data_parallel"})
_DEEPEST, _MOST_CONTAINERS = 4, 256  # nesting depth of containers and objects, and their number in one region
_MAX_FOUND_OUTSIDE = 20_000  # the number of those that a search finds outside of the modules
_CONTAINERS = (torch.Tensor, nn.Module, tuple, dict, list, deque, set, bytearray)
_MAX_ENTRIES = 100_000  # entries; longer containers are not copied
_STATEFUL = frozenset({"collections", "queue", "weakref", "_weakrefset"})  # of Python's own modules
_SMALL_BYTES = 4096  # bytes
_MISSING = object()
_PARAMETRIZED = Variables(vars(parametrize), ("_cache", "_cache_enabled"), "the cache of parametrizations")
_values_of = dict.values  # not `__getitem__`, by which DeepSpeed's tables learn what a module reads
Container = Any  # a dict, list, deque, set or Variables
Place = tuple[Any, str, Any]  # module or Variables, table or attribute name, key
Entry = tuple[Container, Any, Any]  # container, key (None: the whole container), old value


def modules_in(module: nn.Module) -> dict[nn.Module, None]:
    """Return `module` and all its submodules once each (four times as fast as `module.modules()`)."""
    found, rest = {module: None}, [module]
    while rest:
        for child in rest.pop()._modules.values():
            if child is not None and child not in found:
                found[child] = None
                rest.append(child)
    return found


def has(module: nn.Module, name: str) -> bool:
    """Whether `module` has an attribute `name` other than parameters, buffers or submodules; faster than `hasattr`."""
    return name in module.__dict__ or hasattr(type(module), name)


class _TensorHistory:
    """Facts from earlier calls about one tensor of a module."""

    __slots__ = ("copy", "tensor", "version", "written")

    def __init__(self) -> None:
        self.written: dict[bool, bool] = {}  # by the region's train mode; empty before the first call
        self.tensor: torch.Tensor | None = None  # for small tensors, with version and copy
        self.version = -1
        self.copy: torch.Tensor | None = None


class ModuleState:
    """Facts from earlier calls of a region about the state of its modules."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.history: WeakKeyDictionary[nn.Module, dict[tuple[str, Any], _TensorHistory]] = WeakKeyDictionary()
        self.last: Contents | None = None  # of the last call, for the next one if nothing has changed
        self.reached = Reached()
        self.changing: list[Variables] = []  # outside of the modules, known to change
        self.drawn: set[Any] = set()  # random generators that the region is known to move

    def __getstate__(self) -> dict[str, Any]:
        return {}  # a copied model has its own modules

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._reset()

    def contents(self, module: nn.Module, given: Sequence[Any]) -> Contents:
        """Return the contents of the module, its submodules and the objects among its arguments."""
        if parametrize._cache_enabled:  # inside of `parametrize.cached()`
            return Contents(module, given, [*self.changing, _PARAMETRIZED])
        if given:
            return Contents(module, given, self.changing)
        if self.last is None or not self.last.copies.unchanged():
            self.last = Contents(module, (), self.changing)
        return self.last

    def contents_and_all_variables(self, contents: Contents, forward: Callable[..., Any]) -> Contents:
        """Return `contents` and what the variables hold that the region's code may change."""
        found = dict.fromkeys((*self.reached.search(contents.modules, forward), *contents.variables))
        return Contents(contents.module, contents.given, list(found))

    def note_changing(self, changed: Iterable[Any]) -> None:
        """Restore these from now on if they are variables outside of the modules."""
        found = [value for value in dict.fromkeys(changed) if type(value) is Variables and value not in self.changing]
        if found:
            self.changing, self.last = [*self.changing, *found], None


class Contents:
    """The contents of a region's modules at one moment: valid as long as `copies.unchanged()`.

    Attributes:
        module: the region's module.
        modules: it and all its submodules.
        lazy: whether one of them is a lazy layer.
        parameters: their parameters.
        copies: their containers (attributes, tables, containers in attributes), with shallow copies.
        extra: the containers in attributes and inside these, and the attribute tables of plain objects and of modules
            that are referred to without being submodules.
        held: their tensors other than parameters, each with its place and container (None in a tuple).
        arrays: numpy arrays, likewise.
        generators: random generators, each with the module or variables that have it.
        opaque: iterators and byte arrays, which cannot be put back.
        aliases: groups of tensors in `held`, by index, that share a storage.

    Args:
        given: objects among the arguments of a call, whose attributes the forward may write.
        variables: variables outside of the modules.
    """

    __slots__ = (
        "aliases", "arrays", "copies", "extra", "generators", "given", "held", "lazy", "module", "modules",
        "most", "opaque", "parameters", "variables",
    )  # fmt: skip

    def __init__(self, module: nn.Module, given: Sequence[Any] = (), variables: Sequence[Variables] = ()) -> None:
        self.module, self.modules, self.given, self.variables = module, modules_in(module), given, variables
        self.lazy = any(isinstance(inner, LazyModuleMixin) for inner in self.modules)
        found = [value for inner in self.modules for value in inner._parameters.values()]
        self.parameters = [value for value in found if value is not None]
        self.extra: list[tuple[Any, str, Container]] = []
        self.arrays: list[tuple[Place, Container | None, Any]] = []
        self.generators: dict[Any, Any] = {}  # with the module or variable that has it
        self.opaque: list[tuple[Place, Any]] = []
        self.held: list[tuple[Place, Container | None, torch.Tensor]] = []
        self.most = _MOST_CONTAINERS
        attributes = [inner.__dict__ for inner in self.modules]
        tables = [*chain.from_iterable(map(_tables, attributes)), *_global_tables]
        tables = [table for table in tables if isinstance(table, dict)]  # those of a TorchScript module are none
        seen = set(map(id, attributes))
        for inner in self.modules:
            self._add_buffers(inner)
            self._add_values(inner.__dict__, inner, "", seen, _DEEPEST)
        for value in given:
            self._add(value, (module, "an argument", type(value).__name__), None, seen, _DEEPEST)
        self.most = _MAX_FOUND_OUTSIDE
        for outside in variables:
            if outside.settable:
                self.extra.append((outside, "", outside))
            self._add_values(outside, outside, "variables", seen, _DEEPEST)
        containers = [value for _, _, value in self.extra]
        dicts = [value for value in containers if isinstance(value, dict)]
        others = [value for value in containers if not isinstance(value, dict)]
        empty = [table for table in tables if not table]
        self.copies = Copies([*attributes, *(table for table in tables if table), *dicts], others, empty)
        self.aliases = _aliases(self.held)

    @property
    def trained(self) -> tuple[bool, ...]:
        """The `requires_grad` of each parameter."""
        return tuple([value.requires_grad for value in self.parameters])

    def _add_buffers(self, module: nn.Module) -> None:
        for key, value in module._buffers.items():
            if value is not None:
                self.held.append(((module, "_buffers", key), module._buffers, value))

    def _add_values(self, container: Container, owner: Any, path: str, seen: set[int], depth: int) -> None:
        """Add the contents of a container's entries."""
        entries = container.items() if isinstance(container, (dict, Variables)) else enumerate(container)
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
            self.arrays.append((place, container, value))
        elif rng.is_generator(type(value)):
            self.generators[value] = place[0]
        elif depth and id(value) not in seen and len(self.extra) < self.most:
            seen.add(id(value))
            owner, path = place[0], ".".join(map(str, filter(None, place[1:])))
            if isinstance(value, nn.Module):  # not a submodule: one that the region only refers to
                if value not in self.modules:
                    self.extra += [(owner, path, value.__dict__), (owner, path, value._buffers)]
                    self._add_buffers(value)
                return
            if isinstance(value, tuple):
                self._add_values(value, owner, path, seen, depth - 1)
            elif isinstance(value, (dict, list, deque, set)):
                if isinstance(type(value).__iter__, FunctionType):  # makes its entries when they are asked for
                    return
                if len(value) <= _MAX_ENTRIES:
                    self.extra.append((owner, path, value))
                if len(value) <= MAX_ENTRIES:
                    self._add_values(value, owner, path, seen, depth - 1)
            if _keeps_state(type(value)):  # type: ignore[arg-type]
                self.extra.append((owner, path, value.__dict__))
                self._add_values(value.__dict__, owner, path, seen, depth - 1)
            elif names := _slots(type(value)):  # type: ignore[arg-type]
                slots = Variables(value, names, f"an attribute of a {type(value).__name__}")
                self.extra.append((owner, path, slots))
                self._add_values(slots, owner, path, seen, depth - 1)
            elif hasattr(type(value), "__next__") or isinstance(value, bytearray):
                self.opaque.append((place, value))


@cache
def _is_atom(kind: type) -> bool:
    """Whether `Contents._add` finds nothing in objects of this class."""
    return not (
        issubclass(kind, _CONTAINERS)
        or hasattr(kind, "__array__")
        or hasattr(kind, "__next__")
        or rng.is_generator(kind)
        or _keeps_state(kind)  # type: ignore[arg-type]
        or _slots(kind)  # type: ignore[arg-type]
    )


@cache
def _keeps_state(kind: type) -> bool:
    """Whether objects of this class are plain Python objects, whose attributes a forward may write."""
    if kind in (SimpleNamespace, local):
        return True
    if kind.__dictoffset__ == 0 or issubclass(kind, (type, FunctionType)):
        return False
    return not (_is_built_in(kind) or is_class(kind, CONFIG))


@cache
def _slots(kind: type) -> tuple[str, ...]:
    """The names of the slots of a plain class without `__dict__`."""
    if kind.__dictoffset__ or _is_built_in(kind):
        return ()
    declared = [base.__dict__.get("__slots__", ()) for base in kind.__mro__]
    return tuple(name for names in declared for name in ((names,) if isinstance(names, str) else names))


def _is_built_in(kind: type) -> bool:
    package = kind.__module__.partition(".")[0]
    return package in ENGINES or (package in sys.stdlib_module_names and package not in _STATEFUL)


def _aliases(held: list[tuple[Place, Container | None, torch.Tensor]]) -> list[list[int]]:
    """Which tensors, by index, share a storage with others."""
    by_storage: dict[int, list[int]] = {}
    for index, (_, _, value) in enumerate(held):
        if type(value) is torch.Tensor and value.layout is torch.strided and not _without_values(value):
            by_storage.setdefault(value.untyped_storage()._cdata, []).append(index)
    return [group for group in by_storage.values() if len(group) > 1]


class Copies:
    """Containers, and shallow copies of them from one moment. `unchanged` runs three times in each call of a region.

    Args:
        dicts: the dictionaries.
        lists: the other containers: lists, deques, sets and variables.
        empty: dictionaries that are empty at this moment.
    """

    __slots__ = ("dicts", "empty", "entries", "lists", "of_dicts", "of_lists", "sizes")

    def __init__(self, dicts: list[dict[Any, Any]], lists: list[Container], empty: list[dict[Any, Any]]) -> None:
        self.dicts, self.lists, self.empty = dicts, lists, empty
        self.of_dicts, self.of_lists = list(map(_table_copy, dicts)), list(map(list, lists))
        self.entries, self.sizes = _entries(dicts, self.of_lists), [*map(len, dicts), *map(len, self.of_lists)]

    def unchanged(self) -> bool:
        """Whether the containers have the same entries as at that moment."""
        entries, dicts, lists = self.entries, self.dicts, self.lists
        now = list(chain.from_iterable(map(_values_of, dicts)))
        if lists:
            lists = list(map(list, lists))
            now += chain.from_iterable(lists)
        return (
            len(now) == len(entries)
            and all(map(operator.is_, now, entries))
            and not any(self.empty)
            and [*map(len, dicts), *map(len, lists)] == self.sizes
        )

    def now(self) -> Copies:
        """Copies of the same containers as they are now."""
        filled, empty = [x for x in self.empty if x], [x for x in self.empty if not x]
        return Copies(self.dicts + filled, self.lists, empty)

    def changed(self) -> Iterator[tuple[Container, Any]]:
        """The containers whose entries have changed, with the copies."""
        for dicts, copy in zip(self.dicts, self.of_dicts, strict=True):
            if len(dicts) != len(copy) or not all(map(operator.is_, dicts.values(), copy.values())):
                yield dicts, copy
        yield from ((table, {}) for table in self.empty if table)
        for container, copied in zip(self.lists, self.of_lists, strict=True):
            now = list(container)
            if len(now) != len(copied) or not all(map(operator.is_, now, copied)):
                yield container, copied

    def put(self, zero3: bool) -> None:
        """Set the entries of the containers to those of the copies."""
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
            copy |= {key: _leaf(value) for key, value in copy.items() if isinstance(value, torch.Tensor)}
        for values in self.of_lists:
            values[:] = [_leaf(value) if isinstance(value, torch.Tensor) else value for value in values]
        self.entries = _entries(self.of_dicts, self.of_lists)


def _put_entries(container: dict[Any, Any], copy: dict[Any, Any], zero3: bool) -> None:
    if all(type(key) is int for key in (*container, *copy)):  # a table of hooks, whose order matters
        container.clear()
        container.update(copy)
        return
    for key in dict.fromkeys((*copy, *container)):
        wanted, now = copy.get(key, _MISSING), container.get(key, _MISSING)
        if wanted is now or key in _NOT_RESTORED or _is_managed(wanted) or _is_managed(now):
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


class StateBeforeFirstRun:
    """The state of a region's modules before its first run, and of their parameters after that run."""

    __slots__ = (
        "_arrays", "_contents", "_copies", "_hooks", "_learns", "_opaque", "_parameters", "_state", "_tensors",
        "_values", "_versions", "_zero3",
    )  # fmt: skip

    def __init__(self, state: ModuleState, contents: Contents, training: bool, learns: bool) -> None:
        self._state, self._contents, self._copies = state, contents, contents.copies
        self._parameters, self._learns = contents.parameters, learns
        parameters = self._parameters
        self._zero3 = bool(parameters) and hasattr(parameters[0], "ds_id")
        self._versions = _versions(parameters)
        self._tensors = [_HeldTensor(place, owner, value, state, training) for place, owner, value in contents.held]
        for group in contents.aliases:
            _copy_together([self._tensors[index] for index in group])
        self._arrays = [
            (container, place, array, array.copy())
            for place, container, array in contents.arrays
            if array.nbytes <= MIB and container is not None
        ]
        self._opaque = [_pickled(value) for _, value in contents.opaque] if self._learns else []
        self._values: Values | None = None

    def end(self, drawn: Iterable[Any]) -> None:
        """Record the state after the first run.

        Args:
            drawn: the random generators that it has moved.

        Raises:
            UserError: the run wrote a parameter, wrote a large buffer for the first time, or changed what no copy can
                be made of.
        """
        versions = _versions(self._parameters)
        if versions != self._versions and not (
            self._zero3 or any(is_a(module, ADAPTED) for module in self._contents.modules)
        ):
            changed = next(i for i, version in enumerate(versions) if version != self._versions[i])
            raise UserError(
                f"{self._described(self._parameters[changed])} is modified in forward, and recomputation would modify "
                "it again; modify it outside of the checkpointed block, or use 'pointwise' or 'offload'"
            )
        self._values = _values(self._parameters)
        for tensor in self._tensors:
            tensor.note_write()
        for (place, value), before in zip(self._contents.opaque, self._opaque, strict=False):
            if _pickled(value) != before:
                raise UserError(
                    f"forward changes {_named(place)} ({type(value).__name__}), and recomputation cannot set it back; "
                    "use a list and an index, or 'pointwise' or 'offload'"
                )
        self._note_changing(drawn)
        if any(tensor.value.grad_fn is not None for tensor in self._tensors):
            self._copies.without_graphs()  # otherwise each step would keep the graph of the last
            self._state.last, self._contents.held = None, []
        self._tensors = [tensor for tensor in self._tensors if tensor.copy is not None]

    def restore(self) -> Copies:
        """Restore the first run's state before the second run; return what it replaced.

        Raises:
            UserError: a parameter's value or `requires_grad` has changed since the first run.
        """
        assert self._values is not None
        if _values(self._parameters) != self._values:
            self._check(self._values)
        copies = there = self._copies
        self._note_changing(())
        if not copies.unchanged():
            there = copies.now()
            self._state.last = None  # it must not keep alive what the modules no longer have
            copies.put(self._zero3)
        bases: dict[int, torch.Tensor] = {}
        for tensor in self._tensors:
            tensor.restore(bases)
        for container, (_, _, key), copy in self._written_arrays():
            container[key] = copy.copy()
        self._hooks = {id(table): set(table) for table in _hook_tables(self._parameters)}
        return there

    def _note_changing(self, drawn: Iterable[Any]) -> None:
        """Note which variables outside of the modules are not as they were before the first run."""
        if not self._learns:
            return
        changed = {id(container) for container, _ in self._copies.changed()}
        owners = [owner for owner, _, container in self._contents.extra if id(container) in changed]
        owners += [tensor.place[0] for tensor in self._tensors if tensor.is_written()]
        owners += [place[0] for _, place, _ in self._written_arrays()]
        self._state.note_changing(owners + [self._contents.generators.get(generator) for generator in drawn])

    def _written_arrays(self) -> Iterator[tuple[Container, Place, Any]]:
        for container, place, array, copy in self._arrays:
            if array.tobytes() != copy.tobytes():
                yield container, place, copy

    def undo(self, there: Copies) -> None:
        """Put back what `restore` replaced, after the second run."""
        if not there.unchanged():
            there.put(self._zero3)
        for table in _hook_tables(self._parameters):
            known = self._hooks.get(id(table), set())
            for key in [key for key in table if key not in known]:  # the first run has registered this hook already
                del table[key]

    def written(self) -> str:
        """Return a name of something that the first run has written; "" for nothing."""
        found = [_named(tensor.place) for tensor in self._tensors if tensor.written]
        found += [_named(place) for _, place, _ in self._written_arrays()]
        if not (found or self._zero3):  # DeepSpeed counts in attributes
            places = {id(container): (owner, path) for owner, path, container in self._contents.extra}
            places |= {id(module.__dict__): (module, "") for module in self._contents.modules}
            for container, copy in self._copies.changed():
                owner, path = places.get(id(container), (self._contents.module, "a table"))
                keys = () if path or type(owner) is Variables else (*copy, *container)
                found.append(_named((owner, path, next((x for x in keys if container.get(x) is not copy.get(x)), ""))))
        return found[0] if found else ""

    def _check(self, before: Values) -> None:
        """Raise UserError for the first parameter that cannot be restored."""
        versions, requires_grad, storages = _values(self._parameters)
        for i, value in enumerate(self._parameters):
            if versions[i] != before[0][i]:
                change = "written in place (an optimizer's step?)"
            elif requires_grad[i] != before[1][i]:
                change = f"switched to requires_grad={requires_grad[i]} (another adapter?)"
            elif storages[i] != before[2][i] and not hasattr(value, "ds_id"):  # ZeRO-3 gathers into `p.data`
                change = "given other data (p.data = ...)"
            else:
                continue
            raise UserError(
                f"{self._described(value)} was {change} between forward and backward, so recomputation cannot repeat "
                "the first run; change it after backward"
            )

    def _described(self, parameter: nn.Parameter) -> str:
        region = self._contents.module
        copies = dict(zip(map(id, self._copies.dicts), self._copies.of_dicts, strict=True))
        for path, module in region.named_modules():
            for name, value in copies.get(id(module._parameters), {}).items():
                if value is parameter:
                    return f"{type(region).__name__}: its parameter '{f'{path}.{name}'.lstrip('.')}'"
        return f"{type(region).__name__}: a parameter"

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the current parameters with names, except those that a sharding engine or `swap` manages."""
        for path, module in self._contents.module.named_modules():
            for name, value in module._parameters.items():
                managed = value is None or _is_managed(value) or hasattr(value, "ds_id") or hasattr(value, SWAPPED)
                if not managed:
                    yield f"parameter '{f'{path}.{name}'.lstrip('.')}'", value

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the current buffers, and tensors and arrays of any size in attributes, with names."""
        now = Contents(self._contents.module, self._contents.given, self._contents.variables)
        for place, _, value in now.held:
            if not _is_managed(value):
                yield _named(place), value
        for place, _, array in now.arrays:
            if array.dtype.kind in "biuf" and array.flags.writeable:
                yield _named(place), torch.from_numpy(array)


def _pickled(value: Any) -> bytes:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of itertools, from Python 3.12 on
            return pickle.dumps(value)
    except Exception:  # a lock; a generator, which its variables describe
        return repr(inspect.getgeneratorlocals(value)).encode() if isinstance(value, GeneratorType) else b""


def _table_copy(table: dict[Any, Any]) -> dict[Any, Any]:
    """Copy without `__getitem__`, by which DeepSpeed's tables learn that a module reads the parameters of another."""
    return dict(table) if type(table) is dict else dict(dict.items(table))


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.grad_fn is None else tensor.detach().requires_grad_()


def _entries(dicts: list[dict[Any, Any]], lists: list[Container]) -> list[Any]:
    return [*chain.from_iterable(map(_values_of, dicts)), *chain.from_iterable(lists)]


class _HeldTensor:
    """One tensor of a module in one call of its region."""

    __slots__ = ("container", "copy", "history", "place", "together", "training", "value", "version", "written")

    def __init__(
        self, place: Place, container: Container | None, value: torch.Tensor, state: ModuleState, training: bool
    ) -> None:
        self.place, self.container, self.value = place, container, value
        self.history = state.history.setdefault(place[0], {}).setdefault(place[1:], _TensorHistory())
        self.version, self.training, self.written = version_of(value), training, False
        self.copy, self.together = self._copied(), False

    def __str__(self) -> str:
        return f"{'buffer' if self.place[1] == '_buffers' else 'attribute'} {_named(self.place)}"

    def _copied(self) -> torch.Tensor | None:
        """Return a copy of the value before the first run; None for a large tensor that was not written so far."""
        value = self.value
        history = self.history
        if self._is_statistic() or history.written.get(self.training):
            return value.detach().clone()
        if _without_values(value):
            return None
        if self.training not in history.written:
            return value.detach().clone()
        if _is_large(value):
            return None
        if history.tensor is not value or history.version != self.version:
            history.tensor, history.version, history.copy = value, self.version, value.detach().clone()
        return history.copy

    def _is_statistic(self) -> bool:
        """Whether this is a norm's running statistic that a call in the current mode updates."""
        owner, table, key = self.place
        running = isinstance(owner, _NormBase) and owner.training and owner.track_running_stats
        return running and table == "_buffers" and key.startswith("running_")

    def note_write(self) -> None:
        """Record whether the first run wrote the tensor."""
        history, real = self.history, not _without_values(self.value)
        counted = version_of(self.value) != self.version
        self.written = counted or self._is_statistic() or history.written.get(self.training, False)
        if real and self.training not in history.written:
            assert self.copy is not None
            self.written = self.written or not _equal(self.value, self.copy)
            history.written[self.training] = self.written
        if self.written:
            if counted:
                history.written[self.training] = True
            history.tensor = history.copy = None
            if self.container is None and real:
                raise UserError(
                    f"{self} is a tensor in a tuple, and forward modifies it; keep it in a list or as a buffer"
                )
            if self.copy is None and real:
                raise UserError(
                    f"forward modified {self} ({format_bytes(self.value.nbytes)}) and did not in its first call; "
                    "recomputation needs the old values. Repeat the step: they are copied from now on"
                )
        elif _is_large(self.value):
            self.copy = None
        elif self.copy is not None:
            history.tensor, history.version, history.copy = self.value, self.version, self.copy

    def is_written(self) -> bool:
        """Whether the tensor was written since the start of the first run."""
        return self.written or version_of(self.value) != self.version

    def restore(self, bases: dict[int, torch.Tensor]) -> None:
        """Replace the tensor by a copy of its value before the first run; `undo` undoes it.

        bases: copies of the storages, so that tensors that share memory share it in the second run, too.
        """
        if self.is_written():
            assert self.copy is not None
            if self.container is None:
                raise UserError(f"{self} was written after the block's forward; keep it in a list or as a buffer")
            if self.together:
                storage = self.copy.untyped_storage()._cdata
                if storage not in bases:
                    bases[storage] = flat(self.copy).clone()
                found = looked_at(bases[storage], view_of(self.copy))
            else:
                found = self.copy.clone()
            self.container[self.place[2]] = found.requires_grad_(self.value.requires_grad)


def _copy_together(tensors: list[_HeldTensor]) -> None:
    """Make the copies of tensors with one storage share one, too."""
    if any(tensor.copy is not None for tensor in tensors):
        copied = flat(as_stored(tensors[0].value)).clone()
        for tensor in tensors:
            tensor.copy, tensor.together = looked_at(copied, view_of(tensor.value)), True


Values = tuple[list[int], list[bool], list[int]]


def _values(parameters: list[nn.Parameter]) -> Values:
    """Return each parameter's version, `requires_grad` and storage identity.

    The identity is not the address, because FSDP frees and gathers storages in place. It is 0 for wrapper subclasses.
    """
    return (
        _versions(parameters),
        [value.requires_grad for value in parameters],
        [
            value.untyped_storage()._cdata if type(value) is nn.Parameter or hasattr(value, SWAPPED) else 0
            for value in parameters
        ],
    )


def _hook_tables(parameters: list[nn.Parameter]) -> list[dict[int, Any]]:
    """Return the tables of hooks on the parameters themselves, except empty ones."""
    tables: Any = [(value._backward_hooks, value._post_accumulate_grad_hooks) for value in parameters]
    return [table for pair in tables for table in pair if table]


def _versions(parameters: list[nn.Parameter]) -> list[int]:
    try:
        return [value._version for value in parameters]
    except RuntimeError:  # a parameter was created under torch.inference_mode
        return [version_of(value) for value in parameters]


def _is_managed(value: Any) -> bool:
    """Whether the value is sharded by FSDP2 or offloaded by accelerate."""
    return isinstance(value, torch.Tensor) and (isinstance(value, DTensor) or value.is_meta)


def _is_large(value: torch.Tensor) -> bool:
    return value.layout is torch.strided and value.nbytes > _SMALL_BYTES


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout is torch.strided:
        return torch.equal(one, other)
    return fingerprint(one)[1] == fingerprint(other)[1]  # sparse


def _without_values(value: torch.Tensor) -> bool:
    return isinstance(value, FakeTensor) or value.is_meta


def _named(place: Place) -> str:
    owner, table, key = place
    if type(owner) is Variables:
        return str(owner)
    return f"'{key if table in ('', '_buffers') else table}' of {type(owner).__name__}"
