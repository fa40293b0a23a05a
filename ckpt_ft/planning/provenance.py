"""Identifies the inputs of a result: versions, the model's fingerprint, the path in the cache."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_ft.errors import UserError
from ckpt_ft.files import cache_root

if TYPE_CHECKING:
    from torch import nn

PACKAGES = ("torch", "transformers", "diffusers", "peft", "ckpt_ft")
_ADAPTED = frozenset({"base_layer", "original_module"})  # attributes with the layer that a PEFT layer wraps
_WRAPPERS = re.compile(r"(^|\.)(base_model\.model|base_layer|original_module|module|_orig_mod)(?=\.)")


def versions() -> dict[str, str]:
    """The installed versions of the packages that decide a step's memory, without local parts such as "+cpu"."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def check_versions(made_with: Mapping[str, str], source: str) -> None:
    """Raises UserError if a plan was made with other versions than the installed ones."""
    here = versions()
    changed = [
        f"{name} {old}, here {here.get(name, 'none')}" for name, old in made_with.items() if here.get(name) != old
    ]
    if changed:
        raise UserError(f"{source}: made with {'; '.join(changed)}: what fits may have changed; make it again")


def fingerprint(model: nn.Module) -> str:
    """A digest of the base model's parameters: their names, shapes and dtypes.

    Adapters and wrappers (DDP, torch.compile) do not change it, and neither does the device.
    """
    digest = hashlib.sha256()
    base = _unwrapped(model)
    wrappers = {name for name, module in base.named_modules() if not _ADAPTED.isdisjoint(module._modules)}
    for name, parameter in base.named_parameters():
        if _of_an_adapter(name, wrappers):
            continue
        plain = _WRAPPERS.sub("", name).lstrip(".").replace("..", ".")
        packed = parameter.element_size() == 1  # 4- and 8-bit weights: each library lays them out in its own way
        digest.update(f"{plain} {'packed' if packed else (tuple(parameter.shape), parameter.dtype)}\n".encode())
    return digest.hexdigest()[:16]


def _unwrapped(model: Any) -> nn.Module:
    """Returns the model inside DDP, torch.compile and PEFT."""
    while True:
        if hasattr(model, "get_base_model"):  # PEFT's
            model = model.get_base_model()
        elif "_orig_mod" in model._modules:
            model = model._orig_mod
        elif list(model._modules) == ["module"]:
            model = model.module
        else:
            return model


def _of_an_adapter(name: str, wrappers: Collection[str]) -> bool:
    """Whether a parameter lies in one of PEFT's `wrappers`, but not in the layer that is wrapped."""
    parts = name.split(".")
    return any(".".join(parts[:at]) in wrappers and parts[at] not in _ADAPTED for at in range(len(parts)))


@lru_cache(maxsize=1)
def source_digest() -> str:
    """A digest of this package's code: a change of the code makes every cached result invalid."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def cache_path(kind: str, question: Mapping[str, Any]) -> Path:
    """The path in the cache of the result of a `kind`; `question` has everything that the result depends on."""
    text = json.dumps(
        {"question": question, "versions": versions(), "code": source_digest()}, sort_keys=True, default=str
    )
    return cache_root() / kind / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
