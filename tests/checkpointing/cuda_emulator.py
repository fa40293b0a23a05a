"""A CUDA device on the CPU, to test what runs on several streams: kernels run late, in any order that CUDA allows.

Inside of `Emulator` every operator is put into the queue of the current stream. A queue runs when the host or another
stream waits for it, or when the pace says so. The data of a device tensor are in a block of memory; its own storage
only has the shape. A freed block is given out at once to the next allocation of its size on the same stream, after a
kernel of that stream has filled it with NaN. So a step computes wrong numbers if a wait is missing that CUDA needs.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from ckpt_ft.checkpointing import offload, swap

_MEMORY = "_emulated_memory"
_HOST_READS = ("_local_scalar_dense", "equal", "is_nonzero")
_ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_NAN = 255  # in every byte
PACES = ("compute", "copies", "nothing", "random")


@dataclass(eq=False)
class Event:
    """A point in a stream's queue."""

    stream: Stream
    passed: bool = False


@dataclass(eq=False)
class Stream:
    """A queue of kernels, and of events that it waits for."""

    emulator: Emulator
    queue: deque[Callable[[], object] | Event] = field(default_factory=deque)
    freed: list[torch.Tensor] = field(default_factory=list)  # blocks that an allocation on this stream can get

    def record_event(self) -> Event:
        event = Event(self)
        self.queue.append(lambda: setattr(event, "passed", True))
        return event

    def wait_event(self, event: Event) -> None:
        self.queue.append(event)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def run_one(self) -> bool:
        """Run the first entry of the queue; False if there is none, or it waits."""
        if not self.queue or (isinstance(self.queue[0], Event) and not self.queue[0].passed):
            return False
        first = self.queue.popleft()
        if not isinstance(first, Event):
            with torch.no_grad(), _disable_current_modes():
                first()
        return True

    def finish(self) -> None:
        """Run the queue to its end, and of other streams what it waits for."""
        while self.queue:
            self._advance()

    def _advance(self) -> None:
        first = self.queue[0]
        while isinstance(first, Event) and not first.passed:
            first.stream._advance()
        self.run_one()


class Memory:
    """The block of a device tensor's storage, which lives as long as the storage; None while it is resized to 0."""

    def __init__(self, stream: Stream, nbytes: int) -> None:
        self.stream = stream
        self.block: torch.Tensor | None = None
        self.allocate(nbytes)

    def allocate(self, nbytes: int) -> None:
        freed, emulator = self.stream.freed, self.stream.emulator
        index = next((i for i in reversed(range(len(freed))) if freed[i].nbytes == nbytes), None)
        emulator.reused += index is not None
        with _disable_current_modes():
            self.block = freed.pop(index) if index is not None else torch.full((nbytes,), _NAN, dtype=torch.uint8)

    def free(self) -> None:
        if (block := self.block) is not None:
            self.block = None
            self.stream.queue.append(lambda: block.fill_(_NAN))
            self.stream.freed.append(block)

    __del__ = free


class Emulator(TorchDispatchMode):
    """The device; `CopyStream` finds in it what it uses of torch.cuda.

    pace: which streams run as soon as they can, "compute", "copies" or "nothing"; "random": some of each, by the seed.
    """

    def __init__(self, pace: str, seed: int = 0) -> None:
        super().__init__()
        self.pace, self.random = pace, random.Random(seed)
        self.late = (1.0, 0.2, 0.05)[seed % 3]  # how often another stream runs, for each time that the first one does
        self.compute = Stream(self)
        self.streams, self.now = [self.compute], self.compute
        self.making_host = False
        self.reused = 0  # blocks that were given out again
        self.patches = ExitStack()

    def __enter__(self) -> Emulator:
        make, resize = offload.host_tensor, torch.UntypedStorage.resize_

        def host_tensor(*args: Any) -> torch.Tensor:
            self.making_host = True
            try:
                return make(*args)
            finally:
                self.making_host = False

        def resized(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
            memory: Memory | None = getattr(storage, _MEMORY, None)
            if memory is not None:
                memory.free() if not nbytes else memory.allocate(nbytes)
            return resize(storage, nbytes)

        for target, name, value in (
            (offload, "host_tensor", host_tensor),
            (swap, "host_tensor", host_tensor),
            (offload.CopyStream, "of", staticmethod(lambda tensor: self)),
            (torch.UntypedStorage, "resize_", resized),
        ):
            self.patches.enter_context(patch.object(target, name, value))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.patches.close()

    def Stream(self, device: Any) -> Stream:
        self.streams.append(Stream(self))
        return self.streams[-1]

    def current_stream(self, device: Any = None) -> Stream:
        return self.now

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before

    def to_device(self, *tensors: torch.Tensor) -> None:
        """Move tensors that were made outside to the device."""
        for storage in {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values():
            setattr(storage, _MEMORY, memory := Memory(self.compute, storage.nbytes()))
            with _disable_current_modes():
                memory.block.untyped_storage().copy_(storage)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values of a tensor, after everything that was launched."""
        for stream in self.streams:
            stream.finish()
        with _disable_current_modes():
            return _twin(tensor).clone()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name.partition("::")[2]
        given = _tensors((args, kwargs))
        if self.making_host:
            return func(*args, **kwargs)
        if name in _HOST_READS:
            self.now.finish()
            on_device = _twins(args, kwargs)
            return func(*on_device[0], **on_device[1])
        blocks_host = not all(map(_on_device, given))
        written = [value for value, argument in zip(args, func._schema.arguments, strict=False)
                   if argument.alias_info is not None and argument.alias_info.is_write]  # fmt: skip
        if written:
            on_device = _twins(args, kwargs)
            self._launch(lambda: func(*on_device[0], **on_device[1]))
            if blocks_host and not (len(args) > 2 and args[2]) and not kwargs.get("non_blocking"):
                self.now.finish()
            return written[0]
        out = func(*args, **kwargs)  # for its shape; its values are no kernel's
        made = [x for x in _tensors(out) if not x.is_meta]
        own = {x.untyped_storage()._cdata for x in given}
        if any(x.untyped_storage()._cdata in own for x in made):  # a view
            return out
        on_device = _twins(args, kwargs)
        for x in made:
            setattr(x.untyped_storage(), _MEMORY, Memory(self.now, x.untyped_storage().nbytes()))
        if made and name not in _ALLOCATIONS:
            into = [_twin(x) for x in made]
            self._launch(
                lambda: [
                    to.copy_(value)
                    for to, value in zip(into, _tensors(func(*on_device[0], **on_device[1])), strict=True)
                ]
            )
            if name == "_to_copy" and blocks_host:
                self.now.finish()
        return out

    def _launch(self, kernel: Callable[[], object]) -> None:
        self.now.queue.append(kernel)
        if self.pace == "random":
            for _ in range(self.random.randrange(5)):
                self.random.choices(self.streams, [1.0] + [self.late] * (len(self.streams) - 1))[0].run_one()
        for stream in self.streams:
            while self.pace == ("compute" if stream is self.compute else "copies") and stream.run_one():
                pass


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _on_device(tensor: torch.Tensor) -> bool:
    return hasattr(tensor.untyped_storage(), _MEMORY)


def _twins(args: Any, kwargs: Any) -> Any:
    return tree_map_only(torch.Tensor, _twin, (args, kwargs))


def _twin(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a kernel sees it: a device tensor's view of its block, the host's own memory of another."""
    memory: Memory | None = getattr(tensor.untyped_storage(), _MEMORY, None)
    if memory is None:
        return tensor.detach()
    block: Any = memory.block
    alias = torch.empty(0, dtype=tensor.dtype)
    return alias.set_(block.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
