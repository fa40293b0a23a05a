"""Fingerprints of tensors: layout and a hash of the bits, which tell whether a restored tensor is the one saved.

The hash is 64 bits, made on the tensor's device without waiting for it and without temporaries of its size. It reads
each tensor once: it sums the bits as 64-bit integers over 256 rows, takes a sample of up to 2,048 words, and
multiplies each by a fixed random odd weight of its position. Every changed bit changes a row's sum; the weights make
the hash depend on the order of rows, and the sample on the order within a row.
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

from .tensor_identity import as_stored

_ROWS, _SAMPLE = 256, 2048  # sums of rows and sampled words per tensor: at most 20 KiB of temporaries
_SMALL_WORDS = 4096  # words; a tensor of no more is weighted word by word
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
            total = hashed if total is None else total * 0x9E3779B97F4A7C1 + hashed
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
    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    stored = as_stored(tensor)
    if _is_dense(stored):
        return _hash_flat(stored.as_strided((stored.numel(),), (1,)))
    return _hash_strided(stored)


def _hash_strided(tensor: torch.Tensor) -> torch.Tensor:
    """Hash a tensor with gaps or repeated elements: a sum for each index of its longest dimension, and a sample."""
    once = tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
    if once.numel() <= _SMALL_WORDS or _is_dense(once):
        once = once.contiguous()
        return _hash_flat(once.as_strided((once.numel(),), (1,)))
    if once.is_complex():
        once = torch.view_as_real(once)
    once = once.permute(sorted(range(once.dim()), key=once.stride, reverse=True)).squeeze()
    kept = max(range(once.dim()), key=lambda dim: once.shape[dim] if once.shape[dim] <= 65536 else 0)
    others = [dim for dim in range(once.dim()) if dim != kept]
    try:
        sums = once.view(torch.int64).sum(others)
    except RuntimeError:  # its contiguous runs are not whole words
        bits = once.view(_INTEGER_OF_SIZE[once.element_size()]) if once.element_size() < 8 else once.view(torch.int64)
        sums = torch.hash_tensor(bits, dim=others).view(torch.int64)  # reads any dtype without a temporary
    # words that occur an even number of times cancel in the XOR of `hash_tensor`; the sample detects constants
    steps = [max(1, round(size / (_SAMPLE ** (1 / once.dim())))) for size in once.shape]
    sample = once[tuple(slice(None, None, step) for step in steps)].contiguous()
    return _mixed(sums) + 3 * _hash_flat(sample.as_strided((sample.numel(),), (1,)))


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
    """The hash of a 1-D tensor without gaps; it does not depend on the offset in the storage."""
    size = flat.element_size()
    if size >= 8:
        return _mixed(flat.view(torch.int64))
    per = 8 // size
    whole = flat.numel() // per * per
    rest = flat[whole:].view(_INTEGER_OF_SIZE[size]).to(torch.int64) if whole < flat.numel() else None
    if flat.storage_offset() % per == 0:
        return _mixed(flat[:whole].view(torch.int64), rest)
    words = whole // per
    if words <= _SMALL_WORDS:
        return _mixed(flat[:whole].clone().view(torch.int64), rest)
    # a view as words must begin at a word boundary, so rows and sample are copied one after another
    length, step = words // _ROWS, words // _SAMPLE | 1
    rows = [flat[i * length * per : (i + 1) * length * per].clone().view(torch.int64).sum() for i in range(_ROWS)]
    sample = flat.as_strided((-(-words // step), per), (step * per, 1)).clone().view(torch.int64).flatten()
    last = flat[_ROWS * length * per : whole].clone().view(torch.int64)
    return _weighted(torch.cat([torch.stack(rows), sample, last, *(() if rest is None else (rest,))]))


def _mixed(words: torch.Tensor, rest: torch.Tensor | None = None) -> torch.Tensor:
    """One word of many; see the module's docstring."""
    n = words.numel()
    if n > _SMALL_WORDS:
        length = n // _ROWS
        sums = words[: _ROWS * length].view(_ROWS, length).sum(1)
        words = torch.cat([sums, words[:: n // _SAMPLE | 1], words[_ROWS * length :]])
    return _weighted(words if rest is None else torch.cat([words, rest]))


def _weighted(words: torch.Tensor) -> torch.Tensor:
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
    for (dtype, shape, strides), (other_dtype, other_shape, other_strides) in zip(before[1:], now[1:], strict=True):
        if shape != other_shape:
            return f"shape: {shape} in forward, {other_shape} in backward"
        if dtype != other_dtype:
            return f"dtype: {dtype} in forward, {other_dtype} in backward"
        if strides != other_strides:
            return f"strides: {strides} in forward, {other_strides} in backward"
    return "layout"
