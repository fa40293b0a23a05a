"""A region's second run finds the tensors that its modules keep in plain attributes as its first run found them.

A module may carry a tensor from one call to the next in an attribute that is no buffer: causal convolutions over video
keep the last frames of the chunk before (EasyAnimate's autoencoder). The second run gets the attributes as they were
before the first, and afterwards what was there is put back. Which attributes those are is learned in the region's
first call in train and in eval mode; one that is first written later is not seen. What is no tensor is left alone: a
wrapper's counters (DeepSpeed's) count either run. The tensor of the call before is held until backward, read or not:
nothing tells a module that reads it from one that overwrites it (attention maps kept for a look).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

Kept = tuple[nn.Module, str, Any]  # an attribute and its value
_OWN = frozenset(vars(nn.Module()))
_MISSING = object()


class Attributes:
    """Which attributes of its modules a region writes tensors into."""

    def __init__(self) -> None:
        self.written: dict[bool, list[tuple[nn.Module, str]]] = {}  # by the region's train mode

    def before(self, modules: Iterable[nn.Module], training: bool) -> list[Kept]:
        """To be called before the first run: what those attributes hold; in the first call what all hold."""
        if training in self.written:
            return [(module, name, vars(module).get(name, _MISSING)) for module, name in self.written[training]]
        return [(module, name, value) for module in modules for name, value in vars(module).items()]

    def after(self, found: list[Kept], modules: Iterable[nn.Module], training: bool) -> list[Kept]:
        """To be called after the first run with what `before` gave: what the second run must find."""
        if training in self.written:
            return found
        was = {(module, name): value for module, name, value in found}
        names = dict.fromkeys([*was, *((module, name) for module in modules for name in vars(module))])
        written = [
            (module, name, was.get((module, name), _MISSING))
            for module, name in names
            if name not in _OWN and _differ(was.get((module, name)), vars(module).get(name))
        ]
        self.written[training] = [(module, name) for module, name, _ in written]
        return written

    def __getstate__(self) -> dict[str, Any]:
        return {}  # a copy of the model has modules of its own

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.written = {}


def put(kept: list[Kept]) -> list[Kept]:
    """Put the attributes in place; returns what was there instead."""
    there = []
    for module, name, value in kept:
        there.append((module, name, vars(module).get(name, _MISSING)))
        if value is _MISSING:
            vars(module).pop(name, None)
        else:
            vars(module)[name] = value
    return there


def _differ(was: Any, now: Any) -> bool:
    return was is not now and (isinstance(was, torch.Tensor) or isinstance(now, torch.Tensor))
