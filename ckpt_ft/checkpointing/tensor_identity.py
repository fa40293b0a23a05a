"""Identifies tensors in saved-tensor hooks by their storage, their view of that storage, and their version counter."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ckpt_ft.compat.distributed import LOCAL_TENSOR
from ckpt_ft.compat.tensors import is_traceable_wrapper_subclass, set_write_counts, write_count

# dtype, size, stride, storage offset, and the conjugate and negative bits. It is a plain tuple because one is created
# for every saved tensor.
View = tuple[Any, ...]
_NOTHING = torch.empty(0)


def view_of(tensor: torch.Tensor) -> View:
    return (tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg())


def looked_at(tensor: torch.Tensor, view: View) -> torch.Tensor:
    """Return a detached tensor with the storage of `tensor` and the given view of it."""
    dtype, size, stride, offset, conjugated, negated = view
    found = as_stored(tensor)
    if found.dtype is not dtype:
        found = flat(found).view(dtype)
    found = found.as_strided(size, stride, offset)
    if conjugated:
        found = found.conj()
    return torch.ops.aten._neg_view(found) if negated else found


def as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached alias of `tensor` without its conjugate and negative bits."""
    stored = tensor.detach()
    if stored.is_conj():
        stored = stored.conj()
    return torch.ops.aten._neg_view(stored) if stored.is_neg() else stored


def flat(stored: torch.Tensor) -> torch.Tensor:
    """Return the whole storage as a 1-D tensor; its bytes must be a multiple of the element size."""
    return stored.as_strided((stored.untyped_storage().nbytes() // stored.element_size(),), (1,), 0)


def counter_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor that shares the version counter of `tensor`: it shows writes and uses no memory."""
    return emptied(tensor.detach())


def counts_with(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both tensors share one version counter, so that a write to either increments the other's version.

    Tensors from `unsafe_chunk`, `unsafe_split` or `_unsafe_view` share a storage but have separate counters. PyTorch
    cannot report this, so the function changes one counter temporarily and reads the other (5 us).
    """
    version = version_of(tensor)
    if version < 0 or version != version_of(other):
        return False
    set_write_counts((tensor,), (version + 1,))
    try:
        return write_count(other) != version
    finally:
        set_write_counts((tensor,), (version,))


def emptied(alias: Any) -> torch.Tensor:
    """Replace the data of `alias` with an empty tensor; the shared version counter stays."""
    if is_dtensor(alias):
        setattr(alias, LOCAL_TENSOR, _NOTHING)
    else:
        alias.data = _NOTHING
    return alias


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a wrapper subclass (DTensor, jagged), whose own storage is empty."""
    return type(tensor) is not torch.Tensor and is_traceable_wrapper_subclass(tensor)


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a DTensor (tensor parallelism), whose data is in its local tensor."""
    return type(tensor) is not torch.Tensor and isinstance(tensor, DTensor)


def version_of(tensor: torch.Tensor) -> int:
    """Return the tensor's version; -1 for an inference tensor, which has no counter and is never saved."""
    return -1 if tensor.is_inference() else write_count(tensor)


def written_to(counter: torch.Tensor, version: int, view: View) -> RuntimeError:
    """Return autograd's error for a saved tensor modified in place; autograd skips this check under hooks."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{view[0]} {list(view[1])} is at version {write_count(counter)}; expected version {version}"
    )


def is_array(value: Any) -> bool:
    """Whether the value is a numpy array; does not import numpy."""
    return type(value).__name__ == "ndarray" and type(value).__module__ == "numpy"
