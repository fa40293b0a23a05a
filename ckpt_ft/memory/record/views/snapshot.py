"""A trace as a memory snapshot of PyTorch, for pytorch.org/memory_viz and torch.cuda._memory_viz.

The format is that of torch.cuda.memory._snapshot. Where a snapshot of a run has Python frames, this one has the op,
and the module with its phase. Addresses are those of the replayed allocator.
"""

from __future__ import annotations

from typing import Any

from ckpt_ft.memory.allocator.history import Segment, WatchedAllocator
from ckpt_ft.memory.allocator.pool import Block
from ckpt_ft.memory.allocator.settings import AllocatorSettings
from ckpt_ft.memory.record.events import Storage
from ckpt_ft.memory.record.recorded import Recorded

from .lives import ticks

Entry = dict[str, Any]
_POOL = (0, 0)  # the default one


def snapshot(trace: Recorded) -> dict[str, Any]:
    """The measured step of `trace`; what was there before it is in the segments alone, as in a snapshot of a run."""
    allocator = WatchedAllocator(AllocatorSettings.parse(trace.alloc_conf))
    clock = None if trace.device == "cpu" else ticks(trace, trace.schedule())
    streams: dict[str, int] = {"": 0}
    live: dict[int, Block] = {}
    entries: list[Entry] = []
    names: tuple[str, ...]
    for at, event in enumerate(trace.events):
        index = event if event >= 0 else ~event
        storage, moment = trace.storages[index], at - trace.start + 1
        known = len(allocator.actions)
        if at in trace.emptied:
            allocator.empty_cache()
        if event >= 0:
            block = allocator.malloc(storage.nbytes, storage.stream)
            if block is None:  # of no bytes
                continue
            live[index], address, names = block, block.address, ("alloc",)
        else:
            if index not in live:
                continue
            address, names = live[index].address, ("free_requested", "free_completed")
            allocator.free(live.pop(index))
        if moment < 1:
            continue
        place = {
            "stream": streams.setdefault(storage.stream, len(streams)),
            "time_us": round(1e6 * clock[moment]) if clock else moment,
            "pool_id": _POOL,
        }
        taken = allocator.actions[known:]
        entries += [{"action": a.name, "addr": a.address, "size": a.size, "frames": [], **place} for a in taken]
        told = {"addr": address, "size": storage.nbytes, "frames": _frames(storage), "category": storage.category}
        entries += [{"action": name, **told, **place} for name in names]
    # Torch ends with this entry too; its category is one that memory_viz wants to find where there are any.
    entries.append({"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "frames": [], "category": "unknown"})
    holders = {block.address: trace.storages[index] for index, block in live.items()}
    segments = [_segment(segment, holders, streams) for segment in allocator.segments(list(live.values()))]
    return {"segments": segments, "device_traces": [entries]}


def _segment(segment: Segment, holders: dict[int, Storage], streams: dict[str, int]) -> dict[str, Any]:
    blocks = [_block(block, holders.get(block.address)) for block in segment.blocks]
    held = [block for block in blocks if block["state"] == "active_allocated"]
    owners = [holders[block["address"]] for block in held]
    return {
        "device": 0,
        "address": segment.blocks[0].address,
        "total_size": segment.size,
        "allocated_size": sum(block["size"] for block in held),
        "active_size": sum(block["size"] for block in held),
        "requested_size": sum(block["requested_size"] for block in held),
        "stream": streams[owners[0].stream] if owners else 0,
        "segment_type": "small" if segment.small else "large",
        "segment_pool_id": _POOL,
        "is_expandable": segment.blocks[0].expandable,
        "frames": [],
        "blocks": blocks,
    }


def _block(block: Block, storage: Storage | None) -> dict[str, Any]:
    return {
        "address": block.address,
        "size": block.size,
        "requested_size": 0 if storage is None else storage.nbytes,
        "state": "inactive" if storage is None else "active_allocated",
        "frames": [] if storage is None else _frames(storage),
    }


def _frames(storage: Storage) -> list[dict[str, Any]]:
    """What made a storage, as frames of a stack: innermost first."""
    made = storage.op or f"a tensor of {storage.category} that was there before"
    return [
        {"name": made, "filename": storage.category, "line": 0},
        {"name": storage.place or "outside of modules", "filename": storage.phase or "before", "line": 0},
    ]
