"""The rules of the caching allocator: layouts computed by hand, and invariants for any sequence of allocations."""

from __future__ import annotations

import itertools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_ft.errors import UserError
from ckpt_ft.memory.allocator.caching_allocator import Block
from ckpt_ft.memory.allocator.replay import CachingAllocator, OutOfMemory, replay
from ckpt_ft.memory.allocator.settings import expandable_segments
from ckpt_ft.units import MIB

EXPANDABLE = True
LAYOUTS = [False, EXPANDABLE]


def mib(sizes, events, expandable=False, **kwargs):
    """Returns the last allocated and reserved bytes, in MiB, of a replay of sizes in MiB."""
    result = replay([int(size * MIB) for size in sizes], events, expandable, **kwargs)
    return result.allocated[-1] / MIB, result.reserved[-1] / MIB


@pytest.mark.parametrize(
    ("sizes", "reserved"),
    [
        ([1 / MIB], 2),  # one byte: a small segment of 2 MiB
        ([1, 1], 2),  # up to 1 MiB is small: two fill a segment
        ([1, 1, 1 / MIB], 4),
        ([1 + 1 / MIB], 20),  # large and under 10 MiB: shares a segment of 20 MiB
        ([9, 9], 20),
        ([9, 9, 9], 40),
        ([10], 10),  # from 10 MiB on: its own segment, rounded to 2 MiB
        ([10 + 1 / MIB], 12),
        ([9, 1], 22),  # small and large blocks share no segment
    ],
)
def test_segment_sizes(sizes, reserved):
    assert mib(sizes, range(len(sizes)))[1] == reserved


def test_block_sizes_are_rounded_to_512_bytes():
    assert replay([1, 513, 0], [0, 1, 2]).allocated == [512, 1536, 1536]


def test_large_block_is_not_split_for_a_rest_of_up_to_one_mib():
    assert mib([11], [0]) == (12, 12)
    assert mib([12, 11 - 512 / MIB], [0, ~0, 1]) == (11 - 512 / MIB, 12)


def test_best_fit_takes_the_smallest_cached_block():
    sizes = [30, 20, 12]
    assert mib(sizes, [0, 1, ~0, ~1, 2]) == (12, 50)
    assert mib([*sizes, 30], [0, 1, ~0, ~1, 2, 3]) == (42, 50)  # so the 30 MiB block was not split


def test_freed_neighbours_are_merged():
    assert mib([30, 10, 10, 10, 30], [0, ~0, 1, 2, 3, ~1, ~3, ~2, 4]) == (30, 30)


def test_free_block_that_is_too_small_is_fragmentation():
    result = replay([12 * MIB, 12 * MIB, 24 * MIB], [0, 1, ~0, 2])
    assert (result.peak_allocated(), result.peak_reserved()) == (36 * MIB, 48 * MIB)
    fullest = result.allocated.index(max(result.allocated))
    assert result.reserved[fullest] - result.allocated[fullest] == 12 * MIB


def test_peak_of_a_window_includes_live_blocks():
    result = replay([20 * MIB, 30 * MIB, 10 * MIB], [0, 1, ~1, 2, ~2, ~0])
    assert result.peak_allocated() == 50 * MIB
    assert result.peak_allocated(2) == 50 * MIB  # 50 MiB are live at the start
    assert result.peak_allocated(3) == 30 * MIB
    assert result.peak_allocated(3, 3) == 20 * MIB


def test_expandable_segments_grow_by_pages():
    assert mib([21], [0], EXPANDABLE) == (21, 40)
    assert mib([21, 19], [0, 1], EXPANDABLE) == (40, 40)  # a rest of any size is usable
    assert mib([21, 25], [0, 1], EXPANDABLE) == (46, 60)  # the free end plus one page
    assert mib([12, 12, 24], [0, 1, ~0, 2], EXPANDABLE) == (36, 60)


def test_emptying_the_cache_releases_only_free_segments():
    assert mib([30, 9, 9], [0, ~0, 1, 2, ~1, ~2, 1], empty_cache_at=[2, 5]) == (9, 20)
    assert mib([50, 1], [0, 1, ~0], EXPANDABLE) == (1, 62)
    assert mib([50, 1, 1], [0, 1, ~0, 2], EXPANDABLE, empty_cache_at=[3]) == (2, 2)


def test_full_device_releases_cached_segments_and_retries():
    result = replay([20 * MIB, 40 * MIB], [0, ~0, 1], capacity=50 * MIB)
    assert (result.oom_at, result.retries, result.reserved[-1]) == (None, 1, 40 * MIB)


def test_partly_used_segment_cannot_be_released():
    sizes = [9 * MIB, 9 * MIB, 40 * MIB]
    result = replay(sizes, [0, 1, ~0, 2], capacity=50 * MIB)
    assert (result.oom_at, result.retries, len(result.reserved)) == (3, 1, 3)
    assert replay(sizes, [0, 1, ~0, 2], EXPANDABLE, capacity=60 * MIB).oom_at is None


def test_settings_are_parsed_from_torchs_syntax():
    assert expandable_segments(" backend:native, expandable_segments:True,pinned_num_register_threads:8 ")
    assert not expandable_segments("expandable_segments:True,expandable_segments:False")
    assert not expandable_segments(None)
    assert not expandable_segments("")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("expandable_segment:True", "did you mean 'expandable_segments'"),
        ("expandable_segments:true", "write True or False"),
        ("max_split_size_mb:128", "'max_split_size_mb' is not replayed.*take expandable_segments:True"),
        ("expandable_segments", "cannot read 'expandable_segments'"),
        ("roundup_power2_divisions:[256:4,>:8]", "'roundup_power2_divisions' is not replayed"),
        ("backend:cudaMallocAsync", "native"),
        ("garbage_collection_threshold:0.8", "not replayed"),
    ],
)
def test_invalid_settings_are_refused(text, message):
    with pytest.raises(UserError, match=message):
        expandable_segments(text)


def check_layout(allocator: CachingAllocator, live: list[Block]) -> None:
    """Asserts that segments tile their addresses, free neighbours are merged, and counters are sums over blocks."""
    known = {id(block): block for block in [*live, *(b for pool in allocator.pools for b in pool.at.values())]}
    spans = sorted((block.address, block.address + block.size) for block in known.values())
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))
    for block in known.values():
        after = block.next
        if after is not None:
            assert id(after) in known
            assert (after.address, after.prev) == (block.address + block.size, block)
            assert block.allocated or after.allocated or block.mapped != after.mapped
    assert allocator.allocated == sum(block.size for block in live)
    assert allocator.reserved == sum(block.size for block in known.values() if block.mapped)
    assert allocator.capacity is None or allocator.reserved <= allocator.capacity


@settings(max_examples=150, deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS),
    capacity=st.sampled_from([None, 100 * MIB, 37 * MIB]),
    steps=st.lists(
        st.one_of(
            st.integers(1, 3 * MIB),
            st.integers(MIB, 60 * MIB),
            st.integers(-40, 0),
        ),
        max_size=60,
    ),
)
def test_layout_holds_for_any_sequence(layout, capacity, steps):
    allocator, live = CachingAllocator(layout, capacity), []
    for step in steps:
        if step == 0:
            allocator.empty_cache()
        elif step < 0 and live:
            allocator.free(live.pop(step % len(live)))
        elif step > 0:
            try:
                live.append(allocator.malloc(step))
                assert live[-1].size >= step
            except OutOfMemory:
                assert capacity is not None
        check_layout(allocator, live)
    for block in live:
        allocator.free(block)
    check_layout(allocator, [])
    assert allocator.allocated == 0
    allocator.empty_cache()
    assert allocator.reserved == 0


def naive_reserved(sizes: list[int], events: list[int]) -> int:
    """Returns reserved bytes under default settings: each segment is a list of [free, size], searched linearly."""
    segments: list[list[list]] = []
    where: dict[int, list] = {}
    for event in events:
        if event < 0:
            where.pop(~event)[0] = True
            for segment in segments:
                for i in range(len(segment) - 1, 0, -1):
                    if segment[i][0] and segment[i - 1][0]:
                        segment[i - 1][1] += segment.pop(i)[1]
            continue
        size = -(-sizes[event] // 512) * 512
        small = size <= MIB
        fits = [(b[1], n, i) for n, s in enumerate(segments) for i, b in enumerate(s) if b[0] and b[1] >= size]
        fits = [fit for fit in fits if (sum(b[1] for b in segments[fit[1]]) == 2 * MIB) == small]
        if not fits:
            own = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            segments.append([[True, own]])
            fits = [(own, len(segments) - 1, 0)]
        _, n, i = min(fits)
        rest = segments[n][i][1] - size
        block = [False, segments[n][i][1]]
        if rest >= 512 if small else rest > MIB:
            block[1] = size
            segments[n].insert(i + 1, [True, rest])
        segments[n][i] = where[event] = block
    return sum(block[1] for segment in segments for block in segment)


@pytest.mark.parametrize("seed", range(5))
def test_reserved_bytes_equal_a_naive_search(seed):
    sizes, events = random_trace(seed, length=300, live=40)
    assert replay(sizes, events).reserved[-1] == naive_reserved(sizes, events)


def random_trace(seed: int, length: int, live: int) -> tuple[list[int], list[int]]:
    rng, events, held = random.Random(seed), [], []
    for i in range(length):
        events.append(i)
        held.append(i)
        if len(held) > live:
            events.append(~held.pop(rng.randrange(len(held))))
    return [int(2 ** rng.uniform(5, 26)) for _ in range(length)], events


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_replay_of_fifty_thousand_events_takes_half_a_second(layout):
    sizes, events = random_trace(0, length=25_000, live=300)

    def seconds() -> float:
        start = time.process_time()
        replay(sizes, events, layout)
        return time.process_time() - start

    # the best of three, because garbage of other tests may be collected in one of them
    assert min(seconds() for _ in range(3)) < 0.5
