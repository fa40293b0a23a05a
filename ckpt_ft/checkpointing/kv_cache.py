"""Turns off transformers' KV caches in training, where nothing reads them and they take memory.

`AppliedPolicy` has a hook on each model with a cache. A cache that is given to a model stays, and so does that of a
model with one layer at two positions, whose second call reads what the first has written: the second run of a block
gets the cache as the first run found it (`arguments.py`). Generation keeps its cache.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from .libraries import KV_CACHE, PRETRAINED, is_a
from .module_contents import modules_in


def is_cache(value: Any) -> bool:
    return is_a(value, KV_CACHE)


def tied_by_cache(model: nn.Module) -> bool:
    """Whether one attention module is at two places in a list of layers; it has a single place in a KV cache."""
    lists = [module for module in modules_in(model) if isinstance(module, nn.ModuleList)]
    for layers in lists:
        inside: Counter[nn.Module] = Counter()
        for layer in layers:
            if layer is not None:
                inside.update(inner for inner in modules_in(layer) if "layer_idx" in inner.__dict__)
        if any(count > 1 for count in inside.values()):
            return True
    return False


def caching_models(module: nn.Module, inner: bool = False) -> Iterable[tuple[nn.Module, bool]]:
    """The outermost transformers models in `module` with a KV cache, and whether another model calls them."""
    if is_a(module, PRETRAINED):
        if "use_cache" in inspect.signature(module.forward).parameters:
            yield module, inner
            return
        inner = True
    for child in module.children():
        yield from caching_models(child, inner)


def given_cache(named: Mapping[str, Any]) -> str:
    """The name of the KV cache among a model's keyword arguments or outputs; "" if there is none."""
    return next((name for name in ("cache", "past_key_values") if named.get(name) is not None), "")
