"""What holds the peak: a model's repeated layers taken together, in a table or a line each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckpt_ft.tables import DASH, Table
from ckpt_ft.units import format_bytes

from .events import Holder


def together(module: str) -> str:
    """A module's name with its numbers left out: that of all of a model's repeated layers."""
    return ".".join("*" if part.isdecimal() else part for part in module.split("."))


def grouped(held: Iterable[Holder]) -> list[Holder]:
    """`held`, the largest first; modules whose names differ in their numbers alone are one, as "layers.*.mlp"."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for holder in held:
        group = groups.setdefault((together(holder.module), holder.op, holder.category), [0, 0])
        group[0] += holder.nbytes
        group[1] += holder.count
    rows = [Holder(*key, nbytes, count) for key, (nbytes, count) in groups.items()]
    return sorted(rows, key=lambda holder: -holder.nbytes)


def holders_table(held: Sequence[Holder], peak: int) -> Table:
    """The table of `held`, the same in a report, an estimate and a plan; it adds up to `peak` bytes."""
    rows = [(h.module or DASH, short_op(h.op) or DASH, h.category, str(h.count), format_bytes(h.nbytes)) for h in held]
    rest = peak - sum(h.nbytes for h in held)
    if rest > 0:
        rows.append(("all else", DASH, DASH, DASH, format_bytes(rest)))
    return Table("What holds the peak", ("module", "op", "category", "count", "bytes"), rows, (0, 1, 2), names=(0, 1))


def holder_line(holder: Holder) -> str:
    """Bytes, category, module and op, on one line."""
    what = " ".join(filter(None, (holder.category, holder.module, short_op(holder.op))))
    return f"{format_bytes(holder.nbytes):>10}  {what}"


def short_op(op: str) -> str:
    """An op's name for people: "mm" of "aten.mm.default"."""
    return op.removeprefix("aten.").removesuffix(".default")
