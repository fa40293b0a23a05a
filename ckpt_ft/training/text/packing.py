"""Rows that share a sequence, and flags that do not go with them."""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import chain
from typing import TYPE_CHECKING, Any

from ckpt_ft.errors import UserError

if TYPE_CHECKING:
    from transformers import TrainingArguments


def check_cache(args: TrainingArguments, packing: bool) -> None:
    """Raises UserError where packed rows would see one another: attention with a KV cache does not read positions."""
    if packing and args.use_cache:
        raise UserError(
            "--packing with --use_cache: with a KV cache packed rows see one another; leave one of them out"
        )


def pack(batch: dict[str, list[Any]], max_length: int) -> dict[str, list[Any]]:
    """Join rows into sequences of at most `max_length` tokens, longest first, each into the fullest one it fits in.

    Columns of lists are joined, columns of numbers summed. `position_ids` start again with every row; in transformers,
    attention that is given neither mask nor KV cache (eager, SDPA and flash alike) reads the borders from them.
    """
    packs: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # free tokens -> packs that have as many
    rooms: list[int] = []  # its keys in order
    lengths = [len(ids) for ids in batch["input_ids"]]
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        slot = bisect_left(rooms, lengths[row])
        if slot == len(rooms):
            target, room = len(packs), max_length
            packs.append([])
        else:
            room = rooms[slot]
            target = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[slot]
        packs[target].append(row)
        room -= lengths[row]
        if room not in with_room:
            insort(rooms, room)
        with_room.setdefault(room, []).append(target)
    joined = {key: [_joined([values[row] for row in rows]) for rows in packs] for key, values in batch.items()}
    return {**joined, "position_ids": [[t for row in rows for t in range(lengths[row])] for rows in packs]}


def _joined(values: list[Any]) -> Any:
    return list(chain.from_iterable(values)) if isinstance(values[0], list) else sum(values)
