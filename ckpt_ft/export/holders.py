"""Holders: what occupies memory at the peak of a step, as data, as a table and as one line of text each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckpt_ft.tables import DASH, Table
from ckpt_ft.units import format_bytes
from ckpt_ft.validation import Bytes, Count

_OUTSIDE = {
    "optimizer": "optimizer state",
    "activations": "loss",
    "parameters": "weights",
    "buffers": "buffers",
}  # what belongs to no module, by its category


@dataclass(frozen=True)
class Holder:
    """The storages that one op in one module holds at the peak: `count` of them, `nbytes` in total."""

    module: str
    op: str
    category: str
    nbytes: Bytes
    count: Count


def merge_layer_numbers(module: str) -> str:
    """A module's name with "*" for each layer number: "layers.3.mlp" becomes "layers.*.mlp"."""
    return ".".join("*" if part.isdecimal() else part for part in module.split("."))


def short_op(op: str) -> str:
    """An op's name without namespace and default overload: "mm" for "aten.mm.default"."""
    return op.removeprefix("aten.").removesuffix(".default")


def group_holders(holders: Iterable[Holder]) -> list[Holder]:
    """The holders, largest first, with a model's repeated layers merged into one row, such as "layers.*.mlp"."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for holder in holders:
        group = groups.setdefault((merge_layer_numbers(holder.module), holder.op, holder.category), [0, 0])
        group[0] += holder.nbytes
        group[1] += holder.count
    rows = [Holder(*key, nbytes, count) for key, (nbytes, count) in groups.items()]
    return sorted(rows, key=lambda holder: -holder.nbytes)


def holders_table(holders: Sequence[Holder], peak: int) -> Table:
    """The table of holders in a report, an estimate and a plan; a last row makes it add up to `peak` bytes."""
    rows = [
        (
            h.module
            or ("loss" if "loss" in h.op or "softmax" in h.op else _OUTSIDE.get(h.category, "outside of modules")),
            short_op(h.op) or DASH,
            h.category,
            str(h.count),
            format_bytes(h.nbytes),
        )
        for h in holders
    ]
    rest = peak - sum(holder.nbytes for holder in holders)
    if rest > 0:
        rows.append(("all else", DASH, DASH, DASH, format_bytes(rest)))
    return Table("What holds the peak", ("module", "op", "category", "count", "bytes"), rows, (0, 1, 2), names=(0, 1))


def holder_line(holder: Holder) -> str:
    """Bytes, category, module and op on one line."""
    what = " ".join(filter(None, (holder.category, holder.module, short_op(holder.op))))
    return f"{format_bytes(holder.nbytes):>10}  {what}"
