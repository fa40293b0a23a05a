"""Which towers of a vision-language model are trained: the others are frozen, or have no adapters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from ckpt_ft.checkpointing.blocks import find_blocks
from ckpt_ft.checkpointing.towers import Tower, find_towers
from ckpt_ft.errors import UserError
from ckpt_ft.spec.defaults import TRAINED_TOWERS


class TrainedTowers:
    """The towers of `model` that `choice`, one of `TRAINED_TOWERS`, names.

    Raises:
        UserError: the model has no such tower.
    """

    def __init__(self, model: Any, choice: str) -> None:
        self.model = model
        self._all = {tower.name: tower for tower in find_towers(model, find_blocks(model).blocks)}
        missing = [name for name in TRAINED_TOWERS[choice] if name not in self._all]
        if missing:
            raise UserError(
                f"train towers {choice}: {type(model).__name__} has no {missing[0]} tower"
                f"{'; it has ' + ', '.join(self._all) if self._all else ''}"
            )
        self.towers = [self._all[name] for name in TRAINED_TOWERS[choice]]

    def freeze_others(self) -> None:
        """Train their weights, and what lies between the towers, but no other tower's."""
        for tower in self._all.values():
            if tower not in self.towers:
                ends = [self.model.get_input_embeddings(), self.model.get_output_embeddings()]
                beside = ends if tower.name == "language" else []
                for module in [*tower.modules.values(), *(end for end in beside if end is not None)]:
                    module.requires_grad_(False)

    def adapted_layers(self, asked: Sequence[str] | str | None, by: str = "LoRA targets") -> str:
        """A pattern, as PEFT takes one, of what gets an adapter in them: every linear layer but the head, or what is
        named as `asked` (`by` what, in errors). Where `asked` is a pattern, that, whatever towers it is of.

        Raises:
            UserError: nothing in them is.
        """
        linear = asked in (None, "all-linear", ["all-linear"])
        if isinstance(asked, str) and not linear:
            return asked
        head = self.model.get_output_embeddings()
        patterns = []
        for tower in self.towers:
            inside = [item for root in tower.modules.values() for item in root.named_modules()]
            if linear:
                names = _endings(inside, head)
            else:
                names = {end for end in asked or () if any(f".{name}".endswith(f".{end}") for name, _ in inside)}
            if names:
                patterns.append(_pattern(tower, names))
        if not patterns:
            where = " or ".join(tower.name for tower in self.towers)
            raise UserError(f"{by} {' '.join(asked or ())}: no layer of that name is {where}'s")
        return "|".join(patterns)


def _endings(modules: list[tuple[str, nn.Module]], head: nn.Module | None) -> set[str]:
    """What the paths of linear layers but the head end in, as short as no other module's path ends so: `q_proj`, and
    of a layer without a name of its own `mlp.0`, since `0` would be a block as well."""
    others = {end for name, module in modules if not isinstance(module, nn.Linear) for end in _ends(name)}
    layers = [name for name, module in modules if isinstance(module, nn.Linear) and module is not head]
    return {next((end for end in _ends(name) if end not in others), name) for name in layers}


def _ends(path: str) -> list[str]:
    """The path's last name, its last two, and so on."""
    names = path.split(".")
    return [".".join(names[first:]) for first in reversed(range(len(names)))]


def _pattern(tower: Tower, names: set[str]) -> str:
    """Of the modules in `tower` that end in one of `names`."""
    roots = "|".join(re.escape(f"{root}.") if root else "" for root in tower.modules)
    return rf"(?:{roots})(?:.*\.)?(?:{'|'.join(map(re.escape, sorted(names)))})"
