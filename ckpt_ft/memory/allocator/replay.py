"""What a step reserves: its allocations and frees, replayed through the rules of the CUDA caching allocator.

`torch.cuda.max_memory_allocated` is the sum of live blocks. `max_memory_reserved` is the memory that the allocator
took from the device to lay them out, and it is what runs out. `allocator_history` adds addresses and segments.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from .caching_allocator import Action, Block, CachingAllocator, OutOfMemory


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
    live: dict[int, Block | None] = {}
    result = Replay()
    for at, event in enumerate(events):
        if at in empty_cache_at:
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
        if until is not None and allocator.reserved > until:
            break
    result.retries = allocator.retries
    return result


def _peak(counter: list[int], start: int, stop: int | None) -> int:
    return max(counter[max(start - 1, 0) : stop], default=0)  # memory held at the reset counts


@dataclass(frozen=True)
class AllocatorHistory:
    """What the allocator did at each event, and what is mapped after the last one.

    addresses: of the block that each event allocates or frees; None for an allocation of no bytes and its free.
    actions: the segments that each event took or gave back.
    segments: the blocks that fill each mapped range, in order of address.
    live: address of a block -> the storage in it.
    """

    addresses: list[int | None]
    actions: list[list[Action]]
    segments: list[list[Block]]
    live: dict[int, int]


def allocator_history(
    sizes: Sequence[int],
    events: Sequence[int],
    expandable: bool,
    empty_cache_at: Collection[int] = (),
    streams: Sequence[str] = (),
) -> AllocatorHistory:
    """Replay `events` on an empty device without a limit; the arguments are those of `replay`."""
    allocator = CachingAllocator(expandable)
    blocks: dict[int, Block] = {}
    addresses: list[int | None] = []
    actions: list[list[Action]] = []
    for at, event in enumerate(events):
        actions.append([])
        allocator.actions = actions[-1]
        if at in empty_cache_at:
            allocator.empty_cache()
        block = allocator.malloc(sizes[event], streams[event]) if event >= 0 else blocks.pop(~event, None)
        addresses.append(None if block is None else block.address)
        if event < 0:
            allocator.free(block)
        elif block is not None:
            blocks[event] = block
    live = {block.address: index for index, block in blocks.items()}
    return AllocatorHistory(addresses, actions, _segments(allocator, list(blocks.values())), live)


def _segments(allocator: CachingAllocator, live: list[Block]) -> list[list[Block]]:
    """The segments that are mapped now; `live` are the blocks of `malloc` that are not freed."""
    free = [block for pool in allocator.pools for block in pool.at.values() if block.mapped]
    segments: list[list[Block]] = []
    for block in sorted([*live, *free], key=attrgetter("address")):
        if block.prev is None or not block.prev.mapped:
            segments.append([])
        segments[-1].append(block)
    return segments
