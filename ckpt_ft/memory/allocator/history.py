"""What the caching allocator took from the device and gave back, in order, and how its segments stand in the end."""

from __future__ import annotations

from dataclasses import dataclass

from .caching_allocator import CachingAllocator
from .pool import Block, Pool
from .settings import AllocatorSettings


@dataclass(frozen=True)
class Action:
    """A segment that was taken from the device or given back; names are torch's (see torch.cuda.memory._snapshot)."""

    name: str
    address: int
    size: int
    small: bool


@dataclass(frozen=True)
class Segment:
    """A run of addresses that is mapped, and the blocks that fill it."""

    blocks: list[Block]
    small: bool

    @property
    def size(self) -> int:
        return sum(block.size for block in self.blocks)


class WatchedAllocator(CachingAllocator):
    """A caching allocator that notes what it takes from the device and gives back."""

    def __init__(self, settings: AllocatorSettings) -> None:
        super().__init__(settings)
        self.actions: list[Action] = []

    def segments(self, live: list[Block]) -> list[Segment]:
        """What is mapped now; `live` are the blocks that `malloc` gave and nobody freed."""
        free = [block for pool in self.pools for block in pool.at.values()]
        first = [block for block in [*live, *free] if block.mapped and not (block.prev and block.prev.mapped)]
        return [_segment(block) for block in sorted(first, key=lambda block: block.address)]

    def _new_segment(self, pool: Pool, size: int) -> Block | None:
        block = super()._new_segment(pool, size)
        if block is not None and not block.expandable:
            self._note("segment_alloc", block.address, block.size, pool)
        return block

    def _release(self, block: Block) -> None:
        self._note("segment_free", block.address, block.size, block.pool)
        super()._release(block)

    def _map(self, block: Block, nbytes: int) -> bool:
        address, pool, before = block.address, block.pool, self.reserved
        mapped = super()._map(block, nbytes)
        if mapped:
            self._note("segment_map", address, self.reserved - before, pool)
        return mapped

    def _unmap(self, block: Block) -> None:
        page = self._page(block.pool)
        address, pool, before = -(-block.address // page) * page, block.pool, self.reserved
        super()._unmap(block)
        if self.reserved < before:
            self._note("segment_unmap", address, before - self.reserved, pool)

    def _note(self, name: str, address: int, size: int, pool: Pool) -> None:
        self.actions.append(Action(name, address, size, pool.small))


def _segment(first: Block) -> Segment:
    blocks, block = [first], first.next
    while block is not None and block.mapped:
        blocks.append(block)
        block = block.next
    return Segment(blocks, first.pool.small)
