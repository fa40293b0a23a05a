"""`offload`: what backward still needs is parked in pinned host memory and fetched a block ahead of its use.

Saved-tensor hooks around the model's forward send every large saved storage to the host, once, however many nodes save
a view of it: with checkpointing that is the blocks' inputs, with `pointwise` what is left after it, with `save:` the
kept outputs, which come through `keep`. Copies run on a stream of their own beside the compute stream. When backward
opens the first tensor of a block, the copies back of the block before it are started (cf. Rhu et al. 2016, vDNN,
arXiv:1602.08124). On a CPU the same code copies at once, so that what is parked, and when, can be counted anywhere.
parking.py does the parking; here is where the hooks go.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ckpt_ft.units import MIB, format_bytes

from .parking import Parking, Saved, Usage, unpack
from .standin import Installed, StandIn, Treated
from .tensor_identity import is_dtensor

MIN_BYTES = 1 * MIB  # below it a copy costs more in launches than it frees


class _Local(threading.local):
    running: Parking | None = None


_local = _Local()


def keep(tensor: torch.Tensor) -> Saved:
    """For what is kept outside of autograd's hooks (outputs of `save:`): `tensor`, parked where a model offloads."""
    running = _local.running
    return Saved(tensor.detach(), tensor._version) if running is None else running.pack(tensor)


class Offloading(StandIn):
    """The model's forward with the hooks around it."""

    def __init__(self, module: nn.Module, usage: Usage, min_bytes: int) -> None:
        super().__init__(module)
        self.usage, self.min_bytes = usage, min_bytes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or _local.running is not None:
            return self.forward(*args, **kwargs)
        _local.running = running = Parking(self.usage, self.min_bytes)
        try:
            with torch.autograd.graph.saved_tensors_hooks(running.pack, unpack):
                running.resident = _storages(self.module)
                return self.forward(*args, **kwargs)
        finally:
            _local.running = None
            running.resident = set()


class Block(StandIn):
    """A block's forward: what it saves is fetched together."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        running = None if torch.compiler.is_compiling() else _local.running
        if running is not None:
            running.block += 1
            running.resident |= _storages(self.module)  # FSDP has gathered them by now
        return self.forward(*args, **kwargs)


def install(model: nn.Module, blocks: Mapping[str, nn.Module], *, min_bytes: int = MIN_BYTES) -> Installed:
    """Park saved storages of at least `min_bytes` on the host.

    Install it last: it takes what the hooks of `pointwise` and checkpoints leave.
    """
    stand_ins: list[StandIn] = [Block(block) for block in blocks.values()]
    stand_ins.append(Offloading(model, Usage(), min_bytes))
    dropped = f"saved tensors of {format_bytes(min_bytes)} and more"
    row = Treated(type(model).__name__, 1, dropped, "in host memory")
    return Installed("offload", stand_ins, [row])


def _storages(module: nn.Module) -> set[int]:
    """The storages of parameters and buffers, which stay where they are."""
    tensors: list[Any] = [*module.parameters(), *module.buffers()]
    return {(t._local_tensor if is_dtensor(t) else t).untyped_storage()._cdata for t in tensors}
