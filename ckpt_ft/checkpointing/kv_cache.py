"""Turns off transformers' KV caches in training, where nothing reads them and a second run would append to them.

`apply_policy` puts hooks on the models that have one, which turn it off in training (`without_kv_cache`). A block that
receives one all the same runs without it (`DroppedCaches`). Generation keeps its cache.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ckpt_ft.compat.modules import children_of
from ckpt_ft.errors import UserError

from .arguments import Arguments
from .libraries import KV_CACHE, PRETRAINED, is_a


def is_cache(value: Any) -> bool:
    return is_a(value, KV_CACHE)


def tied_by_cache(model: nn.Module) -> str:
    """Names two places in a list of layers of one module, which has a single place in a KV cache; "" for none."""
    for path, layers in model.named_modules():
        if not isinstance(layers, nn.ModuleList):
            continue
        names: dict[nn.Module, str] = {}
        for key, layer in children_of(layers).items():
            for name, module in () if layer is None else layer.named_modules(prefix=f"{path}.{key}".lstrip(".")):
                index = module.__dict__.get("layer_idx")
                if isinstance(index, int) and index >= 0 and names.setdefault(module, name) != name:
                    return f"{names[module]} and {name}"
    return ""


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


def wants_cache(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether a transformers model would make a KV cache in this call."""
    use_cache = kwargs.get("use_cache")
    if use_cache is None:
        config: Any = module.config
        use_cache = getattr(config, "use_cache", getattr(config.get_text_config(), "use_cache", False))
    return bool(use_cache)


def without_kv_cache(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Forward pre-hook: turns the KV cache off in training; generation keeps it."""
    if not (module.training and torch.is_grad_enabled()):
        return None
    if name := given_cache(kwargs):
        raise UserError(
            f"{type(module).__name__} was given {name} in training (prefix tuning?): a block that is re-run "
            "would append to them twice; train without a checkpointing policy, or with 'pointwise'"
        )
    return args, {**kwargs, "use_cache": False}


class DroppedCaches:
    """Removes the KV caches from a region's arguments in training; nothing reads them, and they take memory."""

    def __init__(self) -> None:
        self.last: weakref.ref[Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return DroppedCaches, ()

    def without_cache(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Return the arguments without caches of transformers; unchanged if the block would read a cache's contents.

        Raises:
            UserError: a cache comes a second time, so that the block would read what it wrote the first time.
        """
        caches = [value for value in (*args, *kwargs.values()) if is_cache(value)]
        if not caches or any(map(_is_filled, caches)):
            return args, kwargs
        if self.last is not None and self.last() is caches[0]:
            raise UserError(
                f"{type(module).__name__} was given the same KV cache twice in training, and reads in its second call "
                "what it wrote in its first; train without a cache (use_cache=False), or with 'pointwise' or 'offload'"
            )
        self.last = weakref.ref(caches[0])
        args = tuple(None if is_cache(value) else value for value in args)
        kwargs = {key: None if is_cache(value) else value for key, value in kwargs.items()}
        return args, {**kwargs, "use_cache": False} if kwargs.get("use_cache") else kwargs


def _is_filled(cache: Any) -> bool:
    parts = [getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    if any(part is not None for part in parts):
        return any(part is not None and _is_filled(part) for part in parts)
    return any(getattr(layer, "is_initialized", True) for layer in getattr(cache, "layers", [None]))
