"""What ties a result to what it was made for: versions, the model's fingerprint, the path in the cache."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_ft.errors import UserError
from ckpt_ft.files import cache_root

if TYPE_CHECKING:
    from torch import nn


PACKAGES = ("torch", "transformers", "diffusers", "peft", "ckpt_ft")
_WRAPPERS = re.compile(r"(^|\.)(base_model\.model|base_layer|module|_orig_mod)(?=\.)")


def versions() -> dict[str, str]:
    """Versions of what decides a step's memory, without local parts such as "+cpu"; those installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def check_versions(made_with: Mapping[str, str], source: str) -> None:
    """Raises UserError where a plan was made with other versions than those at hand."""
    here = versions()
    changed = [
        f"{name} {old}, here {here.get(name, 'none')}" for name, old in made_with.items() if here.get(name) != old
    ]
    if changed:
        raise UserError(f"{source}: made with {'; '.join(changed)}: what fits may have changed; make it again")


def fingerprint(model: nn.Module) -> str:
    """A digest of the parameters' names, shapes and dtypes, the same with adapters as without, on any device."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            continue
        plain = _WRAPPERS.sub("", name).lstrip(".").replace("..", ".")
        packed = parameter.element_size() == 1  # 4- and 8-bit weights: each library lays them out its own way
        digest.update(f"{plain} {'packed' if packed else (tuple(parameter.shape), parameter.dtype)}\n".encode())
    return digest.hexdigest()[:16]


@lru_cache(maxsize=1)
def source_digest() -> str:
    """A digest of this package's code: a cached answer must not outlive the rules that it was made by."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def cache_path(kind: str, question: Mapping[str, Any]) -> Path:
    """Where the answer of a `kind` to `question` (all that it depends on) is kept."""
    text = json.dumps(
        {"question": question, "versions": versions(), "code": source_digest()}, sort_keys=True, default=str
    )
    return cache_root() / kind / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
