"""Which policies are worth a trace on a model: scopes, op groups, pointwise, head, offload, splits over layers."""

from __future__ import annotations

from torch import nn

from ckpt_ft.checkpointing.blocks import Blocks, find_blocks
from ckpt_ft.checkpointing.towers import find_towers
from ckpt_ft.errors import UserError
from ckpt_ft.policy import Policy

FIRST = ("none", "full", "pointwise")  # the ends of what can be had, and the middle that costs least time
_SAVE = ("save:attention", "save:attention+matmul", "save:matmul/2")
_SAVE_CONV = ("save:conv", "save:attention+matmul+conv")
_SCOPES = ("sqrt", "modules:attention", "modules:mlp")  # every:N re-runs as many blocks as some split, which is finer
_FEW_STAGES = 4  # up to here every run of stages from either end is tried; of more (a U-Net's), the two halves
_RESTS = ("", "pointwise")  # of a split: what the blocks after the first K do


def blocks_of(model: nn.Module) -> Blocks:
    """The model's blocks; none where it has no repeated ones."""
    try:
        return find_blocks(model)
    except UserError:
        return Blocks()


def others(model: nn.Module) -> list[str]:
    """Every policy beyond `FIRST` that could suit `model`, without head and offload."""
    blocks = blocks_of(model)
    if not blocks.blocks:
        return []
    inner = [module for block in blocks.blocks.values() for module in block.modules()]
    convolves = any(isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) for module in inner)
    found = [*_SAVE, *(_SAVE_CONV if convolves else ()), *_SCOPES]
    count = len(blocks.stages)
    if count:
        found.append("stages")
        cuts = range(1, count) if count <= _FEW_STAGES else (count // 2,)
        for cut in cuts:
            found += [f"stages:{'+'.join(map(str, part))}" for part in (range(1, cut + 1), range(cut + 1, count + 1))]
    found += ["modules:attention,pointwise", "modules:mlp,pointwise", *_by_tower(model, blocks)]
    return [str(Policy.parse(text)) for text in dict.fromkeys(found)]


def _by_tower(model: nn.Module, blocks: Blocks) -> list[str]:
    """Policies that treat one tower otherwise than the rest; none where only one keeps anything for backward."""
    towers = [
        tower.name
        for tower in find_towers(model, blocks.blocks)
        if tower.name == "language"  # which comes last: what it keeps does not hang on its own weights
        or any(p.requires_grad for module in tower.modules.values() for p in module.parameters())
    ]
    terms = ("full@{}", "full,pointwise@{}") if len(towers) > 1 else ()
    return [term.format(tower) for tower in towers for term in terms]


def with_term(policy: str, term: str) -> str:
    """`policy` and `term` ("head", "offload"), canonical."""
    return str(Policy.parse(term if policy == "none" else f"{policy},{term}"))


def without_term(policy: str, term: str) -> str:
    """`policy` less `term`, canonical."""
    return str(Policy.parse(",".join(part for part in policy.split(",") if part != term) or "none"))


def splits(head: bool) -> list[tuple[str, ...]]:
    """The terms beside `first:K` of each family of splits."""
    return [tuple(term for term in (rest, "head" if head else "") if term) for rest in _RESTS]


def split(first: int, count: int, rest: tuple[str, ...]) -> str:
    """The first `first` of `count` blocks checkpointed, the others under `rest`; with all of them, `full`."""
    if first == 0:
        terms: tuple[str, ...] = rest
    elif first >= count:
        terms = ("full", *(term for term in rest if term != "pointwise"))
    else:
        terms = (f"first:{first}", *rest)
    return str(Policy.parse(",".join(terms) or "none"))
