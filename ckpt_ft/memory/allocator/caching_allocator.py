"""PyTorch's CUDA caching allocator without the memory: blocks, segments and pools of one device, for each stream.

The rules are those of c10/cuda/CUDACachingAllocator.cpp: sizes rounded to 512 bytes; separate pools for small (up to
1 MiB) and large requests; segments of 2 MiB, 20 MiB, or the request rounded to 2 MiB; best fit, the lowest address
first; split and merge; on failure, cached segments are given back and the allocation is retried. Docstrings name the
functions of that file in parentheses.

New segments are assumed to lie below earlier ones, because Linux maps memory top down; this decides between free
blocks of equal size. CUDA does not guarantee it, but it reproduces published peaks of reserved memory to the byte, and
the opposite assumption is up to 6 % off (benchmarks/accuracy.py).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass
from typing import cast

from ckpt_ft.units import MIB

MIN_BLOCK = 512  # every size is rounded up to a multiple of this
SMALL_SIZE = MIB  # the largest request that the small pool serves; also the largest tail a large block keeps unsplit
SMALL_SEGMENT = 2 * MIB
MIN_LARGE = 10 * MIB  # from this size on, a request gets a segment of its own size
ROUND_LARGE = 2 * MIB
LARGE_SEGMENT = 20 * MIB  # that requests between 1 and 10 MiB share; the page of a large expandable segment


class OutOfMemory(Exception):
    """The request does not fit into the device's capacity, even with every cached segment given back."""


@dataclass(frozen=True)
class Action:
    """A segment that was taken from the device or given back; names are torch's (see torch.cuda.memory._snapshot)."""

    name: str
    address: int
    size: int


class Block:
    """A range of addresses in one segment. `prev` and `next` are its neighbours in that segment."""

    __slots__ = ("address", "allocated", "expandable", "mapped", "next", "pool", "prev", "size")

    def __init__(self, address: int, size: int, pool: Pool, expandable: bool = False, mapped: bool = True) -> None:
        self.address, self.size, self.pool = address, size, pool
        self.prev: Block | None = None
        self.next: Block | None = None
        self.allocated, self.mapped, self.expandable = False, mapped, expandable

    def split(self, size: int) -> Block:
        """Cut the block after `size` bytes; returns the rest, which is outside the pools."""
        rest = Block(self.address + size, self.size - size, self.pool, self.expandable, self.mapped)
        rest.prev, rest.next = self, self.next
        if rest.next is not None:
            rest.next.prev = rest
        self.next, self.size = rest, size
        return rest


class Pool:
    """The free blocks of one size class: mapped ones in best-fit order, unmapped (expandable) ones by address."""

    def __init__(self, small: bool) -> None:
        self.small, self.page = small, SMALL_SEGMENT if small else LARGE_SEGMENT
        self.fits: list[tuple[int, int]] = []  # size and address of the mapped blocks, sorted
        self.unmapped: list[int] = []  # addresses, sorted
        self.at: dict[int, Block] = {}

    def add(self, block: Block) -> None:
        self.at[block.address] = block
        if block.mapped:
            insort(self.fits, (block.size, block.address))
        else:
            insort(self.unmapped, block.address)

    def remove(self, block: Block) -> None:
        del self.at[block.address]
        if block.mapped:
            del self.fits[bisect_left(self.fits, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, block.address)]


class CachingAllocator:
    """The allocator of one device.

    Args:
        expandable: segments grow page by page.
        capacity: bytes of all segments together, None for no limit.

    Attributes:
        allocated, reserved: torch.cuda.memory_allocated and memory_reserved.
        retries: allocations that gave cached segments back first (torch's num_alloc_retries).
        actions: if it is a list, every change of `reserved` is appended to it.
    """

    def __init__(self, expandable: bool = False, capacity: int | None = None) -> None:
        self.expandable, self.capacity = expandable, capacity
        self.allocated = self.reserved = self.retries = 0
        self.actions: list[Action] | None = None
        self._pools: dict[str, tuple[Pool, Pool]] = defaultdict(lambda: (Pool(small=True), Pool(small=False)))
        self._lowest_address = 1 << 62

    @property
    def pools(self) -> list[Pool]:
        return [pool for pools in self._pools.values() for pool in pools]

    def malloc(self, nbytes: int, stream: str = "") -> Block | None:
        """A block for `nbytes` (None for 0 bytes, which need none) in the pools of `stream`.

        Raises:
            OutOfMemory: the request does not fit. The allocator stays usable without its cached segments.
        """
        if nbytes == 0:
            return None
        size = -(-nbytes // MIN_BLOCK) * MIN_BLOCK
        pool = self._pools[stream][size > SMALL_SIZE]
        block = self._cached_block(pool, size) or self._new_segment(pool, size) or self._after_release(pool, size)
        rest = block.size - size
        if rest >= MIN_BLOCK if pool.small or self.expandable else rest > SMALL_SIZE:
            pool.add(block.split(size))
        block.allocated = True
        self.allocated += block.size
        return block

    def free(self, block: Block | None) -> None:
        if block is None:
            return
        self.allocated -= block.size
        block.allocated = False
        self._merge_neighbours(block)
        block.pool.add(block)

    def empty_cache(self) -> None:
        """torch.cuda.empty_cache(): give back segments without a live block and free pages of expandable segments."""
        for pool in self.pools:
            for _, address in list(pool.fits):
                block = pool.at[address]
                if block.expandable:
                    self._unmap(block)
                elif block.prev is None and block.next is None:
                    pool.remove(block)
                    self._reserve("segment_free", block.address, -block.size)

    def _cached_block(self, pool: Pool, size: int) -> Block | None:
        """The best fit among the cached blocks (get_free_block)."""
        fits = pool.fits
        i = bisect_left(fits, (size, 0))
        if i == len(fits):
            return None
        if not self.expandable:
            return pool.at.pop(fits.pop(i)[1])
        block = pool.at[fits[i][1]]
        # The end of an expandable segment counts with the size it could grow to, so that it is used last.
        while i + 1 < len(fits) and _growable(following := pool.at[fits[i + 1][1]]) < _growable(block):
            i, block = i + 1, following
        pool.remove(block)
        return block

    def _new_segment(self, pool: Pool, size: int) -> Block | None:
        """A new segment, or None if the device is full (alloc_block, get_allocation_size)."""
        if self.expandable:
            return self._grow(pool, size)
        segment = pool.page if size < MIN_LARGE else -(-size // ROUND_LARGE) * ROUND_LARGE
        if not self._fits(segment):
            return None
        block = Block(self._addresses(segment, align=ROUND_LARGE), segment, pool)
        self._reserve("segment_alloc", block.address, segment)
        return block

    def _after_release(self, pool: Pool, size: int) -> Block:
        """Give all cached segments back, so that the request fits (malloc)."""
        self.retries += 1
        self.empty_cache()
        block = self._new_segment(pool, size)
        if block is None:
            raise OutOfMemory(f"{size} bytes wanted, {self.reserved} of {self.capacity} reserved")
        return block

    def _reserve(self, action: str, address: int, nbytes: int) -> None:
        """Take memory from the device, or give it back if `nbytes` is negative."""
        self.reserved += nbytes
        if self.actions is not None:
            self.actions.append(Action(action, address, abs(nbytes)))

    def _fits(self, nbytes: int) -> bool:
        return self.capacity is None or self.reserved + nbytes <= self.capacity

    def _addresses(self, nbytes: int, align: int) -> int:
        self._lowest_address = (self._lowest_address - nbytes) // align * align
        return self._lowest_address

    def _merge_neighbours(self, block: Block) -> None:
        """Merge a block outside the pools with its free neighbours, mapped or unmapped like it (try_merge_blocks)."""
        left, right = block.prev, block.next
        if left is not None and not left.allocated and left.mapped == block.mapped:
            left.pool.remove(left)
            block.address, block.size, block.prev = left.address, left.size + block.size, left.prev
            if block.prev is not None:
                block.prev.next = block
        if right is not None and not right.allocated and right.mapped == block.mapped:
            right.pool.remove(right)
            block.size, block.next = block.size + right.size, right.next
            if block.next is not None:
                block.next.prev = block

    # Expandable segments: one range of addresses, mapped page by page (20 MiB in the large pool, 2 MiB in the small).

    def _grow(self, pool: Pool, size: int) -> Block | None:
        """Map pages at the lowest address with room, next to free blocks (try_allocate_expandable_block)."""
        block = self._expandable_block(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            assert following is not None, "enough unmapped or free addresses follow the block"
            if not self._map(following, min(size - block.size, following.size)):
                return None
            block = following  # merged with the block before it
        pool.remove(block)
        return block

    def _expandable_block(self, pool: Pool, size: int) -> Block:
        """A block from which `size` contiguous bytes can be mapped, else a new segment (find_expandable_block)."""
        for address in pool.unmapped:
            block = pool.at[address]
            start = block.prev if block.prev is not None and not block.prev.allocated else block
            room, free = 0, cast("Block | None", start)
            while room < size and free is not None and not free.allocated:
                room, free = room + free.size, free.next
            if room >= size:
                return start
        page = pool.page
        # torch reserves addresses for 9/8 of the device; without a capacity, a segment can always grow.
        extent = -(-(self.capacity or 1 << 50) * 9 // 8 // page) * page
        block = Block(self._addresses(extent, align=page), extent, pool, expandable=True, mapped=False)
        pool.add(block)
        return block

    def _map(self, block: Block, nbytes: int) -> bool:
        """Map the first `nbytes` of an unmapped block, rounded up to pages; the rest stays unmapped."""
        page = block.pool.page
        mapped = -(-nbytes // page) * page
        if not self._fits(mapped):
            return False
        block.pool.remove(block)
        if mapped < block.size:
            block.pool.add(block.split(mapped))
        block.mapped = True
        self._reserve("segment_map", block.address, mapped)
        self._merge_neighbours(block)
        block.pool.add(block)
        return True

    def _unmap(self, block: Block) -> None:
        """Give back the whole pages inside a free block; the parts before and after them stay free blocks."""
        pool, page = block.pool, block.pool.page
        start, end = -(-block.address // page) * page, block.address + block.size
        stop = end // page * page
        if start >= stop:
            return
        pool.remove(block)
        if start > block.address:
            before, block = block, block.split(start - block.address)
            pool.add(before)
        if end > stop:
            pool.add(block.split(stop - start))
        block.mapped = False
        self._reserve("segment_unmap", start, start - stop)
        self._merge_neighbours(block)
        pool.add(block)


def _growable(block: Block) -> int:
    return block.size + (block.next.size if block.next is not None and not block.next.mapped else 0)
