"""Reserved bytes of a long run: the last step of a trace repeated, with the allocator's cache emptied at times.

`torch.cuda.empty_cache()` releases segments without a live block. Blocks that are live then (gradients, moments, a
loop's variables) keep the others, and the next step finds another layout than the first one did: from then on a
run reserves up to 4 % more than before, or less.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ckpt_ft.memory.allocator.caching_allocator import Block, CachingAllocator
from ckpt_ft.memory.allocator.settings import expandable_segments
from ckpt_ft.memory.record.trace import StepTrace

STEPS = 6  # steps per stretch, after which the layout repeats


def peak_reserved(trace: StepTrace, stretches: int) -> int:
    """Returns the peak reserved bytes of a run of `stretches` stretches, with the cache emptied between them.

    trace: of at least three steps; the last two must have the same allocations.
    """
    starts = [at for at, name in trace.marks if name == "step"] + [len(trace.events)]
    before, last = (trace.events[start:stop] for start, stop in list(pairwise(starts))[-2:])
    heirs = dict(zip(_made(before), _made(last), strict=True))  # from what a step leaves to what the next one leaves
    sizes = [storage.nbytes for storage in trace.storages]
    assert all(sizes[old] == sizes[new] for old, new in heirs.items()), "the last two steps differ"
    allocator = CachingAllocator(expandable_segments(trace.alloc_conf))
    live: dict[int, Block | None] = {}

    def run(events: Sequence[int]) -> None:
        for event in events:
            if event >= 0:
                live[event] = allocator.malloc(sizes[event])
            else:
                allocator.free(live.pop(~event))

    run(trace.events)
    most = allocator.reserved  # without a limit, nothing is ever released
    for _ in range(1, stretches):
        allocator.empty_cache()
        for _ in range(STEPS):
            left = {old: live.pop(new) for old, new in heirs.items() if new in live}
            live |= left
            run(last)
        most = max(most, allocator.reserved)
    return most


def _made(events: Sequence[int]) -> list[int]:
    return [event for event in events if event >= 0]
