"""What a step reserves: its allocations and frees, replayed through the CUDA caching allocator's rules.

`torch.cuda.max_memory_allocated` is the sum of live blocks; `max_memory_reserved` is what the allocator took from the
device to lay them out, and it is what runs out. The rules are in caching_allocator.py, the options in
settings.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from .caching_allocator import CachingAllocator, OutOfMemory
from .pool import Block
from .settings import AllocatorSettings

__all__ = ["AllocatorSettings", "CachingAllocator", "OutOfMemory", "Replay", "replay"]

DEFAULTS = AllocatorSettings()


@dataclass
class Replay:
    """The allocator's counters after each event, in bytes; they end before the event `oom_at`, where one did not fit.

    `retries`: allocations that first had to give cached segments back, which stalls the device each time; `retried`
    are their events, but for the one that did not fit even so.
    """

    allocated: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)
    oom_at: int | None = None
    retries: int = 0
    retried: list[int] = field(default_factory=list)

    def peak_allocated(self, start: int = 0, stop: int | None = None) -> int:
        """max_memory_allocated over events [start, stop) had the peak been reset just before `start`."""
        return _peak(self.allocated, start, stop)

    def peak_reserved(self, start: int = 0, stop: int | None = None) -> int:
        """max_memory_reserved over events [start, stop) had the peak been reset just before `start`."""
        return _peak(self.reserved, start, stop)


def replay(
    sizes: Sequence[int],
    events: Sequence[int],
    settings: AllocatorSettings = DEFAULTS,
    capacity: int | None = None,
    empty_cache_at: Collection[int] = (),
    streams: Sequence[str] = (),
) -> Replay:
    """Replay `events` on an empty device.

    Args:
        sizes: bytes of each storage as requested.
        events: i >= 0 allocates storage i, ~i frees it; in order. A storage may be allocated again once freed.
        capacity: bytes the allocator can reserve (the device's memory less its context); None never runs out.
        empty_cache_at: events before which torch.cuda.empty_cache() was called.
        streams: of each storage the stream that it is allocated in; () for all in one.
    """
    allocator = CachingAllocator(settings, capacity)
    live: dict[int, Block | None] = {}
    result = Replay()
    emptied = frozenset(empty_cache_at)
    for at, event in enumerate(events):
        if at in emptied:
            allocator.empty_cache()
        if event < 0:
            allocator.free(live.pop(~event))
        else:
            before = allocator.retries
            try:
                live[event] = allocator.malloc(sizes[event], streams[event] if streams else "")
            except OutOfMemory:
                result.oom_at = at
                break
            if allocator.retries > before:
                result.retried.append(at)
        result.allocated.append(allocator.allocated)
        result.reserved.append(allocator.reserved)
    result.retries = allocator.retries
    return result


def _peak(counter: list[int], start: int, stop: int | None) -> int:
    return max(counter[max(start - 1, 0) : stop], default=0)  # what is held at the reset counts
