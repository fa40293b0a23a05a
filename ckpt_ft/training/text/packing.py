"""Rows that share a sequence, and flags that do not go with them."""

from __future__ import annotations

import inspect
import logging
from bisect import bisect_left, insort
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from ckpt_ft.errors import UserError
from ckpt_ft.reading import library_reads
from ckpt_ft.workloads.adapters import without_adapters
from ckpt_ft.workloads.packing import READING, in_one_sequence

if TYPE_CHECKING:
    from transformers import TrainingArguments

logger = logging.getLogger(__name__)
_PROBED = 8  # tokens of each row
_ROUNDING, _IN_HALF = 1e-4, 5e-2  # of the largest logit, where an expert is given other rows besides


def check_cache(args: TrainingArguments, packing: bool) -> None:
    """Raises UserError where packed rows would see one another: attention with a KV cache does not read positions."""
    if packing and args.use_cache:
        raise UserError(
            "--packing with --use_cache: with a KV cache packed rows see one another; leave one of them out"
        )


def check_rows_apart(model: Any) -> None:
    """Raises UserError where a packed row sees the one before it: a mask goes by no positions, a state runs through.

    A model of a type that no test holds is asked: whether its logits of a row change with the row before. One that
    runs in its engine alone (ZeRO-3) cannot be, which is a warning.
    """
    model = without_adapters(model)
    kind = model.config.model_type
    if kind in READING:
        return
    if any(hasattr(p, "ds_id") or p.is_meta for p in model.parameters()):
        logger.warning("--packing: whether packed rows of a %s see one another cannot be tried here", kind)
        return
    with library_reads(f"--packing: a {kind} cannot be run to see that packed rows stay apart; leave --packing out"):
        apart = "position_ids" in inspect.signature(model.forward).parameters and not _sees_the_row_before(model)
    if not apart:
        raise UserError(f"--packing: in a {kind} packed rows see one another; leave --packing out")


@torch.no_grad()
def _sees_the_row_before(model: Any) -> bool:
    if in_one_sequence(model):
        return False  # flash attention goes by positions, and runs on no CPU
    training, device = model.training, next(model.parameters()).device
    along = torch.arange(_PROBED, device=device)
    rows = [torch.cat([along + first, along + 2 * _PROBED])[None] for first in (0, _PROBED)]
    model.eval()
    try:
        positions = along.repeat(2)[None]
        one, other = (
            model(input_ids=row, position_ids=positions, use_cache=False).logits[:, _PROBED:] for row in rows
        )
    finally:
        model.train(training)
    rounding = _ROUNDING if one.dtype == torch.float32 else _IN_HALF
    return bool((one - other).abs().max() > rounding * one.abs().max())


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
