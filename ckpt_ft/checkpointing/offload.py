"""`offload`: moves saved tensors to pinned host memory and copies them back one block before backward uses them.

Saved-tensor hooks around the model's forward copy every large saved storage to the host once, even if several nodes
save views of it. With checkpointing these are the blocks' inputs, with `pointwise` the tensors that it does not drop,
and with `save:` the kept outputs, which arrive through `keep`. Copies run on a side stream. When backward unpacks the
first tensor of a block, the copies for the preceding block start (cf. Rhu et al. 2016, vDNN, arXiv:1602.08124). On a
CPU the copies are synchronous, so that tests can count them without a GPU.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ckpt_ft.compat.autograd import current_node
from ckpt_ft.compat.distributed import LOCAL_TENSOR, local_tensor
from ckpt_ft.compat.tensors import FakeTensor, storage_pointer, write_count
from ckpt_ft.errors import UserError, one_line
from ckpt_ft.policy import STREAMS
from ckpt_ft.units import MIB, format_bytes

from .standin import Installed, StandIn, Treated, warn_once
from .tensor_identity import (
    View,
    as_stored,
    counter_of,
    counts_with,
    emptied,
    flat,
    is_dtensor,
    is_wrapper,
    looked_at,
    view_of,
    written_to,
)
from .verify import TensorComparison

_PARKED = "_ckpt_ft_parked"
_WRITES_LATER = ("RreluWithNoiseBackward0",)  # nodes whose kernel writes into a tensor that they have already saved


def host_tensor(like: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """An empty tensor in host memory with the shape, strides and dtype of `like`, pinned for copies to `device`.

    By default that is the device of `like`. If the system refuses pinned memory, the tensor is pageable, with one
    warning; copies then block the host.
    """
    size, stride, dtype = like.size(), like.stride(), like.dtype
    device = device or like.device
    if device.type == "cuda" or isinstance(like, FakeTensor):  # in a trace pinned memory counts as host memory
        try:
            return torch.empty_strided(size, stride, dtype=dtype, device="cpu", pin_memory=True)
        except RuntimeError as error:  # the limit on locked memory is reached, or memory runs out
            warn_once(
                f"no pinned host memory ({one_line(error)}): pageable memory is used instead, and copies are slow"
            )
    return torch.empty_strided(size, stride, dtype=dtype, device="meta" if device.type == "meta" else "cpu")


class CopyStream:
    """Copies between host memory and a tensor's device, on a separate stream; on a CPU they are made at once.

    streams: torch.cuda, or the streams of a trace; None on a CPU.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.streams, self.device = self.of(tensor), tensor.device
        self.side: Any = None if self.streams is None else self.streams.Stream(self.device)

    @staticmethod
    def of(tensor: torch.Tensor) -> Any:
        if isinstance(tensor, FakeTensor):
            return getattr(tensor.fake_mode, STREAMS, None)
        return torch.cuda if tensor.is_cuda else None

    def start(self, *copies: tuple[torch.Tensor, torch.Tensor]) -> Any:
        """Start copies, each given as (destination, source), after the work queued on the current stream.

        Returns an event at their end, None on a CPU.
        """
        if self.streams is None:
            for to, source in copies:
                to.copy_(source)
            return None
        self.side.wait_stream(self.streams.current_stream(self.device))
        with self.streams.stream(self.side):
            for to, source in copies:
                to.copy_(source, non_blocking=True)
        return self.side.record_event()

    def wait(self, ended: Any) -> None:
        """Make the current stream wait for the event at the end of copies, if not None."""
        if ended is not None:
            self.streams.current_stream(self.device).wait_event(ended)


class Parked:
    """A copy of a storage in host memory; it is freed when no autograd node refers to it."""

    def __init__(self, flat: torch.Tensor, block: int, parking: Parking) -> None:
        self.block, self.parking = block, parking
        self.copies = parking.copies = parking.copies or CopyStream(flat)
        self.device: torch.Tensor | None = None
        self.ready: Any = None
        self.host = host_tensor(flat)
        if (copied := self.copies.start((self.host, flat))) is not None:
            parking.leaving.append((flat, copied))
            if not parking.inside:
                parking.release()

    def __del__(self) -> None:
        self.copies.wait(self.ready)  # its memory belongs to the current stream, and the copy may still write to it

    def fetch(self) -> None:
        if self.device is not None:
            return
        self.device = torch.empty_like(self.host, device=self.copies.device)
        self.ready = self.copies.start((self.device, self.host))

    def get(self) -> torch.Tensor:
        """Return the storage on the device as a flat tensor, and start fetching the preceding block."""
        self.fetch()
        self.parking.fetch_block(self.block - 1)
        self.copies.wait(self.ready)
        self.ready = None
        assert self.device is not None
        return self.device


class Saved:
    """A saved tensor: an alias if it stays on the device, otherwise its version counter and its host copy.

    It must be an alias, because a node that saves its own output would keep itself alive.

    Args:
        counter: the alias; of a parked tensor, one without data; of a DTensor, one without local data.
        parked: the storage in host memory, and `view` of it, if the tensor does not stay on the device.
        proof: in a verified step, compares the tensor that returns from the host with the original.
    """

    __slots__ = ("counter", "parked", "proof", "version", "view")

    def __init__(
        self,
        counter: torch.Tensor,
        version: int,
        parked: Parked | None = None,
        view: View = (),
        proof: tuple[TensorComparison, int] | None = None,
    ) -> None:
        self.counter, self.version, self.parked, self.view, self.proof = counter, version, parked, view, proof

    def intact(self) -> bool:
        """Whether the tensor was not modified in place since it was saved."""
        return write_count(self.counter) == self.version

    def get(self) -> torch.Tensor:
        """Return the tensor; raise RuntimeError, like autograd, if it was modified in place."""
        whole = self.parked is None or is_dtensor(self.counter)
        if not self.intact():
            raise written_to(self.counter, self.version, view_of(self.counter) if whole else self.view)
        if self.parked is None:
            return self.counter
        node = current_node()
        if node is not None and node.name() in _WRITES_LATER:
            raise UserError(
                "policy 'offload': autograd saves the noise of RReLU before its kernel writes it, so the copy in host "
                "memory is not what backward needs; leave 'offload' out, or use LeakyReLU"
            )
        tensor = looked_at(self.parked.get(), self.view)
        if whole:
            local, tensor = tensor, self.counter.detach()
            setattr(tensor, LOCAL_TENSOR, local)
        if self.proof is not None:
            comparison, slot = self.proof
            return comparison.restored(slot, tensor)
        return tensor


class HostCopy:
    """The latest host copy of a storage, and the version counters of the tensors that were saved from it.

    Tensors that share a storage can have separate version counters (`unsafe_chunk`). The copy is stale if any counter
    has changed, or if a tensor was modified through a counter that was not watched when the copy was made.
    """

    __slots__ = ("counters", "parked")

    def __init__(self) -> None:
        self.parked: Callable[[], Parked | None] = lambda: None
        self.counters: list[tuple[torch.Tensor, int]] = []

    def still_holds(self, counters: Sequence[torch.Tensor]) -> bool:
        """Whether the copy is up to date for aliases with these counters; also start watching the counters."""
        watched = self.counters
        current = all(write_count(counter) == version for counter, version in watched)
        for counter in counters:
            version = write_count(counter)
            if version and current:
                current = any(counts_with(other, counter) for other, _ in watched)
            watched.append((counter, version))
        return current

    def made(self, parked: Parked) -> None:
        self.parked = weakref.ref(parked)
        self.counters = [(counter, write_count(counter)) for counter, _ in self.counters]


class Parking:
    """One forward pass: the storages that it copied to the host, by block.

    A copied storage is kept until the computation has waited for the copy: at the end of its block, or at once outside
    of blocks. Then its memory can be used again. `Tensor.record_stream` would keep it until the host, which runs far
    ahead of the device, sees that the copy has ended (cf. torchtune's OffloadActivations).

    inside: whether a block is running.
    leaving: storages that are being copied to the host, each with the event at the end of its copy.
    """

    def __init__(self, min_bytes: int, comparison: TensorComparison | None = None) -> None:
        self.min_bytes, self.comparison = min_bytes, comparison
        self.resident: dict[int, Any] = {}  # storages that stay on the device, as `_storages` returns them
        self.block, self.inside = 0, False
        self.blocks: dict[int, list[weakref.ref[Parked]]] = {}
        self.leaving: list[tuple[torch.Tensor, Any]] = []
        self.copies: CopyStream | None = None

    def release(self) -> None:
        """Make the current stream wait for the copies to the host so far, and free the copied storages."""
        for _, copied in self.leaving:
            self.copies.wait(copied)  # type: ignore[union-attr]
        self.leaving.clear()

    def pack(self, tensor: torch.Tensor) -> Saved:
        if is_dtensor(tensor):
            hollow: Any = tensor.detach()
            local = local_tensor(hollow)
            if type(local) is torch.Tensor and self.leaves(local):  # other types still wait for a collective
                proof = self.proof(tensor)
                emptied(hollow)
                parked = self.park(local, counter_of(local), hollow)
                return Saved(hollow, write_count(tensor), parked, view_of(local), proof)
        elif self.leaves(tensor):
            counter = counter_of(tensor)
            parked = self.park(tensor, counter)
            return Saved(counter, write_count(tensor), parked, view_of(tensor), self.proof(tensor))
        return Saved(tensor.detach(), write_count(tensor))

    def proof(self, tensor: torch.Tensor) -> tuple[TensorComparison, int] | None:
        """Return the comparison and the slot of an offloaded tensor; None if the step is not verified."""
        return None if self.comparison is None else (self.comparison, self.comparison.saved(tensor))

    def leaves(self, tensor: torch.Tensor) -> bool:
        """Whether to copy the tensor's storage to the host: it is large and not of a parameter or buffer."""
        if tensor.layout is not torch.strided or tensor.is_nested:  # sparse tensors have two storages
            return False
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if nbytes < self.min_bytes or storage_pointer(storage) in self.resident or nbytes % tensor.element_size():
            return False
        return not is_wrapper(tensor)

    def park(self, tensor: torch.Tensor, *counters: torch.Tensor) -> Parked:
        """Copy the tensor's storage to the host, once for all its views.

        counters: tensors from `counter_of` that share the version counters of the tensor and of its DTensor, if any.
        """
        storage = tensor.untyped_storage()
        copy: HostCopy | None = getattr(storage, _PARKED, None)
        parked = None if copy is None else copy.parked()
        if copy is None or parked is None:
            copy = HostCopy()
            setattr(storage, _PARKED, copy)
        if not copy.still_holds(counters) or parked is None:
            parked = Parked(flat(as_stored(tensor)), self.block, self)
            self.blocks.setdefault(self.block, []).append(weakref.ref(parked))
            copy.made(parked)
        return parked

    def fetch_block(self, block: int) -> None:
        """Start copying back all storages of a block that are still needed."""
        for reference in self.blocks.pop(block, ()):
            if (parked := reference()) is not None:
                parked.fetch()


MIN_BYTES = 1 * MIB  # for smaller storages the launch overhead is not worth the memory


class _Local(threading.local):
    running: Parking | None = None


_local = _Local()


def keep(tensor: torch.Tensor) -> Saved:
    """Save an output that `save:` keeps outside autograd's hooks; offload it if the policy has `offload`."""
    running = _local.running
    return Saved(tensor.detach(), write_count(tensor)) if running is None else running.pack(tensor)


class Offloading(StandIn):
    """Replaces the model's forward and runs it inside the saved-tensor hooks."""

    def __init__(self, module: nn.Module, min_bytes: int) -> None:
        super().__init__(module)
        self.min_bytes = min_bytes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.idle("offload") or _local.running is not None:
            return self.forward(*args, **kwargs)
        comparison = self.verification.region(self.name, self.module) if self.verification.active else None
        _local.running = running = Parking(self.min_bytes, comparison)
        try:
            with torch.autograd.graph.saved_tensors_hooks(running.pack, Saved.get):
                running.resident = _storages(self.module)
                return self.forward(*args, **kwargs)
        finally:
            _local.running = None
            running.resident = {}
            running.release()


class Block(StandIn):
    """Replaces a block's forward, so that all tensors the block saves are fetched together."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        running = None if torch.compiler.is_compiling() else _local.running
        if running is None:
            return self.forward(*args, **kwargs)
        running.block, running.inside = running.block + 1, True
        running.resident |= _storages(self.module)  # FSDP has gathered them by now
        out = self.forward(*args, **kwargs)
        running.inside = False
        running.release()
        return out


def install(model: nn.Module, blocks: Mapping[str, nn.Module], *, min_bytes: int = MIN_BYTES) -> Installed:
    """Offload saved storages of at least `min_bytes` to the host.

    Install this engine last, because it handles the tensors that `pointwise` and checkpoints leave.
    """
    stand_ins: list[StandIn] = [Block(block) for block in blocks.values()]
    stand_ins.append(Offloading(model, min_bytes))
    dropped = f"saved tensors of {format_bytes(min_bytes)} and more"
    return Installed("offload", stand_ins, [Treated(type(model).__name__, 1, dropped, "in host memory")])


def _storages(module: nn.Module) -> dict[int, Any]:
    """Return the storages of parameters and buffers, which are never offloaded: addresses, each with a weak reference.

    While the reference lives, no new storage gets the address of a freed one (ZeRO-3's gathered parameters).
    """
    dense: Any = (t for t in (*module.parameters(), *module.buffers()) if t.layout is torch.strided)
    storages = ((local_tensor(t) if is_dtensor(t) else t).untyped_storage() for t in dense)
    return {storage_pointer(storage): StorageWeakRef(storage) for storage in storages}
