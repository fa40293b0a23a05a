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

Variables outside of the modules (globals, closures, class attributes) are not restored: a verified step raises an
error if the second run computes other numbers because of them. The same holds for numpy arrays in attributes. Writes
that do not increment the version (`x.data`) are detected in a region's first call and in verified steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.utils import parametrize

from ckpt_ft.compat.modules import BUFFERS, caches, parameters_of
from ckpt_ft.compat.tensors import accumulated_hooks, gradient_hooks, storage_pointer, write_count
from ckpt_ft.errors import UserError
from ckpt_ft.policy import SWAPPED
from ckpt_ft.units import format_bytes

from .fingerprint import fingerprint
from .libraries import ADAPTED, is_a
from .module_contents import Container, Contents, Copies, Place, is_managed, without_values
from .tensor_identity import version_of

_SMALL_BYTES = 4096  # bytes


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
        self.history: WeakKeyDictionary[nn.Module, dict[tuple[str, Any], _TensorHistory]] = WeakKeyDictionary()
        self.last: Contents | None = None  # of the last call, for the next one if nothing has changed

    def __reduce__(self) -> tuple[Any, ...]:  # a copied model has its own modules
        return ModuleState, ()

    def contents(self, module: nn.Module, given: Sequence[Any]) -> Contents:
        """Return the contents of the module, its submodules and the objects among its arguments."""
        if caches(parametrize):  # inside of `parametrize.cached()`, whose variables are of its module
            given = [*given, vars(parametrize)]
        if given:
            return Contents(module, given)
        if self.last is None or not self.last.copies.unchanged():
            self.last = Contents(module)
        return self.last


class StateBeforeFirstRun:
    """The state of a region's modules before its first run, and of their parameters after that run."""

    __slots__ = (
        "_contents", "_copies", "_hooks", "_parameters", "_state", "_tensors",
        "_values", "_versions", "_zero3",
    )  # fmt: skip

    def __init__(self, state: ModuleState, contents: Contents, training: bool) -> None:
        self._state, self._contents, self._copies = state, contents, contents.copies
        parameters = self._parameters = contents.parameters
        self._zero3 = bool(parameters) and hasattr(parameters[0], "ds_id")
        self._versions = _versions(parameters)
        self._tensors = [_HeldTensor(place, owner, value, state, training) for place, owner, value in contents.held]
        self._values: Values | None = None

    def end(self) -> None:
        """Record the state after the first run.

        Raises:
            UserError: the run wrote a parameter, or a large buffer for the first time.
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
        self._values = _values(self._parameters, self._zero3)
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
        if _values(self._parameters, self._zero3) != self._values:
            self._check(self._values)
        copies = there = self._copies
        if not copies.unchanged():
            there = copies.now()
            self._state.last = None  # it must not keep alive what the modules no longer have
            copies.put(self._zero3)
        for tensor in self._tensors:
            tensor.restore()
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

    def written(self) -> str:
        """Return a name of something that the first run has written; "" for nothing."""
        if tensor := next((tensor for tensor in self._tensors if tensor.written), None):
            return _named(tensor.place)
        return "" if self._zero3 or self._copies.unchanged() else "an attribute"  # DeepSpeed counts in attributes

    def _check(self, before: Values) -> None:
        """Raise UserError for the first parameter that cannot be restored."""
        for change, old, new in zip(_CHANGES, before, _values(self._parameters, self._zero3), strict=True):
            for value, was, now in zip(self._parameters, old, new, strict=True):
                if was != now:
                    raise UserError(
                        f"{self._described(value)} was {change} between forward and backward, so recomputation cannot "
                        "repeat the first run; change it after backward"
                    )

    def _described(self, parameter: nn.Parameter) -> str:
        region = self._contents.module
        name = next((name for name, value in region.named_parameters() if value is parameter), "(replaced since)")
        return f"{type(region).__name__}: its parameter '{name}'"

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the current parameters with names, except those that a sharding engine or `swap` manages."""
        for path, module in self._contents.module.named_modules():
            for name, value in parameters_of(module).items():
                managed = value is None or is_managed(value) or hasattr(value, "ds_id") or hasattr(value, SWAPPED)
                if not managed:
                    yield f"parameter '{f'{path}.{name}'.lstrip('.')}'", value

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the current buffers, and tensors and arrays of any size in attributes, with names."""
        now = Contents(self._contents.module, self._contents.given)
        for place, _, value in now.held:
            if not is_managed(value):
                yield _named(place), value
        for place, array in now.arrays:
            if array.dtype.kind in "biuf" and array.flags.writeable:
                yield _named(place), torch.from_numpy(array)


class _HeldTensor:
    __slots__ = ("container", "copy", "history", "place", "training", "value", "version", "written")

    def __init__(
        self, place: Place, container: Container | None, value: torch.Tensor, state: ModuleState, training: bool
    ) -> None:
        self.place, self.container, self.value = place, container, value
        self.history = state.history.setdefault(place[0], {}).setdefault(place[1:], _TensorHistory())
        self.version, self.training, self.written = version_of(value), training, False
        self.copy = self._copied()

    def __str__(self) -> str:
        return f"{'buffer' if self.place[1] == BUFFERS else 'attribute'} {_named(self.place)}"

    def _copied(self) -> torch.Tensor | None:
        """Return a copy of the value before the first run; None for a large tensor that was not written so far."""
        value, history = self.value, self.history
        if not (self._is_statistic() or history.written.get(self.training)):
            known = self.training in history.written
            if without_values(value) or (known and _is_large(value)):
                return None
            if known and history.tensor is value and history.version == self.version:
                return history.copy
        return value.detach().clone()

    def _is_statistic(self) -> bool:
        """Whether this is a norm's running statistic that a call in the current mode updates."""
        owner, table, key = self.place
        running = owner.training and getattr(owner, "track_running_stats", False)
        return running and table == BUFFERS and key.startswith("running_")

    def note_write(self) -> None:
        history, real = self.history, not without_values(self.value)
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

    def restore(self) -> None:
        """Replace the tensor by a copy of its value before the first run; `undo` undoes it."""
        if self.written or version_of(self.value) != self.version:  # in the first run, or since
            assert self.copy is not None
            if self.container is None:
                raise UserError(f"{self} was written after the block's forward; keep it in a list or as a buffer")
            self.container[self.place[2]] = self.copy.clone().requires_grad_(self.value.requires_grad)


Values = tuple[list[int], list[int], list[int]]
# between forward and backward, of each of the `Values`
_CHANGES = (
    "written in place (an optimizer's step?)", "switched to another requires_grad (another adapter?)",
    "given other data (p.data = ...)",
)  # fmt: skip


def _values(parameters: list[nn.Parameter], zero3: bool) -> Values:
    """Return each parameter's version, `requires_grad` and storage identity.

    The identity is not the address, because FSDP frees and gathers storages in place. It is 0 for wrapper subclasses,
    and under ZeRO-3, which gathers into `p.data`.
    """
    return (
        _versions(parameters),
        [value.requires_grad for value in parameters],
        [
            storage_pointer(value.untyped_storage())
            if not zero3 and (type(value) is nn.Parameter or hasattr(value, SWAPPED))
            else 0
            for value in parameters
        ],
    )


def _hook_tables(parameters: list[nn.Parameter]) -> list[dict[int, Any]]:
    """Return the tables of hooks on the parameters themselves, except empty ones."""
    tables: Any = [(gradient_hooks(value), accumulated_hooks(value)) for value in parameters]
    return [table for pair in tables for table in pair if table]


def _versions(parameters: list[nn.Parameter]) -> list[int]:
    try:
        return [write_count(value) for value in parameters]
    except RuntimeError:  # a parameter was created under torch.inference_mode
        return [version_of(value) for value in parameters]


def _is_large(value: torch.Tensor) -> bool:
    return value.layout is torch.strided and value.nbytes > _SMALL_BYTES


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout is torch.strided:
        return torch.equal(one, other)
    return fingerprint(one)[1] == fingerprint(other)[1]  # sparse


def _named(place: Place) -> str:
    owner, table, key = place
    return f"'{key if table in ('', BUFFERS) else table}' of {type(owner).__name__}"
