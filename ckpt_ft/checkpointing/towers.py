"""Finds the towers of a model: its language model, vision encoder and audio encoder.

The search uses structure, not names. It walks outwards from a block. The first module with a known modality, or else
the transformers model that contains it, determines the tower:

    inputs       its forward takes only pixels (vision) or only sound (audio);
    declaration  it is a transformers model whose `input_modalities` is a single one, other than text (the default);
    layers       otherwise, the layers in front of the blocks: a token embedding (language), a 2-D or 3-D convolution
                 (vision) or a 1-D convolution (audio). Submodules with blocks of their own do not count.

A block belongs to no tower if the walk finds layers of several modalities at once, or of none (for example a resampler
between towers).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ckpt_ft.errors import UserError
from ckpt_ft.policy import TOWERS, Policy

from .blocks import Blocks
from .libraries import PRETRAINED, is_a

_TOWER_OF_MODALITY = {"text": "language", "image": "vision", "video": "vision", "audio": "audio"}
_TOWER_OF_INPUT = {
    "input_ids": "language", "pixel_values": "vision", "pixel_values_videos": "vision", "input_features": "audio",
    "input_values": "audio",
}  # fmt: skip


@dataclass(frozen=True)
class Tower:
    """One tower of a model: the modules that contain only this tower, and its blocks, by qualified name."""

    name: str
    modules: dict[str, nn.Module]
    blocks: dict[str, nn.Module]


@dataclass(frozen=True)
class Part:
    """The part of a model that a policy covers: a named tower, or "" for everything outside the other parts."""

    tower: str
    policy: Policy
    modules: dict[str, nn.Module]
    found: Blocks


def find_towers(model: nn.Module, blocks: dict[str, nn.Module]) -> list[Tower]:
    """Find the towers of a model with these blocks, in the order of `TOWERS`."""
    around = {model.get_submodule(path) for path in _paths_around(blocks)}.union(blocks.values())
    tower_in: dict[str, str] = {}  # tower of the blocks, by path of their parent
    for path in blocks:
        outside = path.rpartition(".")[0]
        if outside not in tower_in:
            tower_in[outside] = _tower_of_blocks_in(model, outside, around)
    found = []
    for name in TOWERS:
        own = {path: block for path, block in blocks.items() if tower_in[path.rpartition(".")[0]] == name}
        if own:
            others = _paths_around(path for path in blocks if path not in own)
            roots = dict.fromkeys(_root(path, others) for path in own)
            found.append(Tower(name, {root: model.get_submodule(root) for root in roots}, own))
    return found


def parts_of(policy: Policy, model: nn.Module, found: Blocks) -> list[Part]:
    """Return the parts of a model that `policy` covers: the towers it names, then the rest of the model.

    Raises:
        UserError: the model has no tower of that name.
    """
    towers = {tower.name: tower for tower in find_towers(model, found.blocks)} if policy.towers else {}
    left, parts = found, []
    for name, own in policy.towers:
        if name not in towers:
            present = f"it has {', '.join(towers)}" if towers else "none was found"
            raise UserError(f"policy '{policy}': {type(model).__name__} has no {name} tower; {present}")
        tower = towers[name]
        parts.append(Part(name, own, tower.modules, _restricted_to(found, tower.blocks)))
        left = _restricted_to(left, {path: block for path, block in left.blocks.items() if path not in tower.blocks})
    return [*parts, Part("", policy.parts[""], {"": model}, left)]


def _restricted_to(found: Blocks, blocks: dict[str, nn.Module]) -> Blocks:
    return Blocks(blocks, [stage for stage in found.stages if all(path in blocks for path in stage.blocks)])


def _paths_around(paths: Iterable[str]) -> set[str]:
    """Return the paths of all modules that contain one of `paths`, with "" for the model."""
    return {path[:end] for path in paths for end in (0, *(i for i, letter in enumerate(path) if letter == "."))}


def _tower_of_blocks_in(model: nn.Module, path: str, around: set[nn.Module]) -> str:
    """Return the tower of the blocks directly in the module at `path`; "" for none.

    around: the blocks and all modules that contain blocks.
    """
    while True:
        module = model.get_submodule(path)
        towers = _stated_towers(module) or set(_towers_of_layers(module, around))
        if towers:  # an embedding may hold relative positions, not tokens
            towers = _stated_towers(_model_around(model, path)) or towers
            return towers.pop() if len(towers) == 1 else ""
        if not path:
            return ""
        path = path.rpartition(".")[0]


def _model_around(model: nn.Module, path: str) -> nn.Module:
    """Return the innermost transformers model at or around the module at `path`; if none, that module."""
    names = path.split(".") if path else []
    around = [model.get_submodule(".".join(names[:depth])) for depth in range(len(names), -1, -1)]
    return next((module for module in around if is_a(module, PRETRAINED)), around[0])


def _root(path: str, others: set[str]) -> str:
    """Return the path of the outermost module around the block at `path` that is not in `others`."""
    names = path.split(".")
    roots = (".".join(names[:depth]) for depth in range(len(names)))
    return next((root for root in roots if root not in others), path)


def _stated_towers(module: nn.Module) -> set[str]:
    """Return the single non-language modality of the inputs of `module`, or else of its declaration, if any."""
    inputs = inspect.signature(type(module).forward).parameters.keys() & _TOWER_OF_INPUT.keys()
    taken = {_TOWER_OF_INPUT[name] for name in inputs}
    if not taken and is_a(module, PRETRAINED):
        declared: Any = module.input_modalities
        modalities = [declared] if isinstance(declared, str) else declared
        taken = {_TOWER_OF_MODALITY[modality] for modality in modalities if modality in _TOWER_OF_MODALITY}
    return taken if len(taken) == 1 and taken != {"language"} else set()


def _towers_of_layers(module: nn.Module, around: set[nn.Module]) -> Iterator[str]:
    """Yield the modalities of the layers in `module` that are not in `around` (modules that contain blocks)."""
    children = [child for child in module.children() if child not in around]
    kinds = {"vision" for child in children if isinstance(child, (nn.Conv2d, nn.Conv3d))}
    kinds |= {"audio" for child in children if isinstance(child, nn.Conv1d)}
    yield from kinds or {"language" for child in children if isinstance(child, nn.Embedding)}  # or positions
    for child in children:
        yield from _towers_of_layers(child, around)
