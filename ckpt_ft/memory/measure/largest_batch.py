"""The largest batch that a model was given while it was measured: for the report, and for a prediction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from ckpt_ft.memory.fake.values import is_small


class Outline(NamedTuple):
    """A tensor's shape; the values of a mask, of positions or of labels, on the host, since they decide what runs."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    values: torch.Tensor | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Outline:
        with _disable_current_modes():  # the copy is no part of what is measured
            values = tensor.detach().to("cpu", copy=True) if is_small(tensor) else None
        return cls(tuple(tensor.shape), tensor.dtype, values)


class LargestBatch:
    """A model's arguments in the call with most elements; of tensors outlines are kept: no device memory is held."""

    def __init__(self) -> None:
        self.elements = 0
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}

    def note(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Keep these arguments if they are larger than those before."""
        elements = sum(leaf.numel() for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor))
        if elements > self.elements:
            self.elements = elements
            self.args, self.kwargs = tree_map_only(torch.Tensor, Outline.of, (args, dict(kwargs)))

    @property
    def shapes(self) -> dict[str, list[int]]:
        """Shapes of the tensors, by argument."""
        named = {**{f"input {i}": value for i, value in enumerate(self.args)}, **self.kwargs}
        return {name: list(value.shape) for name, value in named.items() if isinstance(value, Outline) and value.shape}

    def again(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments anew, in a trace that follows their values; tensors whose values were not kept are zeros."""

        def fill(value: Any) -> Any:
            if not isinstance(value, Outline):
                return value
            if value.values is None:
                return torch.zeros(value.shape, dtype=value.dtype)
            return torch.tensor(value.values.tolist(), dtype=value.dtype)  # made anew: it lives as long as a batch

        given: tuple[tuple[Any, ...], dict[str, Any]] = (self.args, self.kwargs)
        return tree_map(fill, given, is_leaf=lambda value: isinstance(value, Outline))
