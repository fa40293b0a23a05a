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
* **Parameters** are never copied. A parameter that was replaced (`functional_call`) is restored as an entry. An
  in-place write, `p.data = ...` or a changed `requires_grad` raises an error that names the parameter. Parameters
  that FSDP2, ZeRO-3 or accelerate gather, shard or move are left to these libraries.

Writes that do not increment the version (`x.data`, numpy) are detected in a region's first call and in verified steps.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.lazy import LazyModuleMixin

from ckpt_ft.errors import UserError
from ckpt_ft.policy import SWAPPED
from ckpt_ft.units import MIB, format_bytes

from .libraries import ADAPTED, is_a
from .tensor_identity import is_array, version_of

_tables = operator.itemgetter(
    "_parameters",
    "_buffers",
    "_modules",
    "_forward_pre_hooks",
    "_forward_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
)
_OWN = frozenset(vars(nn.Module()))
_NOT_RESTORED = frozenset({"forward", "_ckpt_ft_applied", "_replicate_for_data_parallel"})
_LONG = 1000  # entries; longer containers in attributes are data, which is not copied in each call
_TINY = 4096  # bytes
_MISSING = object()
_values_of = dict.values  # not `__getitem__`, by which DeepSpeed's tables learn what a module reads
Container = Any  # a dict, list, deque or set
Place = tuple[nn.Module, str, Any]  # module, table or attribute name, key
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
    """What is known from earlier calls about one tensor of a module."""

    __slots__ = ("copy", "tensor", "version", "written")

    def __init__(self) -> None:
        self.written: dict[bool, bool] = {}  # by the region's train mode; empty before the first call
        self.tensor: torch.Tensor | None = None  # for small tensors, with version and copy
        self.version = -1
        self.copy: torch.Tensor | None = None


class ModuleState:
    """What earlier calls of a region have shown about the state of its modules."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.history: WeakKeyDictionary[nn.Module, dict[tuple[str, Any], _TensorHistory]] = WeakKeyDictionary()
        self.last: Contents | None = None  # of the last call, for the next one if nothing has changed

    def __getstate__(self) -> dict[str, Any]:
        return {}  # a copied model has its own modules

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._reset()

    def contents(self, module: nn.Module) -> Contents:
        """Return what the module and its submodules hold now."""
        if self.last is None or not self.last.copies.unchanged():
            self.last = Contents(module)
        return self.last


class Contents:
    """What a region's modules hold at one moment: valid as long as `copies.unchanged()`.

    Attributes:
        module: the region's module.
        modules: it and all its submodules.
        lazy: whether a layer of them is still lazy.
        parameters: their parameters.
        copies: their containers (attributes, tables, containers in attributes), with shallow copies.
        extra: the containers in attributes.
        held: their tensors other than parameters, each with its place and container.
        arrays: attributes that are numpy arrays of up to 1 MiB.
        generators: attributes that are random generators of PyTorch's.
    """

    __slots__ = ("arrays", "copies", "extra", "generators", "held", "lazy", "module", "modules", "parameters")

    def __init__(self, module: nn.Module) -> None:
        self.module, self.modules = module, modules_in(module)
        self.lazy = any(isinstance(inner, LazyModuleMixin) for inner in self.modules)
        found = [value for inner in self.modules for value in inner._parameters.values()]
        self.parameters = [value for value in found if value is not None]
        self.extra: list[tuple[nn.Module, str, Container]] = []
        self.arrays: list[tuple[nn.Module, str]] = []
        self.generators: list[torch.Generator] = []
        carried: list[tuple[nn.Module, str]] = []  # attributes that are tensors
        for inner in self.modules:
            for name, value in inner.__dict__.items():
                if name in _OWN:
                    continue
                if isinstance(value, torch.Tensor):
                    carried.append((inner, name))
                elif isinstance(value, (dict, list, deque, set)) and len(value) <= _LONG:
                    self.extra.append((inner, name, value))
                elif is_array(value) and value.nbytes <= MIB:
                    self.arrays.append((inner, name))
                elif isinstance(value, torch.Generator):
                    self.generators.append(value)
        attributes = [inner.__dict__ for inner in self.modules]
        tables = list(chain.from_iterable(map(_tables, attributes)))
        containers = [value for _, _, value in self.extra]
        dicts = [value for value in containers if isinstance(value, dict)]
        others = [value for value in containers if not isinstance(value, dict)]
        empty = [table for table in tables if not table]
        self.copies = Copies([*attributes, *(table for table in tables if table), *dicts], others, empty)
        self.held = list(self._held(carried))

    def _held(self, carried: list[tuple[nn.Module, str]]) -> Iterator[tuple[Place, Container, torch.Tensor]]:
        for module in self.modules:
            for key, value in module._buffers.items():
                if value is not None:
                    yield (module, "_buffers", key), module._buffers, value
        for module, name in carried:
            value = module.__dict__[name]
            if not isinstance(value, nn.Parameter):
                yield (module, "", name), module.__dict__, value
        for module, name, container in self.extra:
            if not isinstance(container, set):
                for index, value in container.items() if isinstance(container, dict) else enumerate(container):
                    if type(value) is torch.Tensor:
                        yield (module, name, index), container, value


class Copies:
    """Containers, and shallow copies of them from one moment. `unchanged` runs three times in each call of a region.

    Args:
        dicts: the dictionaries.
        lists: the other containers: lists, deques and sets.
        empty: dictionaries that are empty at this moment.
    """

    __slots__ = ("dicts", "empty", "entries", "lists", "of_dicts", "of_lists", "sizes")

    def __init__(self, dicts: list[dict[Any, Any]], lists: list[Container], empty: list[dict[Any, Any]]) -> None:
        self.dicts, self.lists, self.empty = dicts, lists, empty
        self.of_dicts, self.of_lists = list(map(_table_copy, dicts)), list(map(list, lists))
        self.entries, self.sizes = _entries(dicts, lists), [*map(len, dicts), *map(len, lists)]

    def unchanged(self) -> bool:
        """Whether the containers have the same entries as at that moment."""
        entries, dicts = self.entries, self.dicts
        now = list(chain.from_iterable(map(_values_of, dicts)))
        if self.lists:
            now += chain.from_iterable(self.lists)
        return (
            len(now) == len(entries)
            and all(map(operator.is_, now, entries))
            and not any(self.empty)
            and [*map(len, dicts), *map(len, self.lists)] == self.sizes
        )

    def now(self) -> Copies:
        """Copies of the same containers as they are now."""
        filled, empty = [x for x in self.empty if x], [x for x in self.empty if not x]
        return Copies(self.dicts + filled, self.lists, empty)

    def put(self, zero3: bool) -> None:
        """Set the entries of the containers to those of the copies."""
        for container, copy in zip(self.dicts, self.of_dicts, strict=True):
            if len(container) != len(copy) or not all(map(operator.is_, container.values(), copy.values())):
                _put_entries(container, copy, zero3)
        for container in self.empty:
            if container:
                _put_entries(container, {}, zero3)
        if zero3:  # DeepSpeed's sets of parameters to release, which the second run adds to
            return
        for container, copied in zip(self.lists, self.of_lists, strict=True):
            if len(container) != len(copied) or not all(map(operator.is_, container, copied)):
                container.clear()
                container.update(copied) if isinstance(container, set) else container.extend(copied)

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


class StateBeforeFirstRun:
    """The state of a region's modules before its first run, and of their parameters after that run."""

    __slots__ = (
        "_arrays", "_contents", "_copies", "_hooks", "_parameters", "_state", "_tensors", "_values", "_versions",
        "_zero3",
    )  # fmt: skip

    def __init__(self, state: ModuleState, contents: Contents, training: bool) -> None:
        self._state, self._contents, self._copies = state, contents, contents.copies
        self._parameters = parameters = contents.parameters
        self._zero3 = bool(parameters) and hasattr(parameters[0], "ds_id")
        self._versions = _versions(parameters)
        self._tensors = [_HeldTensor(place, owner, value, state, training) for place, owner, value in contents.held]
        self._arrays = [(module, name, module.__dict__[name].copy()) for module, name in contents.arrays]
        self._values: Values | None = None

    def end(self) -> None:
        """Record the state after the first run.

        Raises:
            UserError: the run wrote a parameter, or wrote a large buffer for the first time.
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
        if not copies.unchanged():
            there = copies.now()
            self._state.last = None  # it must not keep what the modules no longer have
            copies.put(self._zero3)
        for tensor in self._tensors:
            tensor.restore()
        for module, name, copy in self._arrays:
            if module.__dict__[name].tobytes() != copy.tobytes():
                module.__dict__[name] = copy.copy()
        self._hooks = {id(table): set(table) for table in _hook_tables(self._parameters)}
        return there

    def undo(self, there: Copies) -> None:
        """Put back what `restore` replaced, after the second run."""
        if not there.unchanged():
            there.put(self._zero3)
        for table in _hook_tables(self._parameters):
            known = self._hooks.get(id(table), set())
            for key in [key for key in table if key not in known]:  # the first run has registered this hook already
                del table[key]

    def changes(self) -> list[str]:
        """Describe the attributes that have changed since the start of the first run."""
        names = {id(module.__dict__): type(module).__name__ for module in self._contents.modules}
        names |= {id(value): f"{type(module).__name__}.{name}" for module, name, value in self._contents.extra}
        return [
            f"'{key}' of {names[id(container)]} was {_shown(copy.get(key))} in forward and is {_shown(value)}"
            for container, copy in zip(self._copies.dicts, self._copies.of_dicts, strict=True)
            if id(container) in names
            for key, value in container.items()
            if value is not copy.get(key) and key not in _NOT_RESTORED
        ]

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

    @property
    def trained(self) -> tuple[bool, ...]:
        """The `requires_grad` of each parameter."""
        return tuple([value.requires_grad for value in self._parameters])

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the current parameters with names, except those that a sharding engine or `swap` manages."""
        for path, module in self._contents.module.named_modules():
            for name, value in module._parameters.items():
                managed = value is None or _is_managed(value) or hasattr(value, "ds_id") or hasattr(value, SWAPPED)
                if not managed:
                    yield f"parameter '{f'{path}.{name}'.lstrip('.')}'", value

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the modules' current buffers, and tensors and arrays of any size in attributes, with names."""
        now = Contents(self._contents.module)
        for (module, table, key), _, value in now.held:
            if not _is_managed(value):
                yield _named(module, key if table in ("", "_buffers") else table), value
        for module in now.modules:
            for name, value in module.__dict__.items():
                inside = value.values() if isinstance(value, dict) else value
                held = inside if isinstance(value, (dict, list, deque)) and len(value) <= _LONG else (value,)
                for array in filter(is_array, held):
                    if array.dtype.kind in "biuf" and array.flags.writeable:
                        yield _named(module, name), torch.from_numpy(array)


def _table_copy(table: dict[Any, Any]) -> dict[Any, Any]:
    """Copy without `__getitem__`, by which DeepSpeed's tables learn that a module reads the parameters of another."""
    return dict(table) if type(table) is dict else dict(dict.items(table))


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.grad_fn is None else tensor.detach().requires_grad_()


def _entries(dicts: list[dict[Any, Any]], lists: list[Container]) -> list[Any]:
    return [*chain.from_iterable(map(_values_of, dicts)), *chain.from_iterable(lists)]


class _HeldTensor:
    """One tensor of a module in one call of its region."""

    __slots__ = ("container", "copy", "history", "place", "training", "value", "version", "written")

    def __init__(
        self, place: Place, container: Container, value: torch.Tensor, state: ModuleState, training: bool
    ) -> None:
        self.place, self.container, self.value = place, container, value
        self.history = state.history.setdefault(place[0], {}).setdefault(place[1:], _TensorHistory())
        self.version, self.training, self.written = version_of(value), training, False
        self.copy = self._copied()

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
        if value.nbytes > _TINY:
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
            self.written = self.written or not torch.equal(self.value, self.copy)
            history.written[self.training] = self.written
        if self.written:
            if counted:
                history.written[self.training] = True
            history.tensor = history.copy = None
            if self.copy is None and real:
                owner, table, key = self.place
                kind = "buffer" if table == "_buffers" else "attribute"
                raise UserError(
                    f"{type(owner).__name__} modified its {kind} '{key if table in ('', '_buffers') else table}' "
                    f"({format_bytes(self.value.nbytes)}) and did not in its first call; recomputation "
                    "needs the old values. Repeat the step: they are copied from now on"
                )
        elif self.value.nbytes > _TINY:
            self.copy = None
        elif self.copy is not None:
            history.tensor, history.version, history.copy = self.value, self.version, self.copy

    def restore(self) -> None:
        """Replace the tensor by a copy of its value before the first run; `undo` undoes it."""
        if self.written or version_of(self.value) != self.version:
            assert self.copy is not None
            key = self.place[2]
            self.container[key] = self.copy.clone().requires_grad_(self.value.requires_grad)


Values = tuple[list[int], list[bool], list[int]]


def _values(parameters: list[nn.Parameter]) -> Values:
    """Return each parameter's version, `requires_grad` and storage identity.

    The identity is not the address, because FSDP frees and gathers storages in place. It is 0 for tensor subclasses.
    """
    return (
        _versions(parameters),
        [value.requires_grad for value in parameters],
        [value.untyped_storage()._cdata if type(value) is nn.Parameter else 0 for value in parameters],
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


def _without_values(value: torch.Tensor) -> bool:
    return isinstance(value, FakeTensor) or value.is_meta


def _named(module: nn.Module, name: str) -> str:
    return f"'{name}' of {type(module).__name__}"


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else f"another {type(value).__name__}"
