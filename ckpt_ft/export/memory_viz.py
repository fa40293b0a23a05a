"""A trace as a PyTorch memory snapshot, for pytorch.org/memory_viz and torch.cuda._memory_viz.

The format is the one of torch.cuda.memory._snapshot. A snapshot of a real run has Python frames; this one has the op
instead, and the module with its phase. Addresses are those of the replayed caching allocator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt_ft.memory.allocator.caching_allocator import Block
    from ckpt_ft.memory.record.events import Storage
    from ckpt_ft.memory.record.trace import StepTrace

_POOL = (0, 0)  # the default pool


def snapshot(trace: StepTrace) -> dict[str, Any]:
    """The measured step of `trace`. Earlier allocations are in the segments only, as in a snapshot of a real run."""
    history = trace.allocator_history()
    times = None if trace.device == "cpu" else trace.moment_times(trace.schedule())
    streams: dict[str, int] = {"": 0}
    entries: list[dict[str, Any]] = []
    for at, event in enumerate(trace.events):
        address, moment = history.addresses[at], at - trace.start + 1
        if address is None or moment < 1:  # an allocation of no bytes has no address
            continue
        storage = trace.storages[event if event >= 0 else ~event]
        stream = streams.setdefault(storage.stream, len(streams))
        where = {"stream": stream, "time_us": round(1e6 * times[moment]) if times else moment, "pool_id": _POOL}
        for action in history.actions[at]:
            found = {"action": action.name, "addr": action.address, "size": action.size}
            entries.append({**found, "frames": [], "category": "unknown", **where})
        names = ("alloc",) if event >= 0 else ("free_requested", "free_completed")
        labels = {"addr": address, "size": storage.nbytes, "frames": _frames(storage), "category": storage.category}
        entries += [{"action": name, **labels, **where} for name in names]
    # A snapshot of torch ends with this entry too. memory_viz expects the category on all entries or on none.
    entries.append({"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "frames": [], "category": "unknown"})
    storages = {address: trace.storages[index] for address, index in history.live.items()}
    segments = [_segment(segment, storages, streams) for segment in history.segments]
    return {"segments": segments, "device_traces": [entries]}


def _segment(segment: list[Block], storages: dict[int, Storage], streams: dict[str, int]) -> dict[str, Any]:
    held = [storages.get(block.address) for block in segment]
    live = [storage for storage in held if storage is not None]
    allocated = sum(block.size for block, storage in zip(segment, held, strict=True) if storage is not None)
    blocks = [
        {
            "address": block.address,
            "size": block.size,
            "requested_size": 0 if storage is None else storage.nbytes,
            "state": "inactive" if storage is None else "active_allocated",
            "frames": [] if storage is None else _frames(storage),
        }
        for block, storage in zip(segment, held, strict=True)
    ]
    return {
        "device": 0,
        "address": segment[0].address,
        "total_size": sum(block.size for block in segment),
        "allocated_size": allocated,
        "active_size": allocated,
        "requested_size": sum(storage.nbytes for storage in live),
        "stream": streams.setdefault(live[0].stream, len(streams)) if live else 0,
        "segment_type": "small" if segment[0].pool.small else "large",
        "segment_pool_id": _POOL,
        "is_expandable": segment[0].expandable,
        "frames": [],
        "blocks": blocks,
    }


def _frames(storage: Storage) -> list[dict[str, Any]]:
    made = storage.op or f"a tensor of {storage.category} that was there before"
    return [
        {"name": made, "filename": storage.category, "line": 0},
        {"name": storage.place or "outside of modules", "filename": storage.phase or "before", "line": 0},
    ]
