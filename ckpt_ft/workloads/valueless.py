"""Making modules on the meta device whose initialisation looks at values, of a base weight or of what it has drawn.

Adapters that decompose the weight that they adapt, draw masks, or ask whether two tensors are close have shapes all
the same. They are told: every number is one, every comparison true, of a mask as many are set as were written into it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class Valueless(TorchDispatchMode):
    """While it is on, ops on meta tensors that need values get the ones named above."""

    def __init__(self) -> None:
        super().__init__()
        self._set: dict[int, tuple[Tensor, int]] = {}  # storage of a mask -> it, and how many are set

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is None or not first.is_meta:
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            return True if first.dtype is torch.bool else 1.0 if first.dtype.is_floating_point else 1
        if func is aten._to_copy.default:
            kwargs.pop("device", None)  # there is nothing to copy to another
        if func is aten.bincount.default:
            return first.new_empty(max(kwargs.get("minlength", 0), 1))
        if func is aten.nonzero.default:
            return self._nonzero(first)
        if func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
            args = (first, self._positions(args[1]), *args[2:])
        out = func(*args, **kwargs)
        if func in (aten.scatter_.src, aten.scatter_.value) and first.dtype is torch.bool:
            self._set[first.untyped_storage()._cdata] = (first, args[2].numel())
        elif func is aten.eq.Scalar and first.untyped_storage()._cdata in self._set:
            self._set[out.untyped_storage()._cdata] = (out, self._count(first))
        return out

    def _count(self, mask: Tensor) -> int:
        return self._set.get(mask.untyped_storage()._cdata, (mask, mask.numel()))[1]

    def _nonzero(self, mask: Tensor) -> Tensor:
        """(set elements, axes)"""
        return torch.empty(self._count(mask), mask.ndim, dtype=torch.long, device="meta")

    def _positions(self, indices: Any) -> list[Any]:
        """Masks among `indices` as the positions that they set, an index for each axis."""
        found: list[Any] = []
        for index in indices:
            if index is None or index.dtype is not torch.bool:
                found.append(index)
            else:
                found += self._nonzero(index).unbind(1)
        return found
