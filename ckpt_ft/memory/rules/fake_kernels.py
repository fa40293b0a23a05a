"""Corrects PyTorch's fake kernels that are slow or differ from the real ones; applies to any device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ckpt_ft.compat.tensors import no_dispatch, suggest_memory_format
from ckpt_ft.memory.cost.op_work import PARTS, plain
from ckpt_ft.memory.record.dispatch import Rule

aten = torch.ops.aten
_CPU = torch.device("cpu")


def as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else torch.empty_like(tensor, dtype=dtype)


def mixed_norm(at_weight: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Mean and rstd have the weight's dtype if that is wider. [ATen/native/cpu/mixed_data_type.h]"""
    out, mean, rstd = func(*args, **kwargs)
    dtype = args[0].dtype if args[at_weight] is None else args[at_weight].dtype
    return out, as_dtype(mean, dtype), as_dtype(rstd, dtype)


def batch_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Output and gradient are contiguous or channels last for any input strides. [native/Normalization.cpp]"""
    out, mean, rstd = mixed_norm(1, func, args, kwargs)
    return _laid_out(out), mean, rstd


def gradient(
    change: Callable[[Tensor, tuple[Any, ...]], Tensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`change` of the input's gradient and the arguments takes the place of that gradient."""
    grad, *others = func(*args, **kwargs)
    return (grad if grad is None else change(grad, args), *others)


def _laid_out(tensor: Tensor, asked: torch.memory_format | None = None) -> Tensor:
    """Returns `tensor`, or a new one like it in a memory format; by default the one closest to its strides."""
    asked = asked or suggest_memory_format(tensor)
    return tensor if tensor.is_contiguous(memory_format=asked) else torch.empty_like(tensor, memory_format=asked)


def grouped_mm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The fake kernel supports only bfloat16, the real ones other dtypes too. [ATen/native/GroupedMMUtils.h]"""
    a, b = args[:2]
    shape = [*a.shape[:-1], b.size(-1)]
    if b.dim() == 2:
        shape = shape[1:] if a.dim() == 3 else [args[2].numel(), *shape]
    return torch.empty(shape, dtype=kwargs.get("out_dtype") or a.dtype, device=_CPU)


def added_product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """With an `out_dtype`, the sum has its product's shape; decompositions fail (of addmm until torch 2.12)."""
    _, a, b, dtype = args
    return kwargs.get("out", (torch.mm if a.dim() == 2 else torch.bmm)(a, b, out_dtype=dtype))


def sparse_like(tensor: Tensor, *parts: Tensor) -> Tensor:
    """A fake sparse tensor like another, of these parts; PyTorch's fakes of compressed rows or columns lose theirs."""
    *indices, values = parts
    if tensor.layout is torch.sparse_coo:
        with no_dispatch():
            dims, coalesced = (tensor.sparse_dim(), tensor.dense_dim()), tensor.is_coalesced()
        kind = {"dtype": values.dtype, "layout": tensor.layout, "device": _CPU}
        made = aten._sparse_coo_tensor_with_dims_and_tensors(*dims, tensor.shape, *indices, values, **kind)
        return aten._coalesced_(made, coalesced)
    made = aten._to_copy(tensor, dtype=values.dtype)
    vars(made)[PARTS] = parts
    return made


def of_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Of a sparse tensor, the fake kernel returns one without elements. [ATen/native/sparse/SparseTensor.cpp]"""
    if args[0].layout is torch.strided:
        return func(*args, **kwargs)
    *indices, values = plain(args[0])
    return sparse_like(args[0], *map(torch.clone, indices), func(values, *args[1:], **kwargs))


def transposed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A sparse matrix of coordinates is copied. [ATen/native/TensorShape.cpp, transpose]"""
    out: Tensor = func(*args, **kwargs)
    return sparse_like(out, *map(torch.clone, plain(args[0]))) if out.layout is torch.sparse_coo else out


def sparse_mask(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The fake kernel loses the number of elements of the mask. [ATen/native/sparse/SparseTensor.cpp]"""
    *indices, values = plain(args[1])
    return sparse_like(args[1], *map(torch.clone, indices), torch.empty_like(values, dtype=args[0].dtype))


def coalesced(tensor: Tensor) -> Tensor:
    """The fake kernel returns no elements, the real one has room for all. [ATen/native/sparse/SparseTensor.cpp]"""
    made = tensor if aten._nnz(tensor) < 2 else sparse_like(tensor, *map(torch.empty_like, plain(tensor)))
    return aten._coalesced_(made, True)


def sparse_addmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """PyTorch has no fake kernel for it. [ATen/native/sparse/SparseTensorMath.cpp]"""
    _, sparse, dense = args
    return dense.new_empty(sparse.shape[0], dense.shape[1])


def reduced_loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A reduced loss keeps the storage of all elements, because it is resized to a scalar. [ATen/native/Loss.cpp]"""
    out: Tensor = func(*args, **kwargs)
    elements = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()
    if out.dim() or not elements:
        return out
    return torch.empty(elements, dtype=out.dtype, device=_CPU).as_strided((), ())


RULES: dict[Any, Rule] = {
    aten.native_layer_norm.default: partial(mixed_norm, 2),
    aten.native_group_norm.default: partial(mixed_norm, 1),
    aten.native_batch_norm.default: batch_norm,
    aten.native_batch_norm_backward.default: partial(gradient, lambda grad, args: _laid_out(grad)),  # as `batch_norm`
    # contiguous [native/layer_norm.cpp; native/cuda/layer_norm_kernel.cu]
    aten.native_layer_norm_backward.default: partial(
        gradient, lambda grad, args: _laid_out(grad, torch.contiguous_format)
    ),
    # in the input's dtype, whatever the weight's [aten/src/ATen/native/group_norm.cpp]
    aten.native_group_norm_backward.default: partial(gradient, lambda grad, args: as_dtype(grad, args[1].dtype)),
    aten._grouped_mm.default: grouped_mm,
    **{getattr(op, kind): added_product for op in (aten.addmm, aten.baddbmm) for kind in ("dtype", "dtype_out")},
    aten.sparse_mask.default: sparse_mask,
    **dict.fromkeys((aten.clone.default, aten.neg.default, aten._to_copy.default), of_values),
    **dict.fromkeys((aten.t.default, aten.transpose.int), transposed),
    aten._sparse_addmm.default: sparse_addmm,
    aten.mse_loss.default: reduced_loss,
    aten.smooth_l1_loss.default: reduced_loss,
    aten.binary_cross_entropy.default: reduced_loss,
    aten.soft_margin_loss.default: reduced_loss,
    torch.ops._c10d_functional.wait_tensor.default: lambda func, args, kwargs: args[0],  # its fake kernel copies
}
