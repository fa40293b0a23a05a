"""Finds the towers of a model: the language model, vision encoder and audio encoder that it is put together of.

Structure decides, not names. From a block outwards, the first module, or else the transformers model that it is in,
says what it hears of that

    takes       pixels alone (vision) or sound alone (audio), among what its forward is called with;
    declares    a transformers model of one sense alone (`input_modalities`), text being what all declare by default;
    is built    otherwise, of the layers that stand before the blocks: an embedding of tokens (language), a convolution
                over two or three dimensions (vision) or over one (audio). Parts with blocks of their own do not count.

A block that one finds only together with layers of several senses, or of none (a resampler between the towers), is of
none.
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

_SENSES = {"text": "language", "image": "vision", "video": "vision", "audio": "audio"}
_TAKEN = {
    "input_ids": "language", "pixel_values": "vision", "pixel_values_videos": "vision", "input_features": "audio",
    "input_values": "audio",
}  # fmt: skip


@dataclass(frozen=True)
class Tower:
    """One sense of a model: the modules that hold it, which hold no other, and its blocks, by qualified name."""

    name: str
    modules: dict[str, nn.Module]
    blocks: dict[str, nn.Module]


@dataclass(frozen=True)
class Part:
    """Where a policy stands: in the tower of that name, or ("") in all that no other part has."""

    tower: str
    policy: Policy
    modules: dict[str, nn.Module]
    found: Blocks


def find_towers(model: nn.Module, blocks: dict[str, nn.Module]) -> list[Tower]:
    """The towers of a model that has these blocks, in the order of `TOWERS`."""
    around = {model.get_submodule(path) for path in _around(blocks)}.union(blocks.values())
    senses: dict[str, str] = {}  # of blocks by the path of the module that they are in
    for path in blocks:
        outside = path.rpartition(".")[0]
        if outside not in senses:
            senses[outside] = _sense_in(model, outside, around)
    found = []
    for name in TOWERS:
        own = {path: block for path, block in blocks.items() if senses[path.rpartition(".")[0]] == name}
        if own:
            others = _around(path for path in blocks if path not in own)
            roots = dict.fromkeys(_root(path, others) for path in own)
            found.append(Tower(name, {root: model.get_submodule(root) for root in roots}, own))
    return found


def parts_of(policy: Policy, model: nn.Module, found: Blocks) -> list[Part]:
    """Where the terms of `policy` stand in a model with these blocks: its towers, then what is left of it.

    Raises:
        UserError: the model has no tower of that name.
    """
    towers = {tower.name: tower for tower in find_towers(model, found.blocks)} if policy.towers else {}
    left, parts = found, []
    for name, own in policy.towers:
        if name not in towers:
            has = f"it has {', '.join(towers)}" if towers else "none can be told in it"
            raise UserError(f"policy '{policy}': {type(model).__name__} has no {name} tower; {has}")
        tower = towers[name]
        parts.append(Part(name, own, tower.modules, _only(found, tower.blocks)))
        left = _only(left, {path: block for path, block in left.blocks.items() if path not in tower.blocks})
    return [*parts, Part("", policy.parts[""], {"": model}, left)]


def _only(found: Blocks, blocks: dict[str, nn.Module]) -> Blocks:
    return Blocks(blocks, [stage for stage in found.stages if all(path in blocks for path in stage.blocks)])


def _around(paths: Iterable[str]) -> set[str]:
    """The paths of all modules that one of `paths` is in, "" for the model."""
    return {path[:end] for path in paths for end in (0, *(i for i, letter in enumerate(path) if letter == "."))}


def _sense_in(model: nn.Module, path: str, around: set[nn.Module]) -> str:
    """The tower of the blocks directly in the module at `path`; "" for none.

    around: the blocks and all modules that have blocks in them.
    """
    while True:
        module = model.get_submodule(path)
        senses = _told(module) or set(_built(module, around))
        if senses:  # an embedding of relative positions is built as one of tokens is
            senses = _told(_model_around(model, path)) or senses
            return senses.pop() if len(senses) == 1 else ""
        if not path:
            return ""
        path = path.rpartition(".")[0]


def _model_around(model: nn.Module, path: str) -> nn.Module:
    """The innermost transformers model that the module at `path` is, or is in; that module where there is none."""
    names = path.split(".") if path else []
    around = [model.get_submodule(".".join(names[:depth])) for depth in range(len(names), -1, -1)]
    return next((module for module in around if is_a(module, PRETRAINED)), around[0])


def _root(path: str, others: set[str]) -> str:
    """The outermost module around the block at `path` that is none of `others`; "" for the model."""
    names = path.split(".")
    roots = (".".join(names[:depth]) for depth in range(len(names)))
    return next((root for root in roots if root not in others), path)


def _told(module: nn.Module) -> set[str]:
    """The one sense but language that `module` takes, or else declares; empty where there is no one such."""
    taken = {_TAKEN[name] for name in inspect.signature(type(module).forward).parameters if name in _TAKEN}
    if not taken and is_a(module, PRETRAINED):
        declared: Any = module.input_modalities
        said = [declared] if isinstance(declared, str) else declared
        taken = {_SENSES[sense] for sense in said if sense in _SENSES}
    return taken if len(taken) == 1 and taken != {"language"} else set()


def _built(module: nn.Module, around: set[nn.Module]) -> Iterator[str]:
    """The senses of the layers in `module` that are not in `around` (modules with blocks in them)."""
    children = [child for child in module.children() if child not in around]
    kinds = {"vision" for child in children if isinstance(child, (nn.Conv2d, nn.Conv3d))}
    kinds |= {"audio" for child in children if isinstance(child, nn.Conv1d)}
    yield from kinds or {"language" for child in children if isinstance(child, nn.Embedding)}  # else of positions
    for child in children:
        yield from _built(child, around)
