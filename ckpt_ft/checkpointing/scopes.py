"""Selects the modules that a policy's scope re-runs: blocks, sequences of blocks, stages, or block submodules."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from ckpt_ft.errors import UserError
from ckpt_ft.policy import Policy

from .blocks import Blocks, submodules

SEGMENTED = ("segments", "sqrt")  # scopes whose regions are sequences of blocks


@dataclass(frozen=True)
class Region:
    """One checkpoint: the module that is re-run and the names of the blocks in it."""

    name: str
    module: nn.Module
    blocks: tuple[str, ...]


def regions(policy: Policy, found: Blocks, kind: str) -> list[list[Region]]:
    """Return the checkpoints of the scope as lists: one region each, or all blocks of a segment.

    Raises:
        UserError: the model, of class `kind`, has no module that matches the scope.
    """
    blocks = [Region(name, block, (name,)) for name, block in found.blocks.items()]
    n = policy.n or 1
    if policy.scope == "full":
        return [[block] for block in blocks]
    if policy.scope == "every":
        return [[block] for block in blocks[::n]]
    if policy.scope == "first":
        return [[block] for block in blocks[:n]]
    if policy.scope == "segments":
        return _split(blocks, n)
    if policy.scope == "sqrt":
        return _split(blocks, max(1, round(len(blocks) ** 0.5)))
    if policy.scope == "stages":
        return [[region] for region in _stage_regions(policy, found, kind)]
    return [[region] for region in _member_regions(policy, found, kind)]


def _split(blocks: list[Region], n: int) -> list[list[Region]]:
    """Split blocks into `n` consecutive sequences whose lengths differ by at most one."""
    n = min(n, len(blocks))
    ends = [len(blocks) * i // n for i in range(n + 1)]
    return [blocks[start:stop] for start, stop in pairwise(ends)]


def _stage_regions(policy: Policy, found: Blocks, kind: str) -> list[Region]:
    stages = found.stages
    if not stages:
        raise UserError(
            f"policy '{policy}': {kind} has no stages; segments:N makes runs of its {len(found.blocks)} blocks"
        )
    if not policy.members:
        return [Region(stage.name, stage.module, tuple(stage.blocks)) for stage in stages]
    for member in policy.members:
        if int(member) > len(stages):
            raise UserError(f"policy '{policy}': {kind} has no stage {member}; it has {len(stages)}, counted from 1")
    chosen = [stages[int(member) - 1] for member in policy.members]
    return [Region(name, block, (name,)) for stage in chosen for name, block in stage.blocks.items()]


def _member_regions(policy: Policy, found: Blocks, kind: str) -> list[Region]:
    regions: dict[str, Region] = {}
    for member in policy.members:
        inside = {
            path: Region(path, module, (name,))
            for name, block in found.blocks.items()
            for path, module in submodules(name, block, member).items()
        }
        if not inside:
            kinds = ", ".join(dict.fromkeys(type(block).__name__ for block in found.blocks.values()))
            raise UserError(
                f"policy '{policy}': no {member} submodule in the blocks of "
                f"{kind} ({kinds}); full and save:... work on whole blocks"
            )
        regions.update(inside)
    return list(regions.values())
