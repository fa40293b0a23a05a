"""The largest batch that a model was given while it was measured: shapes for the report, and for a prediction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map_only


class TensorShape(NamedTuple):
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class LargestBatch:
    """A model's arguments in the call with most elements; tensors are kept as shapes, so that no memory is held."""

    def __init__(self) -> None:
        self.elements = 0
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}

    def note(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Keep these arguments if they are larger than those before."""
        elements = sum(leaf.numel() for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor))
        if elements > self.elements:
            self.elements = elements
            self.args, self.kwargs = tree_map_only(
                torch.Tensor, lambda x: TensorShape(tuple(x.shape), x.dtype), (args, dict(kwargs))
            )

    @property
    def shapes(self) -> dict[str, list[int]]:
        """Shapes of the tensors, by argument."""
        named = {**{f"input {i}": value for i, value in enumerate(self.args)}, **self.kwargs}
        return {
            name: list(value.shape) for name, value in named.items() if isinstance(value, TensorShape) and value.shape
        }

    def again(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments anew, tensors full of zeros."""

        def fill(value: Any) -> Any:
            if isinstance(value, TensorShape):
                return torch.zeros(value.shape, dtype=value.dtype)
            if isinstance(value, (list, tuple)):
                return type(value)(fill(item) for item in value)
            return {key: fill(item) for key, item in value.items()} if isinstance(value, dict) else value

        return fill(self.args), fill(self.kwargs)
