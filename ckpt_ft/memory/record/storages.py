"""Storages: every storage that is met, from the op that made it until it dies.

Each is followed by a weak reference, so that what autograd keeps and steals stays as it is without the record.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ckpt_ft.units import format_bytes

from .events import Storage
from .opinfo import plain, tensors
from .position import Position

_NAMELESS = ("activations", "temporary")  # categories of what has no better one


class _Seen(weakref.ref):
    """A followed storage: its address, its index in the record, and the zone that it was allocated in."""

    __slots__ = ("address", "index", "zone")
    address: int
    index: int
    zone: int


class Storages(Position):
    """Base of a Tracker: the storages of its record, which of them live, and the events of both.

    Args:
        limit: bytes; the allocation that would pass it raises torch.OutOfMemoryError.
    """

    stream = ""  # CUDA stream that is issued to, "" for the one that computes

    def __init__(self, limit: int | None = None) -> None:
        super().__init__()
        self.limit = limit
        self.allocated = 0  # bytes, unrounded, right now
        self.peak = 0  # the most that `allocated` has been since `restart`
        self._live: dict[int, _Seen] = {}
        self._clear()

    # -- what the caller says ---------------------------------------------------------------------------------------

    def add_resident(self, values: Iterable[torch.Tensor], category: str) -> None:
        """Follow tensors that exist already."""
        for value in values:
            for tensor in plain(value):
                seen = self._live.get(tensor.untyped_storage()._cdata)
                if seen is not None and seen.index >= 0:
                    self._storages[seen.index].category = category
                else:
                    self._follow(tensor, category, "", resident=True)

    def add_resident_like(self, tensor: torch.Tensor, like: torch.Tensor) -> None:
        """Follow `tensor`, too, where `like` is one that exists already and was met."""
        index = self.index_of(like)
        if index is not None and index in self._residents:
            self._follow(tensor, self._storages[index].category, "", resident=True)

    def add_beside(self, models: Iterable[nn.Module]) -> None:
        """Models on the device that are not trained (what encodes images and prompts in each step) are resident."""
        for model in models:
            self.add_resident(model.parameters(), "parameters")
            self.add_resident(model.buffers(), "buffers")

    def restart(self) -> None:
        """Forget the past; what lives becomes resident. Keeps the record of a long run short."""
        live, storages = [seen for seen in self._live.values() if seen.index >= 0], self._storages
        self._clear()
        for seen in live:
            storage = storages[seen.index]
            seen.index = len(self._storages)
            self._storages.append(storage.copy())
            self._residents.append(seen.index)
        self.peak = self.allocated

    def allocate(self, nbytes: int, category: str, op: str) -> int:
        """Record memory that no tensor holds (a library's workspace); returns the index to `free` it by."""
        index = self._record(nbytes, category, op)
        self._events.append(index)
        return index

    def free(self, index: int) -> None:
        """Record the end of what `allocate` recorded."""
        self._events.append(~index)
        self.allocated -= self._storages[index].nbytes

    def scratch(self, nbytes: int, op: str) -> None:
        """Record memory that a kernel takes and gives back while it runs."""
        self.free(self.allocate(nbytes, "temporary", op))

    def ignore(self, tensor: torch.Tensor) -> None:
        """Leave a tensor out of the record: it is not on the device."""
        storage = tensor.untyped_storage()
        seen = self._live[storage._cdata] = _Seen(storage, self._freed)
        seen.address, seen.index, seen.zone = storage._cdata, -1, self._zone

    def is_ignored(self, tensor: torch.Tensor) -> bool:
        seen = self._live.get(tensor.untyped_storage()._cdata)
        return seen is not None and seen.index < 0

    def all_ignored(self, values: Any) -> bool:
        """Whether there are tensors in `values` and all of them are ignored: the host's, like Adam's step counts."""
        some = False
        for tensor in tensors(values):
            if tensor.layout is not torch.strided or not self.is_ignored(tensor):
                return False
            some = True
        return some

    def made_by(self, tensor: torch.Tensor) -> str:
        """The op whose storage `tensor` lives in, "" if unknown."""
        seen = self._live.get(tensor.untyped_storage()._cdata)
        return "" if seen is None or seen.index < 0 else self._storages[seen.index].op

    def index_of(self, tensor: torch.Tensor) -> int | None:
        """Which storage of the record `tensor` lives in, None if in none."""
        seen = self._live.get(tensor.untyped_storage()._cdata)
        return None if seen is None or seen.index < 0 else seen.index

    def follow_like(self, tensor: torch.Tensor, index: int) -> int:
        """Follow `tensor` from here on as a storage like that of `index`, with no event; returns its own index."""
        like = self._storages[index]
        self._storages.append(like.copy())
        self.allocated += like.nbytes
        self._hold(tensor.untyped_storage(), len(self._storages) - 1, [])
        return len(self._storages) - 1

    def unfollow(self, tensor: torch.Tensor) -> None:
        """The opposite: the record no longer hears of `tensor`, nor of its end."""
        seen = self._live.pop(tensor.untyped_storage()._cdata)
        self.allocated -= self._storages[seen.index].nbytes

    # -- what is followed -------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        """Forget what was recorded."""
        self._storages: list[Storage] = []
        self._events: list[int] = []  # the index of a storage where it is made, its complement where it dies
        self._residents: list[int] = []

    def _record(self, nbytes: int, category: str, op: str, module: str | None = None) -> int:
        """`module`: that is running, where the caller has asked already."""
        if self.limit is not None and self.allocated + nbytes > self.limit:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {format_bytes(nbytes)} for {op or 'what is resident'}; of the "
                f"limit of {format_bytes(self.limit)} set for this run, {format_bytes(self.allocated)} are allocated"
            )
        if self.stream and category in _NAMELESS:
            category = "communication"
        if op:
            made = Storage(
                nbytes, category, op, self._module() if module is None else module, self._phase, self.stream
            )
        else:
            made = Storage(nbytes, category, "", "", "")
        self._storages.append(made)
        self.allocated += nbytes
        if self.allocated > self.peak:
            self.peak = self.allocated
        return len(self._storages) - 1

    def _follow(
        self, tensor: torch.Tensor, category: str, op: str, module: str | None = None, resident: bool = False
    ) -> None:
        if tensor.layout is not torch.strided:
            if tensor.is_sparse:
                for part in plain(tensor):
                    self._follow(part, category, op, module, resident)
            return
        storage = tensor.untyped_storage()
        address, nbytes = storage._cdata, storage.nbytes()
        seen = self._live.get(address)
        if seen is not None:
            if seen.index < 0 or self._storages[seen.index].nbytes == nbytes:
                return
            self._freed(seen)  # resized: CUDA allocates anew and frees the old
        if not nbytes:
            return
        index = self._record(nbytes, category, op, module)
        self._hold(storage, index, self._residents if resident else self._events)

    def _hold(self, storage: torch.UntypedStorage, index: int, events: list[int]) -> None:
        seen = self._live[storage._cdata] = _Seen(storage, self._freed)
        seen.address, seen.index, seen.zone = storage._cdata, index, self._zone
        events.append(index)

    def _reuse(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """`new` is what `old` would have become in place."""
        seen, storage = self._live.pop(old.untyped_storage()._cdata), new.untyped_storage()
        again = self._live[storage._cdata] = _Seen(storage, self._freed)
        again.address, again.index, again.zone = storage._cdata, seen.index, seen.zone

    def _freed(self, seen: _Seen) -> None:
        if self._live.get(seen.address) is not seen:
            return
        del self._live[seen.address]
        if seen.index < 0:
            return
        self._locate(dispatching=False)
        storage = self._storages[seen.index]
        if storage.category == "activations" and seen.zone == self._zone:
            storage.category = "temporary"
        self._events.append(~seen.index)
        self.allocated -= storage.nbytes

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """Record that a storage was given other bytes, or none: so FSDP2 frees and refills gathered parameters."""
        seen = self._live.get(storage._cdata)
        op = "aten.empty.memory_format"
        if seen is not None and seen.index >= 0:
            op = self._storages[seen.index].op or op
            self._freed(seen)
        if storage.nbytes():
            self._locate()
            self._hold(storage, self._record(storage.nbytes(), "communication", op), self._events)

    @property
    def _resize(self) -> Callable[[torch.UntypedStorage, int], torch.UntypedStorage]:
        resize = torch.UntypedStorage.resize_

        def followed(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
            result: torch.UntypedStorage = resize(storage, nbytes)
            self._resized(storage)
            return result

        return followed

    def _mark(self, value: torch.Tensor, category: str, owner: str) -> None:
        for tensor in plain(value):
            seen = self._live.get(tensor.untyped_storage()._cdata)
            if seen is None:
                self._follow(tensor, category, "", resident=not self._events)
            elif seen.index >= 0:
                self._storages[seen.index].category = category
        self._own(value, owner)

    def _own(self, value: torch.Tensor, owner: str) -> None:
        """`value` is a parameter or buffer of the module called `owner`, or belongs to one."""
        for tensor in plain(value):
            seen = self._live.get(tensor.untyped_storage()._cdata)
            if seen is not None and seen.index >= 0:
                self._storages[seen.index].owner = owner

    def _mark_sent(self, given: Iterable[torch.Tensor]) -> None:
        """What a collective is given is communication's: DDP's buckets, of which nothing else tells."""
        for tensor in given:
            seen = self._live.get(tensor.untyped_storage()._cdata)
            if seen is not None and seen.index >= 0 and self._storages[seen.index].category in _NAMELESS:
                self._storages[seen.index].category = "communication"
