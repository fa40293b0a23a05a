"""Parses a policy: which activations are kept for backward, and which are recomputed.

A policy is a string, the comma-separated union of terms:

    none                keep everything
    full                every block checkpointed (Chen et al. 2016, arXiv:1604.06174)
    every:N, first:N    every N-th block / the first N blocks checkpointed
    segments:N, sqrt    N runs of consecutive blocks, each one checkpoint; sqrt is N = round(sqrt(number of blocks))
    stages, stages:3+4  each stage (ResNet or U-Net level) one checkpoint; only those stages (from 1), block by block
    modules:attention   only that submodule of every block; also modules:mlp, modules:attention+mlp
    save:G+G            inside checkpointed modules keep the outputs of these op groups (SAC; Korthikanti et al. 2022,
                        arXiv:2205.05198): attention, matmul, matmul/2, conv, router, or an op name such as aten.bmm
    pointwise           outputs of norms, activations, gated products and dropout are recomputed; no block is re-run
    offload             tensors that are still saved are moved to host memory
    swap:N              frozen weights of N blocks wait in host memory; two of these blocks at a time are on the device
    head                lm_head and its loss in chunks that are recomputed
    tile, tile:N        the MLP of each block in N pieces along the sequence, each recomputed (Bekman et al. 2025,
                        arXiv:2506.13996); without N, pieces have as many tokens as the MLP's input is wide
    budget:0.5          torch.compile's activation memory budget
    auto                the planner chooses

A scope, `save:` or `pointwise` can apply to one tower of a model: `full@language,pointwise@vision`. A tower with its
own terms uses only those. All other modules use the terms without a tower.

This file is independent of any model.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from .errors import UserError, did_you_mean
from .units import whole_number

SCOPES = ("none", "full", "every", "first", "segments", "sqrt", "stages", "modules")
OP_GROUPS = {  # of `save:`, by the names of their kernels in aten; the installed torch may lack some
    # all kernels that scaled_dot_product_attention dispatches to; its math fallback uses bmm and counts as matmul
    "attention": (
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_attention_math_for_mps",
        "_flash_attention_forward", "_efficient_attention_forward", "_cudnn_attention_forward",
    ),
    "matmul": (
        "mm", "addmm", "bmm", "baddbmm", "linear", "mkldnn_linear", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm",
        "_int_mm",
    ),
    "conv": ("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution"),
    "router": ("topk",),
}  # fmt: skip
OP_PATTERNS: dict[str, re.Pattern[str]] = {  # flash-attn, flex, xformers, sage and custom attention forwards
    "attention": re.compile(r"(?!aten\.)(?!.*(backward|bwd)).*(attention|attn)", re.IGNORECASE),
    "matmul": re.compile(r"(bitsandbytes\.gemm|torchao\..*(mm|linear)|.*grouped_mm)", re.IGNORECASE),
}
MEMBERS = ("attention", "mlp")
TOWERS = ("language", "vision", "audio")
ALIASES = {"per_block": "full", "per_stage": "stages", "aggressive": "stages:3+4"}
_FLAGS = ("pointwise", "offload", "head", "auto")
_WHOLE = ("offload", "head", "tile", "swap", "auto", "budget")  # fields that apply to the whole model, not to a tower
_TERMS = (*SCOPES, "save", *_FLAGS, "tile", "swap", "budget", *ALIASES)
_FORMS = (
    "none, full, every:N, first:N, segments:N, sqrt, stages, stages:3+4, modules:attention+mlp, "
    "save:attention+matmul, pointwise, offload, swap:8, head, tile, tile:8, budget:0.5, "
    "auto; for one tower full@language, pointwise@vision"
)
LEAST_SWAPPED = 3  # two are on the device at a time
# Attributes that `swap` sets: on a model, its weights in host memory by name; on a block, what fetches its weights;
# on a weight, its version when it was the same in both memories.
IN_HOST_MEMORY, SWAPPED = "_ckpt_ft_in_host_memory", "_ckpt_ft_swapped"
STREAMS = "_ckpt_ft_streams"  # attribute of a trace's fake mode: what stands for torch.cuda's streams there
_OP_NAME = re.compile(r"[A-Za-z_]\w*\.[A-Za-z_]\w*(\.[A-Za-z_]\w*)?")
_GROUP = re.compile(r"(\w+)/(\d+)")


@dataclass(frozen=True)
class Policy:
    """One activation-memory policy; build it with `Policy.parse` (a hand-made one is validated the same way).

    Attributes:
        scope: which blocks are checkpointed: one of `SCOPES`.
        n: the N of `every:N`, `first:N` and `segments:N`.
        members: stage numbers (from 1) of `stages:3+4`, or "attention" / "mlp" of `modules:...`.
        save: op groups whose outputs are kept inside checkpointed modules.
        pointwise, offload, head, auto: the terms of these names.
        tile: the N of `tile:N`; 0 for `tile`, None without the term.
        swap: the N of `swap:N`.
        budget: torch.compile's activation memory budget, 0.0 to 1.0.
        towers: (tower, its policy) for each tower of `TOWERS` with its own terms.
    """

    scope: str = "none"
    n: int | None = None
    members: tuple[str, ...] = ()
    save: tuple[str, ...] = ()
    pointwise: bool = False
    offload: bool = False
    head: bool = False
    tile: int | None = None
    swap: int | None = None
    budget: float | None = None
    auto: bool = False
    towers: tuple[tuple[str, Policy], ...] = ()

    def __post_init__(self) -> None:
        _validate(self)
        members = {str(whole_number(member) or member) for member in self.members}
        object.__setattr__(self, "members", tuple(sorted(members, key=_member_order)))
        object.__setattr__(self, "save", tuple(sorted(set(self.save), key=_canonical_order)))
        own = sorted(self.towers, key=lambda tower: TOWERS.index(tower[0]))
        everywhere = self.parts[""] != Policy() if own else False  # without other terms, a tower's `none` is redundant
        object.__setattr__(self, "towers", tuple(tower for tower in own if everywhere or tower[1] != Policy()))

    @classmethod
    def parse(cls, value: str | dict[str, Any] | Policy) -> Policy:
        """Parse a policy from a string or from the dict of `to_dict` (also from JSON); a Policy is returned unchanged.

        Raises:
            UserError: a term is unknown or contradicts another one; the message names it and the likely intended term.
        """
        if isinstance(value, Policy):
            return value
        if isinstance(value, dict):
            return _from_dict(cls, value)
        if not isinstance(value, str):
            raise UserError(f"a policy is a string such as 'save:attention+matmul', not {value!r}")
        return _from_string(cls, value)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields that differ from `none`, in JSON types; `Policy.parse` reads them back."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        changed = {f.name: fields[f.name] for f in dataclasses.fields(self) if fields[f.name] != f.default}
        own = {"towers": {name: policy.to_dict() for name, policy in self.towers}} if self.towers else {}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in changed.items()} | own

    @property
    def parts(self) -> dict[str, Policy]:
        """The policy of each tower that has its own, and under "" the policy of everything else."""
        return {"": Policy(self.scope, self.n, self.members, self.save, self.pointwise), **dict(self.towers)}

    @property
    def checkpoints(self) -> bool:
        """Whether any block, stage or submodule is re-run in backward."""
        return self.scope != "none" or any(policy.checkpoints for _, policy in self.towers)

    @property
    def acts_on_blocks(self) -> bool:
        """Whether any term needs the model's blocks."""
        return self.checkpoints or self.discards or self.offload or self.tile is not None or self.swap is not None

    @property
    def reorders(self) -> bool:
        """Whether sums may be added in another order than without the policy."""
        return self.discards or self.head or self.tile is not None

    @property
    def discards(self) -> bool:
        """Whether `pointwise` applies to any part of the model."""
        return self.pointwise or any(policy.pointwise for _, policy in self.towers)

    def __str__(self) -> str:
        terms = []
        if self.scope != "none" and not (self.scope == "full" and self.save):
            detail = str(self.n) if self.n is not None else "+".join(self.members)
            terms.append(f"{self.scope}:{detail}" if detail else self.scope)
        if self.save:
            terms.append("save:" + "+".join(self.save))
        if self.pointwise:
            terms.append("pointwise")
        terms += [f"{term}@{tower}" for tower, policy in self.towers for term in str(policy).split(",")]
        terms += [name for name in _FLAGS if name in _WHOLE and getattr(self, name)]
        if self.tile is not None:
            terms.append(f"tile:{self.tile}" if self.tile else "tile")
        if self.swap is not None:
            terms.append(f"swap:{self.swap}")
        if self.budget is not None:
            terms.append(f"budget:{self.budget}".removesuffix(".0"))
        return ",".join(terms) or "none"


def _from_dict(cls: type[Policy], value: dict[str, Any]) -> Policy:
    names = [f.name for f in dataclasses.fields(cls)]
    for key in value:
        if key not in names:
            raise UserError(f"policy: no field '{key}'{did_you_mean(key, names)} ({', '.join(names)})")
    for key in _FLAGS:
        if not isinstance(value.get(key, False), bool):
            raise UserError(f"policy: '{key}' is true or false, not {value[key]!r}")
    for key in ("members", "save"):
        entries = value.get(key, ())
        if not isinstance(entries, (list, tuple)) or not all(isinstance(entry, str) for entry in entries):
            raise UserError(f"policy: '{key}' is a list of names, not {entries!r}")
    fields: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in value.items()}
    towers = fields.pop("towers", {})
    if not isinstance(towers, dict) or not all(isinstance(policy, dict) for policy in towers.values()):
        raise UserError(f"policy: 'towers' holds a policy for each tower by name, not {towers!r}")
    return cls(**fields, towers=tuple((name, _from_dict(cls, policy)) for name, policy in towers.items()))


def _from_string(cls: type[Policy], text: str) -> Policy:
    by_tower: dict[str, dict[str, Any]] = {"": {}}
    text = text.strip()
    if not text.isprintable():  # a line break would end the message, a terminal would execute an escape code
        raise UserError(f"policy {text!r}: a policy is one line of printable characters ({_FORMS})")
    for term in (part.strip() for part in text.split(",")):
        term, at, tower = term.partition("@")
        term = ALIASES.get(term, term)
        name, colon, detail = term.partition(":")
        if name not in _TERMS:
            raise UserError(f"policy '{text}': no term '{term}'{did_you_mean(name, _TERMS)} ({_FORMS})")
        if colon and not detail:
            raise UserError(f"policy '{text}': nothing after '{name}:' ({_FORMS})")
        if at and name in _WHOLE:
            raise UserError(f"policy '{text}': '{name}' applies to the whole model, not to a tower; write '{term}'")
        if at and tower not in TOWERS:
            raise UserError(f"policy '{text}': no tower '{tower}'{did_you_mean(tower, TOWERS)} ({', '.join(TOWERS)})")
        for key, new in _fields_of(name, detail, text).items():
            _add(by_tower.setdefault(tower, {}), key, new, text)
    for fields in by_tower.values():
        if fields.get("save") and fields.get("scope", "none") == "none":
            if "scope" in fields:
                raise UserError(f"policy '{text}': 'none' checkpoints nothing for 'save:' to act in; drop 'none'")
            fields["scope"] = "full"
    try:
        everywhere = by_tower.pop("")
        return cls(**everywhere, towers=tuple((tower, cls(**fields)) for tower, fields in by_tower.items()))
    except UserError as error:
        raise UserError(f"policy '{text}': {error}") from None


def _fields_of(name: str, detail: str, text: str) -> dict[str, Any]:
    """Returns the fields that one term sets."""
    if name in ("every", "first", "segments"):
        return {"scope": name, "n": _number(name, detail, text)}
    if name in ("stages", "modules"):
        return {"scope": name, "members": tuple(detail.split("+")) if detail else ()}
    if name == "save":
        return {"save": tuple(detail.split("+"))}
    if name == "tile":
        return {"tile": _number(name, detail, text) if detail else 0}
    if name == "swap":
        return {"swap": _number(name, detail, text)}
    if name == "budget":
        try:
            return {"budget": float(detail)}
        except ValueError:
            raise UserError(f"policy '{text}': 'budget:{detail}' needs a number from 0 to 1, as in 0.5") from None
    if detail:
        where = " (host memory, never a disk)" if name == "offload" else ""
        raise UserError(f"policy '{text}': '{name}'{where} takes nothing after it; write '{name}'")
    return {"scope": name} if name in SCOPES else {name: True}


def _add(fields: dict[str, Any], key: str, new: Any, text: str) -> None:
    """Merge one more field into `fields`: lists are joined, equal values agree, all others raise UserError."""
    old = fields.get(key, new)
    if key in ("members", "save") and bool(old) == bool(new):
        fields[key] = tuple(dict.fromkeys((*fields.get(key, ()), *new)))
    elif old == new:
        fields[key] = new
    elif key in ("scope", "budget", "tile", "swap"):
        raise UserError(f"policy '{text}': {key}s {old} and {new} contradict each other; keep one")
    else:
        scope = fields["scope"]
        terms = (f"{scope}:{'+'.join(n) if isinstance(n, tuple) else n}".rstrip(":") for n in (old, new))
        raise UserError(f"policy '{text}': {' and '.join(map(repr, terms))} contradict each other; keep one")


def _number(name: str, detail: str, text: str) -> int:
    number = whole_number(detail)
    if not number:
        least, some = (LEAST_SWAPPED, 8) if name == "swap" else (1, 2)
        raise UserError(
            f"policy '{text}': '{name}' needs a whole number of at least {least} after it, as in {name}:{some}"
        )
    return number


def _validate(policy: Policy) -> None:
    if policy.scope not in SCOPES:
        raise UserError(f"no scope '{policy.scope}'{did_you_mean(str(policy.scope), SCOPES)} ({', '.join(SCOPES)})")
    counted = policy.scope in ("every", "first", "segments")
    if counted and not (type(policy.n) is int and policy.n >= 1):
        raise UserError(f"'{policy.scope}' needs a whole number of at least 1, as in {policy.scope}:2")
    if not counted and policy.n is not None:
        raise UserError(f"'{policy.scope}' takes no number (given: {policy.n})")
    _validate_members(policy)
    for group in policy.save:
        _validate_group(group)
    _validate_unions(policy)


def _validate_members(policy: Policy) -> None:
    if policy.scope == "modules":
        if not policy.members:
            raise UserError("'modules' needs which: modules:attention, modules:mlp or modules:attention+mlp")
        for member in policy.members:
            if member not in MEMBERS:
                raise UserError(
                    f"modules: no submodule '{member}'{did_you_mean(member, MEMBERS)} ({', '.join(MEMBERS)})"
                )
    elif policy.scope == "stages":
        for member in policy.members:
            if not whole_number(member):
                raise UserError(f"stages: '{member}' is no stage number; stages count from 1, as in stages:3+4")
    elif policy.members:
        raise UserError(f"'{policy.scope}' takes no members (given: {'+'.join(policy.members)})")


def _validate_group(group: str) -> None:
    fraction = _GROUP.fullmatch(group)
    name = fraction[1] if fraction else group
    if fraction and (name != "matmul" or (whole_number(fraction[2]) or 0) < 2):
        raise UserError(f"save: '{group}' is not an op group; only matmul takes a fraction, from matmul/2 up")
    if name not in OP_GROUPS and not _OP_NAME.fullmatch(group):
        raise UserError(
            f"save: no op group '{group}'{did_you_mean(group, OP_GROUPS)} "
            f"({', '.join(OP_GROUPS)}, matmul/2, or an op name such as aten.bmm)"
        )


def _validate_unions(policy: Policy) -> None:
    if policy.save and policy.scope == "none":
        raise UserError("'save' acts inside what is checkpointed; give a scope with it, such as full")
    matmuls = [group for group in policy.save if group.partition("/")[0] == "matmul"]
    if len(set(matmuls)) > 1:
        raise UserError(f"save: {' and '.join(map(repr, matmuls))} contradict each other; keep one")
    if policy.tile is not None:
        if type(policy.tile) is not int or policy.tile < 0:
            raise UserError(f"'tile' takes a whole number of at least 1, as in tile:8 (given: {policy.tile!r})")
        if matmuls:
            raise UserError(f"'tile' recomputes the matmuls of each MLP, and save:{matmuls[0]} keeps them; drop one")
    if policy.swap is not None and (type(policy.swap) is not int or policy.swap < LEAST_SWAPPED):
        raise UserError(
            f"swap:{policy.swap} saves nothing, because two of the swapped blocks are on the device at a time; give a "
            f"whole number of at least {LEAST_SWAPPED}"
        )
    for tower, own in policy.towers:
        if tower not in TOWERS:
            raise UserError(f"no tower '{tower}'{did_you_mean(str(tower), TOWERS)} ({', '.join(TOWERS)})")
        if own != own.parts[""]:
            raise UserError(f"the tower '{tower}': {', '.join(_WHOLE)} are of the whole model")
    others = [f.name for f in dataclasses.fields(policy) if f.name != "auto" and getattr(policy, f.name) != f.default]
    if policy.auto and others:
        raise UserError(f"'auto' chooses the whole policy; give it alone, without {', '.join(others)}")
    if policy.budget is not None:
        if not (isinstance(policy.budget, (int, float)) and 0 <= policy.budget <= 1):
            raise UserError(f"budget is a number from 0 to 1, not {policy.budget}")
        if policy.checkpoints or policy.discards or policy.offload or policy.tile is not None or policy.swap:
            raise UserError("'budget' lets torch.compile choose what to recompute; it goes with 'head' only")


def _member_order(member: str) -> tuple[int, str]:
    return (whole_number(member) or 0, member)


def _canonical_order(group: str) -> tuple[int, str]:
    name = group.partition("/")[0]
    return ([*OP_GROUPS].index(name) if name in OP_GROUPS else len(OP_GROUPS), group)
