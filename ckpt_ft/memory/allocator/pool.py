"""Blocks of addresses, and the pools that the free ones of a device wait in."""

from __future__ import annotations

from bisect import bisect_left, insort


class Block:
    """A run of addresses in one segment. `prev` and `next` are its neighbours in that segment."""

    __slots__ = ("address", "allocated", "expandable", "mapped", "next", "pool", "prev", "size")

    def __init__(self, address: int, size: int, pool: Pool, expandable: bool = False, mapped: bool = True) -> None:
        self.address, self.size, self.pool = address, size, pool
        self.prev: Block | None = None
        self.next: Block | None = None
        self.allocated, self.mapped, self.expandable = False, mapped, expandable

    def insert_between(self, prev: Block | None, next: Block | None) -> None:
        self.prev, self.next = prev, next
        if prev is not None:
            prev.next = self
        if next is not None:
            next.prev = self


class Pool:
    """The free blocks of one size class: mapped ones in best-fit order, unmapped (expandable) ones by address."""

    def __init__(self, small: bool) -> None:
        self.small = small
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
