"""A region's second run leaves its buffers alone: BatchNorm's running statistics are updated once, not twice.

Checkpointing re-runs a region's forward, and a forward may write into buffers: BatchNorm counts a batch twice,
spectral norm takes one power iteration too many and so changes the region's output. A buffer that the first run wrote
gets, for the second run, a copy of its value from before the first, and afterwards its own back. That holds for the
buffers of any module (Bulò et al. 2018, arXiv:1712.02616, treat BatchNorm alone).

Which buffers a forward writes cannot be read from their version counters alone: the kernels of batch norm write into
running statistics without counting (`native_batch_norm`'s schema, native_functions.yaml, declares no mutation). So a
region's first call compares values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _NormBase


@dataclass(slots=True)
class _Buffer:
    key: tuple[int, str]  # which of the owners, and its name there: a deep copy of the model means its own
    owner: nn.Module
    value: torch.Tensor
    version: int
    copy: torch.Tensor | None = None  # the value before the first run

    @property
    def now(self) -> torch.Tensor | None:
        return self.owner._buffers[self.key[1]]

    @now.setter
    def now(self, value: torch.Tensor | None) -> None:
        self.owner._buffers[self.key[1]] = value


class Buffers:
    """The buffers of a region.

    Which ones its forward writes is learned in its first call, apart for each combination of train and eval mode of
    the modules that own them (a frozen BatchNorm writes nothing).
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.owners = [owner for owner in module.modules() if owner._buffers]
        self.written: dict[tuple[bool, ...], set[tuple[int, str]]] = {}

    def before(self) -> list[_Buffer]:
        """To be called before the first run: the buffers, with copies of those that it writes (at first, of all)."""
        if not self.owners:
            return []
        written = self.written.get(self.mode())
        buffers = [
            _Buffer((i, name), owner, value, value._version)
            for i, owner in enumerate(self.owners)
            for name, value in owner._buffers.items()
            if value is not None
        ]
        for buffer in buffers:
            if written is None or buffer.key in written:
                buffer.copy = buffer.value.clone()
        return buffers

    def after(self, buffers: list[_Buffer]) -> list[_Buffer]:
        """To be called after the first run with what `before` gave: the buffers that were written."""
        if not buffers:
            return []
        written = self.written.get(self.mode())
        if written is None:
            changed = [b for b in buffers if _counted(b) or _differs(b)]
        else:
            changed = [b for b in buffers if b.key in written or _counted(b)]
        self.written[self.mode()] = {b.key for b in changed}
        for buffer in changed:
            if buffer.copy is None:  # written for the first time in this mode: its value from before is gone
                buffer.copy = buffer.now.clone()  # type: ignore[union-attr]
        return changed

    def mode(self) -> tuple[bool, ...]:
        return tuple(owner.training for owner in self.owners)


def _counted(buffer: _Buffer) -> bool:
    """Whether PyTorch knows of a write: another tensor was put in place, or this one's version counter moved."""
    return buffer.now is not buffer.value or buffer.value._version != buffer.version


def _differs(buffer: _Buffer) -> bool:
    """Whether the value changed; of a tensor without values: whether it is a norm's running statistics in use."""
    if isinstance(buffer.value, FakeTensor) or buffer.value.is_meta:
        return isinstance(buffer.owner, _NormBase) and buffer.owner.training
    return not torch.equal(buffer.value, buffer.copy)  # type: ignore[arg-type]


def swap_in(buffers: list[_Buffer]) -> list[torch.Tensor | None]:
    """Before the second run: put the values from before the first in place; returns what was there."""
    current = [buffer.now for buffer in buffers]
    for buffer in buffers:
        buffer.now = buffer.copy.clone() if buffer.copy is not None else None
    return current


def swap_out(buffers: list[_Buffer], current: list[torch.Tensor | None]) -> None:
    """After the second run: put back what `swap_in` returned."""
    for buffer, value in zip(buffers, current, strict=True):
        buffer.now = value
