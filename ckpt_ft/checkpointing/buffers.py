"""A region's second run leaves its buffers alone: BatchNorm's running statistics are updated once, not twice.

Checkpointing re-runs a region's forward, and a forward may write into buffers: BatchNorm counts a batch twice, spectral
norm takes one power iteration too many and so changes the region's output. The rule here knows no module class: a buffer
that the first run wrote gets, for the second run, a copy of its value from before the first, and afterwards its own back.
(Bulò et al. 2018, arXiv:1712.02616, treat BatchNorm alone.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(slots=True)
class _Buffer:
    owner: nn.Module
    name: str
    value: torch.Tensor
    version: int
    copy: torch.Tensor | None  # the value before the first run


class Buffers:
    """The buffers of a region. Which ones its forward writes is learned in its first call, apart for train and eval mode."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.owners = [owner for owner in module.modules() if owner._buffers]
        self.written: dict[bool, set[tuple[int, str]]] = {}

    def before(self) -> list[_Buffer]:
        """To be called before the first run: the buffers, with copies of those that it writes (of all, the first time)."""
        if not self.owners:
            return []
        written = self.written.get(self.module.training)
        return [
            _Buffer(owner, name, value, value._version, value.clone() if written is None or (id(owner), name) in written else None)
            for owner in self.owners
            for name, value in owner._buffers.items()
            if value is not None
        ]

    def after(self, buffers: list[_Buffer]) -> list[_Buffer]:
        """To be called after the first run with what `before` gave: the buffers that were written."""
        changed = [b for b in buffers if b.owner._buffers[b.name] is not b.value or b.value._version != b.version]
        if self.owners:
            self.written[self.module.training] = {(id(b.owner), b.name) for b in changed}
        for buffer in changed:
            if buffer.copy is None:  # written for the first time in this mode: BatchNorm's output does not read the value
                buffer.copy = buffer.owner._buffers[buffer.name].clone()  # type: ignore[union-attr]
        return changed


def swap_in(buffers: list[_Buffer]) -> list[torch.Tensor | None]:
    """Before the second run: put the values from before the first in place; returns what was there."""
    current = [buffer.owner._buffers[buffer.name] for buffer in buffers]
    for buffer in buffers:
        buffer.owner._buffers[buffer.name] = buffer.copy.clone() if buffer.copy is not None else None
    return current


def swap_out(buffers: list[_Buffer], current: list[torch.Tensor | None]) -> None:
    """After the second run: put back what `swap_in` returned."""
    for buffer, value in zip(buffers, current, strict=True):
        buffer.owner._buffers[buffer.name] = value
