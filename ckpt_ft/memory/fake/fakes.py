"""Makes fake tensors quickly: the attributes that `FakeTensor`'s constructor sets are copied from one that it made.

The constructor takes 9 µs, mostly for values that are the same for every fake tensor of a mode on one device. A plan
makes hundreds of thousands of fake tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

CPU = torch.device("cpu")
_META = torch.device("meta")


class Fakes:
    """Makes the fake CPU tensors of one mode, without dispatching an op."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        with torch._C._DisableTorchDispatch():
            self._attributes = dict(vars(FakeTensor(mode, torch.empty(0, device=_META), CPU)))
        lax = mode._allow_unsafe_data_ptr_access
        self._guard = (
            torch._C._set_warn_deprecated_on_mutable_data_ptr if lax else torch._C._set_throw_on_mutable_data_ptr
        )

    def new(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> FakeTensor:
        """A fake tensor with a storage of its own."""
        with torch._C._DisableTorchDispatch():
            return self._of(torch.empty_strided(shape, stride, dtype=dtype, device=_META))

    def view(
        self, of: Tensor, shape: Sequence[int], stride: Sequence[int], offset: int, dtype: torch.dtype
    ) -> FakeTensor:
        """A fake tensor on the storage of another."""
        with torch._C._DisableTorchDispatch():
            meta = torch.empty(0, dtype=dtype, device=_META)
            meta.set_(of.untyped_storage(), offset, shape, stride)
            return self._of(meta)

    def like(self, tensor: Tensor) -> FakeTensor:
        """A fake tensor of the same shape, strides and dtype."""
        return self.new(tensor.shape, tensor.stride(), tensor.dtype)

    def parameter(self, like: Tensor) -> FakeTensor:
        """A fake parameter like another."""
        fake = self.like(like)
        fake.requires_grad_(like.requires_grad)
        fake._is_param = True  # as torch/nn/parameter.py does
        return fake

    def _of(self, meta: Tensor) -> FakeTensor:
        fake = Tensor._make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=CPU)
        self._guard(fake)
        vars(fake).update(self._attributes)
        return fake


def are_fakes(values: Sequence[Any]) -> bool:
    """Whether all tensors among an op's arguments are fake ones."""
    for value in values:  # no generator: once for every op
        if type(value) is not FakeTensor and (
            isinstance(value, Tensor) or (isinstance(value, (tuple, list)) and not are_fakes(value))
        ):
            return False
    return True
