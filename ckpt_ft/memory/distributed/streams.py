"""CUDA streams on fake tensors: which stream an allocation or a kernel belongs to, and what waits for what.

FSDP2 gathers and reduces on streams of its own, which it asks of `torch.<device type>`; on "cpu" these are empty
stand-ins. Here it gets ones that tell the tracker, so that the caching allocator's pool per stream and the overlap of
communication with computation are those that FSDP2's own code makes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from ckpt_ft.memory.record.tracker import Tracker

_FSDP = "torch.distributed.fsdp._fully_shard."
_ASKS = ("_fsdp_collectives", "_fsdp_param_group", "_fsdp_state", "_fsdp_init")


class Stream:
    """One stream; `name` is what the record calls it, "" for the one that computes."""

    def __init__(self, streams: Streams, name: str) -> None:
        self.streams, self.name = streams, name

    def wait_event(self, event: Event) -> None:
        """Kernels issued to this stream from now on start after what `event` marks."""
        if event is not None and event.number >= 0:
            self.streams.tracker.synchronise("wait", event.number, self.name)

    def wait_stream(self, other: Stream) -> None:
        """The same for all that was issued to `other` so far."""
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        """Mark what was issued so far."""
        event = event or Event(self.streams)
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The host's wait is not modelled: nothing in a step but the optimizer comes after it."""


class Event:
    """A mark in a stream."""

    def __init__(self, streams: Streams) -> None:
        self.streams, self.number = streams, -1

    def record(self, stream: Stream | None = None) -> None:
        """Mark what was issued to `stream` (None: the current one) so far."""
        stream = stream or self.streams.current_stream()
        self.number = next(self.streams.numbers)
        self.streams.tracker.synchronise("record", self.number, stream.name)

    def synchronize(self) -> None:
        """See `Stream.synchronize`."""

    def query(self) -> bool:
        """Whether it has passed: the host never asks in a step."""
        return True


class Streams:
    """What FSDP2 takes for `torch.cuda`."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self.numbers = count()
        self._made = 0
        self._default = Stream(self, "")
        self._stack = [self._default]

    def Stream(self, *args: Any, **kwargs: Any) -> Stream:
        self._made += 1
        return Stream(self, f"stream {self._made}")

    def Event(self, *args: Any, **kwargs: Any) -> Event:
        return Event(self)

    def current_stream(self, device: Any = None) -> Stream:
        return self._stack[-1]

    def current_device(self) -> int:
        return 0

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self._stack.append(stream)
        self.tracker.stream = stream.name
        try:
            yield
        finally:
            self._stack.pop()
            self.tracker.stream = self._stack[-1].name


@contextmanager
def _shapes_are_asked_elsewhere(propagator: Any) -> Iterator[None]:
    """DTensor works out the shapes of whole tensors by running an op on fakes of its own: that is no allocation."""
    ask = propagator._propagate_tensor_meta_non_cached

    def apart(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return ask(*args, **kwargs)

    with patch.object(propagator, "_propagate_tensor_meta_non_cached", apart):
        yield


@contextmanager
def streams_are_followed(tracker: Tracker) -> Iterator[None]:
    """FSDP2's streams, and storages that it empties and fills again, are the tracker's to see."""
    streams = Streams(tracker)
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        result = resize(storage, nbytes)
        tracker.resized(storage)
        return result

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.UntypedStorage, "resize_", resized))
        propagator = getattr(sys.modules.get("torch.distributed.tensor._sharding_prop"), "ShardingPropagator", None)
        if propagator is not None:
            stack.enter_context(_shapes_are_asked_elsewhere(propagator))
        for name in _ASKS:
            module = sys.modules.get(_FSDP + name)
            if module is not None and hasattr(module, "_get_device_handle"):
                stack.enter_context(patch.object(module, "_get_device_handle", lambda kind="cuda": streams))
        yield
