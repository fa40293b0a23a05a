"""The models whose configurations come with the package: `configs/`, a file for each kind of model.

An entry has the configuration as far as it decides shapes (and its processor's, where it sees), the parameters that
its publisher counts (exactly, or as a model card rounds them), the other names that models of the same shapes have on
the Hub, and where it is from.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parent / "configs"
MIRRORS = ("unsloth", "NousResearch")  # who keeps copies of others' models on the Hub under the same name


@dataclass(frozen=True)
class KnownModel:
    """A model that needs no Hub.

    parameters: published, whole or rounded ("32B"). family: of the file it is in. processor: its published settings.
    """

    name: str
    family: str
    config: dict[str, Any]
    parameters: int | str
    also: tuple[str, ...]
    source: str
    processor: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The class that is trained."""
        named: str = self.config.get("_class_name") or self.config["architectures"][0]
        return named


@functools.cache
def known_models() -> dict[str, KnownModel]:
    """Every model once, by its name on the Hub."""
    found = {}
    for path in sorted(CONFIGS.glob("*.json")):
        for name, entry in json.loads(path.read_text(encoding="utf-8")).items():
            also = tuple(entry.pop("also"))
            found[name] = KnownModel(name, path.stem, also=also, **entry)
    return found


@functools.cache
def names() -> dict[str, KnownModel]:
    """Every name of the Hub, with the model that it stands for."""
    return {name: model for model in known_models().values() for name in (model.name, *model.also)}


@functools.cache
def _short_names() -> dict[str, str]:
    return {name.rpartition("/")[2].lower(): name for name in reversed(names())}


def hub_id(name: str) -> str:
    """The name on the Hub, from it or from what stands behind its slash; `name` itself where none is known."""
    return name if name in names() else _short_names().get(name.lower(), name)


def find_model(name: str) -> KnownModel | None:
    """The model of that name: its own on the Hub, that of a mirror, or what stands behind the slash."""
    owner, _, last = name.rpartition("/")
    return names().get(hub_id(last if owner in MIRRORS else name))
