"""What identifies a tensor to saved-tensor hooks: its storage, its view of that storage, and its version counter."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# dtype, size, stride, storage offset, and whether it reads the storage conjugated or negated. A plain tuple: one is
# made for every tensor that is saved.
View = tuple[Any, ...]
_NOTHING = torch.empty(0)
_set_version = torch._C._autograd._unsafe_set_version_counter


def view_of(tensor: torch.Tensor) -> View:
    """The view of its storage that `tensor` is."""
    return (
        tensor.dtype,
        tensor.size(),
        tensor.stride(),
        tensor.storage_offset(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def looked_at(tensor: torch.Tensor, view: View) -> torch.Tensor:
    """The storage of `tensor` seen through `view`, detached."""
    dtype, size, stride, offset, conjugated, negated = view
    found = as_stored(tensor)
    if found.dtype is not dtype:
        found = flat(found).view(dtype)
    found = found.as_strided(size, stride, offset)
    if conjugated:
        found = found.conj()
    return torch._neg_view(found) if negated else found


def as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` without a graph and without the bits that say that it is read conjugated or negated."""
    stored = tensor.detach()
    if stored.is_conj():
        stored = stored.conj()
    return torch._neg_view(stored) if stored.is_neg() else stored


def flat(stored: torch.Tensor) -> torch.Tensor:
    """The whole storage as one dimension; its bytes must be a multiple of the dtype's."""
    return stored.as_strided((stored.untyped_storage().nbytes() // stored.element_size(),), (1,), 0)


def counter_of(tensor: torch.Tensor) -> torch.Tensor:
    """An empty tensor that shares the version counter of `tensor`: it shows writes and holds no memory."""
    return emptied(tensor.detach())


def counts_with(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both share one version counter, so that a write through either is seen by the other.

    Parts made by `unsafe_chunk`, `unsafe_split` or `_unsafe_view` share a storage and have a counter each. PyTorch has
    no query for this; the counter is moved for a moment and the other one read (5 us).
    """
    version = version_of(tensor)
    if version < 0 or version != version_of(other):
        return False
    _set_version((tensor,), (version + 1,))
    try:
        return other._version != version
    finally:
        _set_version((tensor,), (version,))


def emptied(alias: Any) -> torch.Tensor:
    """`alias` with empty data; it keeps its shared version counter."""
    if is_dtensor(alias):
        alias._local_tensor = _NOTHING
    else:
        alias.data = _NOTHING
    return alias


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether it is a wrapper subclass of other tensors (DTensor, jagged), whose own storage is empty."""
    return type(tensor) is not torch.Tensor and is_traceable_wrapper_subclass(tensor)


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor (tensor parallelism), whose own storage is empty: a local tensor holds the bytes."""
    return type(tensor) is not torch.Tensor and isinstance(tensor, DTensor)


def version_of(tensor: torch.Tensor) -> int:
    """The tensor's version counter; -1 for an inference tensor, which has none and is never saved."""
    return -1 if tensor.is_inference() else tensor._version


def written_to(counter: torch.Tensor, version: int, view: View) -> RuntimeError:
    """The error that autograd raises if a saved tensor was modified in place; under hooks its own check is off."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{view[0]} {list(view[1])} is at version {counter._version}; expected version {version}"
    )


def is_array(value: Any) -> bool:
    """Whether it is a numpy array; numpy is not imported for it."""
    return type(value).__name__ == "ndarray" and type(value).__module__ == "numpy"
