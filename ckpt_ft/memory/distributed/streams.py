"""CUDA streams on fake tensors: the stream of each allocation and kernel, and which stream waits for which.

FSDP2 gets its streams from `torch.<device type>`; those of torch.cpu do nothing. Here it gets streams that report to
the recorder. So the caching allocator's pools per stream, and the overlap of communication with computation, follow
from FSDP2's own code. `offload` and `swap` find the same streams on the fake mode. An asynchronous collective (of
DDP's buckets) runs on the process group's stream; waiting for it makes the current stream wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from ckpt_ft.compat.distributed import AsyncCollectiveTensor
from ckpt_ft.compat.patches import fake_work, patched, place_in_mesh, shapes_of_whole
from ckpt_ft.memory.record.dispatch import unrecorded
from ckpt_ft.memory.record.recorder import Recorder


class _Stream:
    """One stream, with its `name` in the record; "" for the default one.

    The record has no clock, so `query` says that all kernels have ended.
    """

    def __init__(self, streams: Streams, name: str) -> None:
        self.streams, self.name = streams, name

    def wait_event(self, event: _Event) -> None:
        """Kernels issued to this stream from now on start after `event`."""
        if event is not None:
            event.awaited("wait", self.name)

    def wait_stream(self, other: _Stream) -> None:
        """Kernels issued to this stream from now on start after those issued to `other` so far."""
        self.wait_event(other.record_event())

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event(self.streams)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False


class _Event:
    """The kernels issued to a stream before it; `number` counts the events of all streams, 0 before it is recorded."""

    def __init__(self, streams: Streams) -> None:
        self.streams, self.number = streams, 0

    def record(self, stream: _Stream | None = None) -> None:
        stream = stream or self.streams.current_stream()
        self.streams.recorded += 1
        self.number = self.streams.recorded
        self.streams.note("record", stream.name)

    def awaited(self, what: str, stream: str) -> None:
        """`stream` waits for this event ("wait"), or the host does ("sync")."""
        if self.number:
            self.streams.note(what, stream, self.streams.recorded - self.number)

    def synchronize(self) -> None:
        self.awaited("sync", "")

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Event) -> float:
        return 1.0  # milliseconds


class Streams:
    """Replaces `torch.cuda` in FSDP2's code; the names are torch's.

    recorded: how many events were recorded. The record names an event by how many came after it, so that equal blocks
        have equal records.
    """

    def __init__(self) -> None:
        self.recorder: Recorder | None = None  # set once the model is wrapped
        self.recorded = 0
        self._made = 0
        self._default = _Stream(self, "")
        self._group = _Stream(self, "collectives")
        self._stack = [self._default]

    def Stream(self, *args: Any, **kwargs: Any) -> _Stream:
        self._made += 1
        return _Stream(self, f"stream {self._made}")

    def Event(self, *args: Any, **kwargs: Any) -> _Event:
        return _Event(self)

    def current_stream(self, device: Any = None) -> _Stream:
        return self._stack[-1]

    def current_device(self) -> int:
        return 0

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        self._enter(self._stack + [stream])
        try:
            yield
        finally:
            self._enter(self._stack[:-1])

    def asynchronous(self) -> str:
        """Name of the process group's stream, for a collective that starts after the current stream's kernels."""
        self._group.wait_stream(self.current_stream())
        return self._group.name

    def await_collectives(self) -> None:
        """Make the current stream wait for every asynchronous collective so far."""
        self.current_stream().wait_stream(self._group)

    def waited_for(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """`wait` of an asynchronous collective's work, which the current stream waits for."""

        def waited(work: Any, *args: Any) -> bool:
            self.await_collectives()
            return bool(wait(work, *args))

        return waited

    def note(self, what: str, stream: str, back: int = 0) -> None:
        if self.recorder is not None:
            self.recorder.synchronise(what, stream, back)

    def _enter(self, stack: list[_Stream]) -> None:
        self._stack = stack
        if self.recorder is not None:
            self.recorder.stream = stack[-1].name


@contextmanager
def streams_are_followed() -> Iterator[Streams]:
    """Gives FSDP2 streams that report to a recorder, which the caller sets on the `Streams`.

    DTensor and DeviceMesh run ops of their own, which are not recorded: for the shapes of whole tensors, and for this
    rank's place in a mesh, which depends on data.
    """
    streams = Streams()
    names = ("Stream", "Event", "current_stream", "stream", "current_device")
    with patched(
        shapes_of_whole=unrecorded(shapes_of_whole),
        place_in_mesh=unrecorded(place_in_mesh),
        unique_id=count().__next__,
        collective_result=AsyncCollectiveTensor,
        current_stream=streams.current_stream,
        fake_work=streams.waited_for(fake_work),
        on_cpu={name: getattr(streams, name) for name in names},
    ):
        yield streams
