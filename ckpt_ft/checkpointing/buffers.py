"""A region's second run leaves its buffers alone: BatchNorm's running statistics are updated once, not twice.

Checkpointing re-runs a region's forward, and a forward may write into buffers: BatchNorm counts a batch twice,
spectral norm takes one power iteration too many and so changes the region's output. A buffer that the first run wrote
gets, for the second run, a copy of its value from before the first, and afterwards its own back. That holds for the
buffers of any module (Bulò et al. 2018, arXiv:1712.02616, treat BatchNorm alone).

A copy must exist before the write. So every buffer is watched in every call, as cheaply as its kind allows:

* a norm's running statistics are copied in each call in train mode: the kernels of batch norm write into them without
  counting a version (`native_batch_norm`'s schema, native_functions.yaml, declares no mutation);
* a buffer that was seen to be written is copied in each call;
* of any other one copy is kept, and made anew where the version counter says that somebody wrote into it. Above 1 MiB
  (a causal mask) none is kept: a first write that comes late is an error.

Writes that count no version are found by value, in a buffer's first call in train and in eval mode. A call that
failed, and one on fake tensors, is not such a call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _NormBase

from ckpt_ft.errors import UserError
from ckpt_ft.units import MIB, format_bytes

from .tensor_identity import version_of


class _Watched:
    """What is known of a buffer across calls."""

    __slots__ = ("copy", "tensor", "version", "written")

    def __init__(self) -> None:
        self.written: dict[bool, bool] = {}  # by the owner's train mode; no entry before a call has been compared
        self.forget()

    def keep(self, tensor: torch.Tensor, version: int, copy: torch.Tensor | None = None) -> None:
        """Keep a copy of `tensor`, which is at `version`, unless it is large."""
        self.tensor: torch.Tensor | None = tensor
        self.version = version
        self.copy = (tensor.clone() if copy is None else copy) if tensor.nbytes <= MIB else None

    def forget(self) -> None:
        self.tensor, self.version, self.copy = None, -1, None


class _Buffer:
    """A buffer in one call of its region."""

    __slots__ = ("copy", "name", "owner", "value", "version", "watched", "written")

    def __init__(self, owner: nn.Module, name: str, value: torch.Tensor | None, watched: _Watched) -> None:
        self.owner, self.name, self.value, self.watched = owner, name, value, watched
        self.version = -1 if value is None else version_of(value)
        self.written = False
        self.copy = None if value is None else self._copied(value)

    @property
    def now(self) -> torch.Tensor | None:
        return self.owner._buffers.get(self.name)

    @now.setter
    def now(self, value: torch.Tensor | None) -> None:
        self.owner._buffers[self.name] = value

    def _copied(self, value: torch.Tensor) -> torch.Tensor | None:
        """The value before the first run; None of a large buffer that no call was seen to write."""
        watched, training = self.watched, self.owner.training
        if self._is_statistic() or watched.written.get(training):
            return value.clone()
        current = watched.tensor is value and watched.version == self.version
        if training in watched.written or (_without_values(value) and watched.tensor is value):
            if not current:
                watched.keep(value, self.version)
            return watched.copy
        return watched.copy if current and watched.copy is not None else value.clone()

    def look(self) -> None:
        """After the first run: see whether it wrote the buffer, and remember."""
        watched, training, value = self.watched, self.owner.training, self.value
        if value is None:
            self.written = self.now is not None
            return
        counted = self.now is not value or version_of(value) != self.version
        self.written = counted or self._is_statistic() or watched.written.get(training, False)
        if not _without_values(value) and training not in watched.written:
            self.written = self.written or not torch.equal(value, self.copy)  # type: ignore[arg-type]
            watched.written[training] = self.written
        if counted:
            watched.written[training] = True
        if self.written:
            watched.forget()
            if self.copy is None:
                raise UserError(
                    f"{type(self.owner).__name__} wrote its buffer '{self.name}' ({format_bytes(value.nbytes)}) as it "
                    "did not in its first call, and its second run must find it as it was: repeat the step, the "
                    "buffer is copied from now on"
                )
        elif watched.tensor is not value:
            watched.keep(value, self.version, self.copy)
            self.copy = watched.copy

    def _is_statistic(self) -> bool:
        """Whether this is a norm's running statistic that a call in this mode updates."""
        owner = self.owner
        running = isinstance(owner, _NormBase) and owner.training and owner.track_running_stats
        return running and self.name.startswith("running_")

    def swap_in(self) -> bool:
        """Before the second run: put in place what the first one found; False where that is there."""
        value = self.value
        if not self.written and self.now is value and (value is None or version_of(value) == self.version):
            return False
        if self.copy is not None:
            self.now = self.copy.clone()
        elif self.now is not value:
            self.now = value
        return True


class Buffers:
    """The buffers of a region, and which of them its forward writes."""

    def __init__(self) -> None:
        self.watched: WeakKeyDictionary[nn.Module, dict[str, _Watched]] = WeakKeyDictionary()

    def before(self, modules: Iterable[nn.Module]) -> list[_Buffer]:
        """To be called before the first run with the region's modules: their buffers, with copies where needed."""
        buffers = []
        for owner in modules:
            if owner._buffers:
                watched = self.watched.setdefault(owner, {})
                for name, value in owner._buffers.items():
                    if name not in watched:
                        watched[name] = _Watched()
                    buffers.append(_Buffer(owner, name, value, watched[name]))
        return buffers

    def __getstate__(self) -> dict[str, Any]:
        return {}  # a copy of the model has buffers of its own

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.watched = WeakKeyDictionary()


def swap_in(buffers: list[_Buffer]) -> list[tuple[_Buffer, torch.Tensor | None]]:
    """Before the second run: put what the first one found in place; returns what was there instead."""
    return [(buffer, now) for buffer in buffers for now in [buffer.now] if buffer.swap_in()]


def swap_out(swapped: list[tuple[_Buffer, torch.Tensor | None]]) -> None:
    """After the second run: put back what `swap_in` returned."""
    for buffer, now in swapped:
        buffer.now = now


def _without_values(value: torch.Tensor) -> bool:
    return isinstance(value, FakeTensor) or value.is_meta
