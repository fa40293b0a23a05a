"""What a step reserves: its allocations and frees, replayed through the rules of the CUDA caching allocator.

`torch.cuda.max_memory_allocated` is the sum of live blocks. `max_memory_reserved` is the memory that the allocator
took from the device to lay them out, and it is what runs out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from .caching_allocator import Block, CachingAllocator, OutOfMemory


@dataclass
class Replay:
    """The allocator's counters after each event, in bytes.

    oom_at: the event whose allocation did not fit; the counters end before it. None if all fit.
    retries: allocations that first gave cached segments back, which stalls the device each time.
    """

    allocated: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)
    oom_at: int | None = None
    retries: int = 0

    def peak_allocated(self, start: int = 0, stop: int | None = None) -> int:
        """max_memory_allocated over events [start, stop) had the peak been reset just before `start`."""
        return _peak(self.allocated, start, stop)

    def peak_reserved(self, start: int = 0, stop: int | None = None) -> int:
        """max_memory_reserved over events [start, stop) had the peak been reset just before `start`."""
        return _peak(self.reserved, start, stop)


def replay(
    sizes: Sequence[int],
    events: Sequence[int],
    expandable: bool = False,
    capacity: int | None = None,
    empty_cache_at: Collection[int] = (),
    streams: Sequence[str] = (),
    until: int | None = None,
) -> Replay:
    """Replay `events` on an empty device.

    Args:
        sizes: bytes of each storage as requested.
        events: i >= 0 allocates storage i, ~i frees it; in order. A storage may be allocated again once freed.
        expandable: segments grow page by page (settings.py).
        capacity: bytes the allocator can reserve (the device's memory less its context); None never runs out.
        empty_cache_at: events before which torch.cuda.empty_cache() was called.
        streams: of each storage the stream that it is allocated in; () for all in one.
        until: bytes reserved; the replay ends at the first event that exceeds them.
    """
    allocator = CachingAllocator(expandable, capacity)
    until = 1 << 62 if until is None else until
    live: dict[int, Block | None] = {}
    result = Replay()
    emptied = frozenset(empty_cache_at)
    for at, event in enumerate(events):
        if at in emptied:
            allocator.empty_cache()
        if event < 0:
            allocator.free(live.pop(~event))
        else:
            try:
                live[event] = allocator.malloc(sizes[event], streams[event] if streams else "")
            except OutOfMemory:
                result.oom_at = at
                break
        result.allocated.append(allocator.allocated)
        result.reserved.append(allocator.reserved)
        if allocator.reserved > until:
            break
    result.retries = allocator.retries
    return result


def _peak(counter: list[int], start: int, stop: int | None) -> int:
    return max(counter[max(start - 1, 0) : stop], default=0)  # memory held at the reset counts
