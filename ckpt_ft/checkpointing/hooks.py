"""A region's second run calls the hooks on its modules that its first one called.

PEFT registers some for one forward, and they are gone in backward: they hand Poly's tasks, X-LoRA's shares and aLoRA's
offsets to its layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

_TABLES = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
Hooks = dict[nn.Module, list[dict[int, Any]]]  # copies of a module's tables, where it has hooks


def hooks_on(modules: Iterable[nn.Module]) -> Hooks:
    """Those that are called before and after `modules`."""
    return {
        module: [dict(getattr(module, name)) for name in _TABLES]
        for module in modules
        if module._forward_pre_hooks or module._forward_hooks
    }


def swap(now: Hooks, wanted: Hooks) -> None:
    """Put `wanted` where `now` are. The tables stay the same objects: a hook's handle refers to them."""
    for module in {**now, **wanted}:
        for name, hooks in zip(_TABLES, wanted.get(module, [{}] * len(_TABLES)), strict=True):
            table = getattr(module, name)
            table.clear()
            table.update(hooks)
