"""Output of `AppliedPolicy.explain()` and `ckpt-ft explain`: the modules a policy covers and what they keep."""

from __future__ import annotations

import textwrap
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckpt_ft.export.notebook import fragment, paragraph, table_html
from ckpt_ft.tables import WIDTH, Table, as_text

from .towers import Part, find_towers

if TYPE_CHECKING:
    from .applied_policy import AppliedPolicy


@dataclass(frozen=True)
class Covered:
    """A class of modules: its tower, its count, how many are re-run, and what they keep for backward.

    tower: "" if the policy names no tower.
    """

    tower: str
    module: str
    count: int
    rerun: int
    kept: str


def covered(of: AppliedPolicy) -> list[Covered]:
    """Per tower, return a row for each class of re-run modules, then for each class of other blocks."""
    return [row for part in of.parts for row in _covered(of, part)]


def _covered(of: AppliedPolicy, part: Part) -> list[Covered]:
    inside = ", ".join(part.policy.save) or "input only"
    modules = {region.module: region.blocks[0] for region in of.regions}
    rerun = Counter(type(module).__name__ for module, block in modules.items() if block in part.found.blocks)
    blocks = Counter(type(block).__name__ for block in part.found.blocks.values())
    open_blocks = Counter(type(of.found.blocks[name]).__name__ for name in of.uncovered if name in part.found.blocks)
    kept_open = "see pointwise" if part.policy.pointwise else "everything"
    found = []
    for kind, count in rerun.items():
        total = blocks.get(kind, count)
        kept = inside if count == total else f"{inside}; others {kept_open}"
        found.append(Covered(part.tower, kind, total, count, kept))
    unseen = {kind: count for kind, count in open_blocks.items() if kind not in rerun}
    return found + [Covered(part.tower, kind, count, 0, kept_open) for kind, count in unseen.items()]


def tables(of: AppliedPolicy) -> list[Table]:
    """Return the table of covered modules, followed by a table for each engine."""
    cells: list[tuple[str, ...]]
    header: tuple[str, ...] = ("module", "count", "re-run", "kept for backward")
    text: tuple[int, ...] = (0, 3)
    cells = [(row.module, str(row.count), str(row.rerun), row.kept) for row in covered(of)]
    if of.policy.towers:
        header, text = ("tower", *header), (0, 1, 4)
        cells = [(row.tower, *cell) for row, cell in zip(covered(of), cells, strict=True)]
    found = [Table(f"Policy {of.policy} on {type(of.model).__name__}", header, cells, text=text)]
    for engine in of.engines:
        dropped = [(row.module, str(row.count), row.dropped, row.kept) for row in engine.rows]
        found.append(Table(engine.term, ("module", "count", "dropped", "kept"), dropped, text=(0, 2, 3)))
    return found


def explain_html(of: AppliedPolicy) -> str:
    """Return the output of `explain` as HTML for a notebook."""
    first, *others = tables(of)
    parts = map(table_html, (replace(first, title=""), *others))
    return fragment(first.title, *parts, *map(paragraph, _notes(of)))


def explain(of: AppliedPolicy) -> str:
    """Return the tables as text for a terminal, followed by notes on coverage."""
    notes = [textwrap.fill(note, WIDTH, break_on_hyphens=False) + "\n" for note in _notes(of)]
    return as_text(tables(of)) + "".join(notes)


def _notes(of: AppliedPolicy) -> list[str]:
    total, policy = len(of.found.blocks), of.policy
    notes = []
    if policy.checkpoints:
        notes.append(f"{total - len(of.uncovered)} of {total} blocks are re-run, whole or in part")
    if of.segments:
        notes.append(f"in {of.segments} segments: only the first block's input of each is kept")
    if policy.budget is not None:
        notes.append("budget takes effect under torch.compile only")
    towers = find_towers(of.model, dict(of.found.blocks))
    if len(towers) > 1 or policy.towers:
        each = (f"{tower.name} {', '.join(tower.modules)} ({len(tower.blocks)} blocks)" for tower in towers)
        notes.append(f"towers: {'; '.join(each)}")
    return notes
