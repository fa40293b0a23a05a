"""Finds the modules that a policy can act on: a model's repeated blocks, its stages, and attention and MLP submodules.
`regions` selects those that a policy's scope re-runs.

The search uses the model's structure, not a list of architectures. An element of a `ModuleList` or `Sequential` is

    a stage   if it is itself a container: its own lists hold block-like modules (a ResNet stage, a U-Net level);
    a block   otherwise, if it is more than a single layer.

A library's own declarations take precedence: transformers marks its blocks with `GradientCheckpointingLayer`. A model
nested in a model (diffusers' `Transformer2DModel` inside a U-Net) is searched for blocks and is never a block itself.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise

from torch import nn

from ckpt_ft.compat.modules import children_of
from ckpt_ft.errors import UserError, did_you_mean
from ckpt_ft.policy import Policy

from .libraries import DIFFUSERS, LAYER, PRETRAINED, is_a
from .module_contents import modules_in

Named = tuple[str, nn.Module]

_LISTS = (nn.ModuleList, nn.Sequential)
_PARALLEL = re.compile("expert|heads?$|branch", re.IGNORECASE)  # lists whose elements run in parallel
_LONE_STAGES = {"mid_block", "mid"}  # the U-Net level that is not in a list of levels
_ATTENTION = re.compile(r"(attention|attn)(?!.*decoderlayer)", re.IGNORECASE)
_MLP = re.compile(r"mlp|feed_?forward|ffn|layerff|moe|expert|intermediate$|(?<!self)output$", re.IGNORECASE)
_MLP_NAME = re.compile(r"(mlp|ff|ffn|feed_?forward)(_?\d|_context)?$")  # attribute names, for Sana's GLUMBConv
_BARE_MLP = re.compile(
    r"(fc|linear|lin)_?[12]$|ffn(_output)?$"
)  # OPT, nn.TransformerEncoderLayer and ALBERT have no MLP module


@dataclass(frozen=True)
class Stage:
    """One level of a staged model: its module and its blocks in order."""

    name: str
    module: nn.Module
    blocks: dict[str, nn.Module]


@dataclass(frozen=True)
class Blocks:
    """The result of `find_blocks` in definition order: all blocks, and the stages if the model has any."""

    blocks: dict[str, nn.Module] = field(default_factory=dict)
    stages: list[Stage] = field(default_factory=list)


def find_blocks(model: nn.Module) -> Blocks:
    """Find the blocks and stages of any model: transformers, diffusers, timm-like or plain torch.

    Raises:
        UserError: the model has no list of repeated modules.
    """
    finder = _Finder(model)
    finder.visit("", model)
    blocks = finder.blocks or dict(_bare_layers(model))
    if not blocks:
        raise UserError(
            f"{type(model).__name__} holds no repeated blocks: a policy acts on a ModuleList or Sequential of those; "
            "name others with apply_policy(model, policy, blocks=[...])"
        )
    return Blocks(blocks, finder.stages if len(finder.stages) > 1 else _sibling_sequentials(model, blocks))


def named_blocks(model: nn.Module, names: Sequence[str]) -> Blocks:
    """Return the blocks that the caller names; raises UserError if one is missing or lies inside another."""
    modules = dict(model.named_modules())
    for name in names:
        if not name or name not in modules:
            raise UserError(f"blocks: {type(model).__name__} has no module '{name}'{did_you_mean(name, modules)}")
    for name in names:
        if any(other != name and name.startswith(f"{other}.") for other in names):
            raise UserError(f"blocks: '{name}' lies inside another of the blocks; name one of them")
    return Blocks({name: modules[name] for name in names})


def submodules(name: str, block: nn.Module, member: str) -> dict[str, nn.Module]:
    """Find a block's outermost attention (`member="attention"`) or MLP (`"mlp"`) submodules, by qualified name."""
    pattern = _ATTENTION if member == "attention" else _MLP
    found = dict(_outermost(name, block, member))
    if not found and pattern.search(type(block).__name__):  # in a U-Net, a plain attention module can be a block
        return {name: block}
    if not found and member == "mlp":
        return {f"{name}.{key}": child for key, child in block.named_children() if _BARE_MLP.search(key)}
    return found


def _outermost(name: str, module: nn.Module, member: str) -> Iterator[Named]:
    for key, child in module.named_children():
        kind, path = type(child).__name__, f"{name}.{key}"
        if member == "attention":
            found = bool(_ATTENTION.search(kind))
        elif _ATTENTION.search(kind):
            continue
        else:
            found = bool(_MLP.search(kind) or (_MLP_NAME.match(key) and _is_composite(child)))
        if found and _has_parameters(child):
            yield path, child
        else:
            yield from _outermost(path, child, member)


class _Finder:
    """Walks over a model once and collects `blocks` and `stages` in definition order."""

    def __init__(self, model: nn.Module) -> None:
        self.blocks: dict[str, nn.Module] = {}
        self.stages: list[Stage] = []
        listed = list(_listed(model))
        self.repeated = {kind for kind, count in Counter(map(type, listed)).items() if count > 1}
        self.more_than_a_layer = {type(module) for module in listed if list(islice(_matrices(module), 2)) != [2]}

    def visit(self, name: str, module: nn.Module, in_stage: bool = False) -> None:
        children = sorted(module.named_children(), key=lambda item: item[0].startswith("up"))  # a U-Net runs them last
        for key, child in children:
            path = f"{name}.{key}" if name else key
            if _is_list(child):
                self.visit_list(path, child, in_stage)
            elif is_a(child, LAYER) and not self.is_stage(child):
                self.blocks[path] = child
            elif key in _LONE_STAGES:
                self.visit_stage(path, child)
            else:
                self.visit(path, child, in_stage)

    def visit_list(self, name: str, container: nn.Module, in_stage: bool) -> None:
        if _PARALLEL.search(name.rpartition(".")[2]):
            return
        for key, child in container.named_children():
            path = f"{name}.{key}"
            if _is_list(child):
                self.visit_list(path, child, in_stage)
            elif _is_model(child) or (in_stage and self.is_stage(child)):  # a level that has lists of blocks
                self.visit(path, child, in_stage)
            elif self.is_stage(child):
                self.visit_stage(path, child)
            elif is_a(child, LAYER) or (_is_composite(child) and (in_stage or self.is_repeated(child))):
                self.blocks[path] = child

    def visit_stage(self, name: str, stage: nn.Module) -> None:
        known = len(self.blocks)
        self.visit(name, stage, in_stage=True)
        inside = dict(list(self.blocks.items())[known:])
        if inside:
            self.stages.append(Stage(name, stage, inside))

    def is_repeated(self, module: nn.Module) -> bool:
        """Whether the model's lists hold several modules of this class, and not all only wrap one linear layer.

        Wrapped linear layers occur in an MLP's list (diffusers' GELU) or as per-block projections of the text.
        """
        return type(module) in self.repeated & self.more_than_a_layer

    def is_stage(self, module: nn.Module) -> bool:
        """Whether `module` only runs blocks in sequence: it owns a list of blocks and is not a residual block."""
        lists = [child for key, child in module.named_children() if _is_list(child) and not _PARALLEL.search(key)]
        layers = [[element for element in child.children() if _has_parameters(element)] for child in lists]
        if any(is_a(element, LAYER) for elements in layers for element in elements):
            return True
        inner = [self.blocklike(elements) for elements in layers]
        found = [element for elements in inner for element in elements]
        if is_a(module, LAYER):  # T5Block has a list of different sublayers and is not a stage
            return any(count > 1 for count in Counter(type(element) for element in found).values())
        own = [child for child in module.children() if not _is_list(child) and _has_parameters(child)]
        return bool(found) and (not own or any(type(element) in self.repeated for element in found))

    def blocklike(self, elements: list[nn.Module]) -> list[nn.Module]:
        """Elements of a list that could be blocks; none if they are a minority (for example one squeeze-excite)."""
        found = [element for element in elements if _is_model(element) or _is_blocklike(element)]
        return found if 2 * len(found) >= len(elements) else []


def _listed(model: nn.Module) -> Iterator[nn.Module]:
    for module in modules_in(model):
        if _is_list(module):
            yield from module.children()


def _bare_layers(model: nn.Module) -> Iterator[Named]:
    """For a model without composite modules: yield all elements of each outermost list that repeats a layer."""
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if _is_list(module) and module not in inside:
            kinds = Counter(type(child) for child in module.children() if _has_parameters(child))
            if any(count > 1 for count in kinds.values()):
                inside |= modules_in(module).keys()
                yield from ((f"{name}.{key}" if name else key, child) for key, child in module.named_children())


def _sibling_sequentials(model: nn.Module, blocks: dict[str, nn.Module]) -> list[Stage]:
    """Find torchvision-like stages: sibling `Sequential`s of blocks in one module (`layer1` ... `layer4`)."""
    inside: dict[str, dict[str, nn.Module]] = {}
    for path, block in blocks.items():
        inside.setdefault(path.rpartition(".")[0], {})[path] = block
    stages = [
        Stage(name, model.get_submodule(name), own)
        for name, own in inside.items()
        if name and isinstance(model.get_submodule(name), nn.Sequential)
    ]
    parents = Counter(stage.name.rpartition(".")[0] for stage in stages)
    return [stage for stage in stages if parents[stage.name.rpartition(".")[0]] > 1]


def _is_model(module: nn.Module) -> bool:
    return is_a(module, PRETRAINED) or is_a(module, DIFFUSERS)


def _is_list(module: nn.Module) -> bool:
    """Whether it is a ModuleList, a Sequential or a ModuleDict with numeric keys (torchtitan, for pipeline stages)."""
    counted = isinstance(module, nn.ModuleDict) and len(module) > 0 and all(key.isdecimal() for key in module)
    return counted or isinstance(module, _LISTS)


def _is_composite(module: nn.Module) -> bool:
    """Whether the module has submodules. A layer that PEFT wraps as `base_layer` counts as a single layer."""
    return _has_parameters(module) and any(True for _ in module.children()) and "base_layer" not in children_of(module)


def _matrices(module: nn.Module) -> Iterator[int]:
    """Yield the number of dimensions of each weight matrix in `module`; skip adapter weights."""
    module = children_of(module).get("base_layer") or module
    yield from (dim for p in module.parameters(recurse=False) if (dim := p.dim()) > 1)
    for child in module.children():
        yield from _matrices(child)


def _is_blocklike(module: nn.Module) -> bool:
    """Whether the module is composite and has two or more matrices; a convolution with its norm counts as a layer."""
    matrices = sum(1 for p in module.parameters() if p.dim() > 1)
    return _is_composite(module) and not _is_list(module) and matrices > 1


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def linear_widths(layer: nn.Module) -> tuple[int, int] | None:
    """The input and output width of a linear layer, also PEFT's or a quantised one, or transformers' Conv1D."""
    for takes, gives in (("in_features", "out_features"), ("nx", "nf")):
        widths = getattr(layer, takes, None), getattr(layer, gives, None)
        if isinstance(widths[0], int) and isinstance(widths[1], int):
            return widths[0], widths[1]
    return None


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
    if policy.scope in SEGMENTED:
        return _split(blocks, max(1, round(len(blocks) ** 0.5)) if policy.scope == "sqrt" else n)
    chosen = {"full": blocks, "every": blocks[::n], "first": blocks[:n]}.get(policy.scope or "")
    if chosen is None:
        chosen = (_stage_regions if policy.scope == "stages" else _member_regions)(policy, found, kind)
    return [[region] for region in chosen]


def _split(blocks: list[Region], n: int) -> list[list[Region]]:
    """Split blocks into `n` consecutive sequences whose lengths differ by at most one."""
    n = min(n, len(blocks))
    return [blocks[start:stop] for start, stop in pairwise([len(blocks) * i // n for i in range(n + 1)])]


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
