"""From hidden states to logits: the output layer and what a model does behind it, for all positions or some."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import nn

from ckpt_ft.errors import WorkFailed


class Layer(Protocol):
    """An output layer as `head` has it (OutputLayer)."""

    module: nn.Module

    def call(self, function: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor) -> Any:
        """`function` of `hidden`, within one call of the module."""

    def rows(self, hidden: torch.Tensor, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Its output for some positions, within `call`."""


@dataclass(frozen=True)
class Projection:
    """From positions to logits: the layer, in the autocast state of its call, and what the model did behind it."""

    layer: Layer
    autocast: tuple[str, torch.dtype, bool]
    steps: tuple[tuple[Callable[..., torch.Tensor], list[Any], dict[str, Any]], ...] = ()

    def rows(
        self, hidden: torch.Tensor, parameters: Mapping[str, torch.Tensor] = MappingProxyType({})
    ) -> torch.Tensor:
        """Logits [n, vocabulary] of positions [n, hidden], within `Layer.call`.

        Args:
            hidden: the positions.
            parameters: by name, what the layer uses in place of its own.
        """
        device, dtype, enabled = self.autocast
        with torch.autocast(device, dtype, enabled):
            logits = self.layer.rows(hidden, parameters)
        for function, args, kwargs in self.steps:
            logits = function(logits, *args, **kwargs)
        return logits

    def whole(self, hidden: torch.Tensor, version: int) -> torch.Tensor:
        """All logits at once, with gradients wherever they are computed."""
        with torch.enable_grad():
            return self.layer.call(self.rows, unchanged(hidden, version))


def unchanged(hidden: torch.Tensor, version: int) -> torch.Tensor:
    """`hidden`, the output layer's input.

    Raises:
        WorkFailed: it has been written to since the layer was called on it.
    """
    if hidden._version != version:
        raise WorkFailed(
            "policy 'head': the output layer's input was written to before the loss was computed; leave 'head' out"
        )
    return hidden
