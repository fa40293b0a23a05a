"""Fingerprints of tensors: layout and a hash of the bits, which tell whether a restored tensor is the one saved.

The hash is 64 bits, made on the tensor's device without waiting for it, in pieces of up to 4 MiB. A piece of a tensor
with gaps is copied. In each piece it sums the bits as 64-bit integers over 256 rows, takes a sample of up to 2,048
words, and multiplies each by a fixed random odd weight of its position. Every changed bit changes a row's sum; the
weights make the hash depend on the order of rows, and the sample on the order within a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ckpt_ft.compat.compiler import uncompiled
from ckpt_ft.compat.distributed import AsyncCollectiveTensor
from ckpt_ft.compat.tensors import (
    FakeTensor,
    is_traceable_wrapper_subclass,
    no_dispatch,
    no_torch_functions,
    without_fakes,
)
from ckpt_ft.units import MIB

from .tensor_identity import as_stored

_PIECE = 4 * MIB
_ROWS, _SAMPLE = 256, 2048  # sums of rows and sampled words of a piece
_SMALL_WORDS = 4096  # words; a piece of no more is weighted word by word
_FACTOR = 0x9E3779B97F4A7C1  # odd: the order of pieces and parts counts
_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_weights: dict[torch.device, torch.Tensor] = {}

Layout = tuple[Any, ...]  # kind of tensor; dtype, shape and strides of each of its parts


@uncompiled  # which would trace it where compiled code saves a tensor
def fingerprint(tensor: torch.Tensor) -> tuple[Layout, torch.Tensor | None]:
    """The layout of `tensor` and a hash of its bits, an int64 scalar on its device; None if it has no bits (meta)."""
    layout: list[Any] = [type(tensor) if is_traceable_wrapper_subclass(tensor) else torch.Tensor]
    total: torch.Tensor | None = None
    with without_interception():
        for part in _parts(tensor):
            layout.append((part.dtype, tuple(part.shape), _strides(part)))
            if part.device.type == "meta" or isinstance(part, FakeTensor) or _is_freed(part):
                continue
            hashed = _hash(part)
            total = hashed if total is None else total * _FACTOR + hashed
    return tuple(layout), total


@contextmanager
def without_interception() -> Iterator[None]:
    """Hides what runs inside from autograd, dispatch modes, torch-function modes and tensor subclasses."""
    with torch.no_grad(), no_torch_functions(), no_dispatch():
        yield


def can_hash() -> bool:
    """Whether bits and flags can be read here: not under a fake mode and not while a CUDA graph is captured."""
    if torch.compiler.is_compiling():
        return False
    with without_fakes() as mode:
        if mode is not None:
            return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that hold the bits of `tensor`: the local one of a DTensor, values of a sparse one."""
    if isinstance(tensor, AsyncCollectiveTensor):
        yield tensor.trigger_wait()
    elif type(tensor) is not torch.Tensor and is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            if isinstance(part := getattr(tensor, name), torch.Tensor):  # a DTensor also names its mesh
                yield from _parts(part)
    elif tensor.layout is torch.strided:
        yield tensor.int_repr() if tensor.is_quantized else tensor
    elif tensor.layout is torch.sparse_coo:
        yield torch.ops.aten._indices(tensor)
        yield torch.ops.aten._values(tensor)
    else:  # compressed rows or columns, or an opaque layout (MKL-DNN's)
        yield tensor.to_dense()


def _is_freed(tensor: torch.Tensor) -> bool:
    """Whether a sharding engine has freed its memory."""
    return tensor.layout is torch.strided and tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of the dimensions that have more than one element; other strides have no effect."""
    if tensor.numel() == 0:
        return ()
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


def _hash(tensor: torch.Tensor) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    stored = as_stored(tensor)
    if _is_dense(stored):
        stored = stored.as_strided((stored.numel(),), (1,))
    else:  # each repeated element once
        stored = stored[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in stored.stride())]
    for piece in _pieces(stored):
        total = total * _FACTOR + _hash_flat(piece)
    return total


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The elements in 1-D tensors of up to `_PIECE` bytes, which are copies if the tensor has gaps."""
    if tensor.nbytes <= _PIECE:
        dense = tensor.contiguous()
        yield dense.as_strided((dense.numel(),), (1,))  # a single element may have any stride
    else:
        for half in tensor.chunk(2, max(range(tensor.dim()), key=lambda dim: tensor.shape[dim])):
            yield from _pieces(half)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one range of memory without gaps or overlaps."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _hash_flat(flat: torch.Tensor) -> torch.Tensor:
    """The hash of a contiguous 1-D tensor, one word of many; it does not depend on the offset in the storage."""
    size = flat.element_size()
    if flat.storage_offset() * size % 8:  # a view as words must begin at a word boundary
        flat = flat.clone()
    whole = flat.numel() * size // 8 * 8 // size
    words = flat[:whole].view(torch.int64)
    n = words.numel()
    parts = [words]
    if n > _SMALL_WORDS:
        length = n // _ROWS
        sums = words[: _ROWS * length].view(_ROWS, length).sum(1)
        parts = [sums, words[:: n // _SAMPLE | 1], words[_ROWS * length :]]
    if whole < flat.numel():
        parts.append(flat[whole:].view(_INTEGER_OF_SIZE[size]).to(torch.int64))
    words = torch.cat(parts)
    return (words * _weight(words)).sum()


def _weight(words: torch.Tensor) -> torch.Tensor:
    """A fixed random odd number for each position."""
    n, device = words.numel(), words.device
    weights = _weights.get(device)
    if weights is None or weights.numel() < n:
        generator = torch.Generator().manual_seed(0)
        size = max(n, 2 * _SMALL_WORDS)
        weights = torch.randint(-(2**62), 2**62, (size,), generator=generator).mul_(2).add_(1).to(device)
        _weights[device] = weights
    return weights[:n]


def layout_change(before: Layout, now: Layout) -> str:
    if before[0] is not now[0] or len(before) != len(now):
        return f"kind of tensor: {before[0].__name__} in forward, {now[0].__name__} in backward"
    for what, place in (("shape", 1), ("dtype", 0), ("strides", 2)):
        for old, new in zip(before[1:], now[1:], strict=True):
            if old[place] != new[place]:
                return f"{what}: {old[place]} in forward, {new[place]} in backward"
    return "layout"
