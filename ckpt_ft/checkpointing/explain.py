"""What `AppliedPolicy.explain()` and `ckpt-ft explain` print: which modules a policy covers and what stays."""

from __future__ import annotations

import io
import re
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from torch import nn

if TYPE_CHECKING:
    from .apply import AppliedPolicy

# What diffusers' own switch re-runs: the elements of these lists, where their owner carries the flag
_DIFFUSERS_LISTS = {"resnets", "transformer_blocks", "single_transformer_blocks", "temp_convs", "motion_modules"}


def rows(applied: AppliedPolicy) -> list[dict[str, Any]]:
    """One row for each class of module: `module`, `count`, `re-run` (how many), `kept` (what stays for backward)."""
    inside = ", ".join(applied.policy.save) or "input only"
    covered = Counter(type(region.module).__name__ for region in applied.regions)
    blocks = Counter(type(block).__name__ for block in applied.found.blocks.values())
    open_blocks = Counter(type(applied.found.blocks[name]).__name__ for name in applied.uncovered)
    kept_open = "see pointwise" if applied.policy.pointwise else "everything"
    table = []
    for kind, count in covered.items():
        total = blocks.get(kind, count)
        table.append(
            {
                "module": kind,
                "count": total,
                "re-run": count,
                "kept": inside if count == total else f"{inside}; others {kept_open}",
            }
        )
    for kind, count in open_blocks.items():
        if kind not in covered:
            table.append({"module": kind, "count": count, "re-run": 0, "kept": kept_open})
    return table


def table(applied: AppliedPolicy) -> str:
    """The rows as a table for a terminal, the engines' rows below, and a line of coverage."""
    console = Console(file=io.StringIO(), width=120, color_system=None)
    main = Table(
        "module",
        "count",
        "re-run",
        "kept for backward",
        title=f"policy {applied.policy} on {type(applied.model).__name__}",
    )
    for row in rows(applied):
        main.add_row(row["module"], str(row["count"]), str(row["re-run"]), row["kept"])
    console.print(main)
    for name, engine in applied.engines:
        described = engine.describe()
        extra = Table(*described[0], title=name) if described else Table(title=name)
        for row in described:
            extra.add_row(*(str(value) for value in row.values()))
        console.print(extra)
    for line in _notes(applied):
        console.print(line)
    return console.file.getvalue()  # type: ignore[attr-defined]


def _notes(applied: AppliedPolicy) -> list[str]:
    total, open_blocks = len(applied.found.blocks), len(applied.uncovered)
    notes = (
        [f"{total - open_blocks} of {total} blocks are re-run, whole or in part"] if applied.policy.checkpoints else []
    )
    if applied.policy.scope in ("segments", "sqrt"):
        runs = len({id(wrapper.segment) for wrapper in applied.installed if hasattr(wrapper, "segment")})
        alone = sum(1 for wrapper in applied.installed if not hasattr(wrapper, "segment"))
        notes.append(f"in {runs + alone} segments: only the first block's input of each is kept")
    own = _diffusers_coverage(applied.model, list(applied.found.blocks))
    if own is not None and applied.policy.checkpoints:
        notes.append(f"diffusers' own switch would cover {own} of {total}")
    if applied.policy.budget is not None:
        notes.append("budget takes effect under torch.compile only")
    return notes


def _diffusers_coverage(model: nn.Module, blocks: list[str]) -> int | None:
    """How many of the blocks diffusers' own switch re-runs; None for a VAE, or a model that is not diffusers'."""
    kind = getattr(sys.modules.get("diffusers.models.modeling_utils"), "ModelMixin", None)
    if kind is None or not isinstance(model, kind) or "encoder" in model._modules:  # a VAE's re-runs whole levels
        return None
    if not model._supports_gradient_checkpointing:
        return 0
    modules = dict(model.named_modules())
    return sum(1 for name in blocks if _diffusers_reruns(name, modules))


def _diffusers_reruns(name: str, modules: dict[str, nn.Module]) -> bool:
    owner, _, rest = name.rpartition(".")[0].rpartition(".")
    if rest not in _DIFFUSERS_LISTS or not hasattr(modules.get(owner), "gradient_checkpointing"):
        return False
    return not re.search(r"mid_block\.resnets\.0$", name)  # the mid-block's first resnet runs plainly
