"""Recorder: records the events of a step, and every storage from the op that allocated it until it is freed.

Each storage is followed by a weak reference, so that autograd keeps and reuses tensors as it does without a record.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from itertools import chain
from operator import itemgetter
from typing import Any

import torch

from ckpt_ft.compat.tensors import storage_pointer
from ckpt_ft.memory.cost.op_work import Work, plain, tensors
from ckpt_ft.memory.cost.schedule import HOST
from ckpt_ft.memory.gpus import GPU
from ckpt_ft.units import format_bytes

from .events import Item, Op, Storage
from .step_context import StepContext
from .trace import StepTrace

_NAMELESS = ("activations", "temporary")  # categories of storages that have no more specific one


def _host_bytes(nbytes: int, kind: str) -> int:
    """Bytes of a tensor in host memory; a power of two if pinned (ATen/core/CachingHostAllocator.h, allocate)."""
    return 1 << (nbytes - 1).bit_length() if kind == "pinned" else nbytes


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The storage of a tensor, or of the first part of a sparse one."""
    return (tensor if tensor.layout is torch.strided else next(plain(tensor))).untyped_storage()


class _Followed(weakref.ref):
    """A followed storage: its address, its index in the record (-1: ignored), and the zone it was allocated in."""

    __slots__ = ("address", "index", "zone")
    address: int
    index: int
    zone: int


class Recorder:
    """The record of a training step while it grows.

    Args:
        limit: bytes; an allocation beyond it raises torch.OutOfMemoryError, as on a card of that size.
        keeps_ops: record `Op`s too; a long real run has no use for them.

    Attributes:
        storages, ops: in the order in which they began.
        events: the index of a storage where it is allocated, its complement where it is freed.
        marks: (number of events before it, name) of each phase, step or emptied cache.
        residents: storages that were found after the record began but had existed before it.
        notes: what the record assumes, one sentence each.
        allocated, peak: bytes, unrounded: now, and the most since `restart`.
        stream: CUDA stream that kernels are issued to, "" for the default one.
        live: storages that are followed or ignored, by address.
        splits_host: whether host memory is recorded apart from the device's; False for steps on the CPU.
        swapped: owners, by the storage's address, of parameters that `swap` moves between host and device.
    """

    def __init__(self, context: StepContext, limit: int | None = None, keeps_ops: bool = True) -> None:
        self.context, self.limit, self.keeps_ops, self.splits_host = context, limit, keeps_ops, False
        self.allocated, self.peak, self.stream = 0, 0, ""
        self.notes: list[str] = []
        self.swapped: dict[int, str] = {}
        self.live: dict[int, _Followed] = {}
        self._clear()

    def _clear(self) -> None:
        self.storages: list[Storage] = []
        self.events: list[int] = []
        self.residents: list[int] = []
        self.ops: list[Op] = []
        self.marks: list[tuple[int, str]] = []

    # -- the record as a whole --------------------------------------------------------------------------------------

    def trace(self, device: str, gpu: GPU | None, source: str) -> StepTrace:
        """A copy of the record so far, with the residents first."""
        late = len(self.residents)
        ops = [op.later(late) for op in self.ops] if late else list(self.ops)
        marks = [(at + late, name) for at, name in self.marks]
        storages = [storage.copy() for storage in self.storages]
        return StepTrace(
            device, storages, self.residents + self.events, ops, marks, list(self.notes), gpu, source=source
        )

    def restart(self) -> None:
        """Drop the record so far: storages that are alive become residents. Keeps the record of a long run short."""
        live, storages = [seen for seen in self.live.values() if seen.index >= 0], self.storages
        self._clear()
        for seen in live:
            storage = storages[seen.index]
            seen.index = len(self.storages)
            self.storages.append(storage.copy())
            self.residents.append(seen.index)
        self.peak = self.allocated

    @property
    def position(self) -> tuple[int, int, int]:
        """The numbers of marks, ops and events so far."""
        return len(self.marks), len(self.ops), len(self.events)

    def since(self, start: tuple[int, int, int]) -> list[Item]:
        """The marks, ops and events since a `position`, in order."""
        marks, ops, events = start
        found: list[tuple[int, int, Item]] = [(at, 0, name) for at, name in self.marks[marks:]]
        found += [(op.at, 1, op) for op in self.ops[ops:]]
        found += [(at, 2, event) for at, event in enumerate(self.events[events:], events)]
        return [item for _, _, item in sorted(found, key=itemgetter(0, 1))]

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def mark(self, name: str) -> None:
        self.marks.append((len(self.events), name))

    # -- ops --------------------------------------------------------------------------------------------------------

    def add_op(self, name: str, work: Work, module: str, at: int, stream: str, wire: int, around: str) -> None:
        """Record an op that began after `at` events; the other arguments are fields of `Op`."""
        flops, nbytes, dtype, kernels, shape, on_host = work
        phase = self.context.phase
        stream = HOST if on_host else stream
        self.ops.append(Op(name, flops, nbytes, dtype, phase, module, at, kernels, stream, wire, shape, around))

    def synchronise(self, what: str, stream: str, back: int = 0) -> None:
        """Record a CUDA event in `stream` ("record"), or that `stream` ("wait") or the host ("sync") waits for one.

        back: how many events were recorded after that one.
        """
        if self.keeps_ops:
            self.add_op(f"event.{what}", Work(shape=(back,)), "", len(self.events), stream, 0, "")

    def await_device(self, device: Any = None) -> None:
        """Record that the host waits until the device has finished everything issued to it."""
        self.synchronise("await", "")

    # -- memory that no tensor holds --------------------------------------------------------------------------------

    def allocate(self, nbytes: int, category: str, op: str) -> int:
        """Record memory that no tensor holds (a library's workspace); returns the index to `free` it by."""
        index = self._add(nbytes, category, op)
        self.events.append(index)
        return index

    def free(self, index: int) -> None:
        self.events.append(~index)
        self.allocated -= self.storages[index].nbytes

    def scratch(self, nbytes: int, op: str) -> None:
        """Record memory that a kernel allocates and frees while it runs."""
        self.free(self.allocate(nbytes, "temporary", op))

    # -- tensors ----------------------------------------------------------------------------------------------------

    def add_resident(self, values: Iterable[torch.Tensor], category: str) -> None:
        for tensor in chain.from_iterable(map(plain, values)):
            index = self.index_of(tensor)
            if index is not None:
                self.storages[index].category = category
            else:
                self.follow(tensor, category, "", resident=True)

    def put_on_host(
        self, values: Iterable[torch.Tensor], category: str, kind: str = "pageable", packed: bool = False
    ) -> None:
        """Count tensors as host memory from now on; no free event is recorded for those that were on the device.

        kind: pinned, pageable, or managed (CUDA moves it between host and device).
        packed: they share pinned buffers, whose sizes are powers of two.
        """
        for tensor in values if self.splits_host else ():
            self.follow(tensor, category, "", resident=True)
            storage = self.storages[self.live[storage_pointer(tensor.untyped_storage())].index]
            self.allocated -= storage.nbytes
            storage.host = _host_bytes(storage.nbytes + storage.host, "" if packed else kind)
            storage.nbytes, storage.category, storage.host_kind = 0, category, kind

    def on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the device of a tensor in host memory; in a step on the CPU, the tensor itself."""
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor) if self.splits_host else tensor

    def ignore(self, tensor: torch.Tensor) -> None:
        """Leave a tensor out of the record, because it is a number on the host."""
        for part in plain(tensor):
            self._hold(part.untyped_storage(), -1)

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in host memory, where kernels do not reach it, or ignored."""
        seen = self.live.get(storage_pointer(_storage(tensor)))
        return seen is not None and (seen.index < 0 or self.storages[seen.index].host_kind in ("pinned", "pageable"))

    def all_on_host(self, values: Any) -> bool:
        """Whether `values` has tensors and all are on the host, like Adam's step counts.

        A 0-dim tensor on the device may be among larger ones on the host, as a fused optimizer's step counts are.
        """
        numbers = 0  # on the device
        numbers_of_host = sizable = False
        for tensor in tensors(values):
            if self.is_on_host(tensor):
                sizable, numbers_of_host = sizable or tensor.dim() > 0, True
            elif tensor.dim():
                return False
            else:
                numbers += 1
        return sizable or (numbers_of_host and not numbers)

    def made_by(self, tensor: torch.Tensor) -> str:
        """Name of the op that allocated the tensor's storage, "" if unknown."""
        index = self.index_of(tensor)
        return "" if index is None else self.storages[index].op

    def index_of(self, tensor: torch.Tensor) -> int | None:
        """Index of the tensor's storage in the record, None if it is not followed."""
        seen = self.live.get(storage_pointer(_storage(tensor)))
        return None if seen is None or seen.index < 0 else seen.index

    def follow(
        self, tensor: torch.Tensor, category: str, op: str, module: str | None = None, resident: bool = False,
        on_host: str = "",
    ) -> None:  # fmt: skip
        """Record the tensor's storage as allocated here, unless it is known.

        Args:
            op: the op that made it; "" if it existed before the record.
            module: the running module; by default that of the context.
            on_host: the kind of host memory that it is in.
        """
        if tensor.layout is not torch.strided:
            for part in plain(tensor):
                self.follow(part, category, op, module, resident, on_host)
            return
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        seen = self.live.get(storage_pointer(storage))
        if seen is not None:
            if seen.index < 0:
                return
            known = self.storages[seen.index]
            if known.nbytes + known.host in (nbytes, _host_bytes(nbytes, known.host_kind)):
                return
            self._freed(seen)  # resized: CUDA allocates anew and frees the old
        if not nbytes:
            return
        index = self._add(0 if on_host else nbytes, category, op, module)
        if on_host:
            self.storages[index].host, self.storages[index].host_kind = _host_bytes(nbytes, on_host), on_host
        self._hold(storage, index)
        (self.residents if resident else self.events).append(index)

    def follow_like(self, tensor: torch.Tensor, index: int) -> int:
        """Follow `tensor` from now on as a storage like that of `index`, without an event; returns the new index."""
        self.storages.append(self.storages[index].copy())
        self.allocated += self.storages[index].nbytes
        self._hold(tensor.untyped_storage(), len(self.storages) - 1)
        return len(self.storages) - 1

    def reuse(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Record `new`, the result of an op, as if the op had written it into `old` in place."""
        seen = self.live.pop(storage_pointer(old.untyped_storage()))
        self._hold(new.untyped_storage(), seen.index, seen.zone)

    def label(self, value: torch.Tensor, category: str, owner: str) -> None:
        """Set the category and owner of a tensor; follow it if it is not known."""
        for tensor in plain(value):
            if storage_pointer(tensor.untyped_storage()) not in self.live:
                self.follow(tensor, category, "", resident=not self.events)
            index = self.index_of(tensor)
            if index is not None:
                self.storages[index].category, self.storages[index].owner = category, owner

    def set_owner(self, value: torch.Tensor, owner: str) -> None:
        """Set the module named `owner` as owner of `value`, its parameter, buffer, gradient or optimizer state."""
        for tensor in plain(value):
            index = self.index_of(tensor)
            if index is not None:
                self.storages[index].owner = owner

    def label_sent(self, given: Iterable[torch.Tensor]) -> None:
        """Count the operands of a collective as communication, such as DDP's buckets."""
        for tensor in given:
            index = self.index_of(tensor)
            if index is not None and self.storages[index].category in _NAMELESS:
                self.storages[index].category = "communication"

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record that a storage was resized or emptied, as FSDP2 frees and refills gathered parameters."""
        seen = self.live.get(storage_pointer(storage))
        op = "aten.empty.memory_format"
        if seen is not None and seen.index >= 0:
            op = self.storages[seen.index].op or op
            self._freed(seen)
        if storage.nbytes():
            self.context.locate()
            owner = self.swapped.get(storage_pointer(storage))
            index = self.allocate(storage.nbytes(), "communication" if owner is None else "parameters", op)
            self.storages[index].owner = owner or ""
            self._hold(storage, index)

    def resizing(self, resize: Callable[..., torch.UntypedStorage]) -> Callable[..., torch.UntypedStorage]:
        """`resize`, which is `UntypedStorage.resize_`, with a record of each call."""

        def followed(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
            result: torch.UntypedStorage = resize(storage, nbytes)
            self.resized(storage)
            return result

        return followed

    def _add(self, nbytes: int, category: str, op: str, module: str | None = None) -> int:
        if self.limit is not None and self.allocated + nbytes > self.limit:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {format_bytes(nbytes)} for {op or 'what is resident'}; of the "
                f"limit of {format_bytes(self.limit)} set for this run, {format_bytes(self.allocated)} are allocated"
            )
        if self.stream and category in _NAMELESS:
            category = "communication"
        made = Storage(nbytes, category, op, "", "")
        if op:
            running = self.context.module() if module is None else module
            made.module, made.phase, made.stream = running, self.context.phase, self.stream
        self.storages.append(made)
        self.allocated += nbytes
        self.peak = max(self.peak, self.allocated)
        return len(self.storages) - 1

    def _hold(self, storage: torch.UntypedStorage, index: int, zone: int | None = None) -> None:
        address = storage_pointer(storage)
        seen = self.live[address] = _Followed(storage, self._freed)
        seen.address, seen.index, seen.zone = address, index, self.context.zone if zone is None else zone

    def _freed(self, seen: _Followed) -> None:
        if self.live.get(seen.address) is not seen:
            return
        del self.live[seen.address]
        if seen.index < 0:
            return
        self.context.locate(dispatching=False)
        storage = self.storages[seen.index]
        if storage.category == "activations" and seen.zone == self.context.zone:
            storage.category = "temporary"
        self.free(seen.index)
