"""Copies in another dtype that CPU kernels make inside, where dispatch does not see them.

An elementwise op on tensors of several dtypes (what LoRA in float32 adds to a bfloat16 base) computes in one that
holds them all. A GPU's kernel converts each element as it reads it; on the CPU the operands of other dtypes are copied
first, and so is a result that is written in place [aten/src/ATen/TensorIterator.cpp, compute_types]. Sums convert what
they add up [native/ReduceOpsUtils.h], a mean of half precision by way of float32 [native/ReduceOps.cpp].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .opinfo import After

aten = torch.ops.aten

_COMPARISONS = tuple(getattr(aten, name).Tensor for name in ("eq", "ne", "lt", "le", "gt", "ge"))
_IN_PLACE = tuple(getattr(aten, name).Tensor for name in ("add_", "sub_", "mul_", "div_"))
_BY_OPERANDS = (*_COMPARISONS, *_IN_PLACE)  # whose result does not say what they compute in
_ELEMENTWISE = (
    *(getattr(aten, name).Tensor for name in ("add", "sub", "rsub", "mul", "div", "bitwise_and", "bitwise_or")),
    aten.pow.Tensor_Tensor,
    aten.pow.Tensor_Scalar,
    aten.maximum.default,
    aten.minimum.default,
    aten.where.self,
    aten.addcmul.default,
    aten.addcdiv.default,
    *_BY_OPERANDS,
)
_MEANS = (aten.mean.default, aten.mean.dim)
_SUMS = (*_MEANS, aten.sum.default, aten.sum.dim_IntList, aten.cumsum.default, aten.linalg_vector_norm.default)


def converted(func: Any, args: tuple[Any, ...], out: Tensor) -> int:
    """Bytes that the kernel of one of AFTER's ops has at most beside its result `out`."""
    if func in _SUMS:
        return _summed(func, args[0], out)
    operands = [x for x in args[func is aten.where.self :] if isinstance(x, Tensor)]  # a condition is read as it is
    common = out.dtype
    if func in _BY_OPERANDS:
        common = torch.result_type(*operands) if len(operands) == 2 else operands[0].dtype
    copied = sum(x.numel() for x in operands if x.dtype is not common and x.dim())
    if func in _IN_PLACE and out.dtype is not common:
        copied += out.numel()
    return copied * common.itemsize


def _summed(func: Any, given: Tensor, out: Tensor) -> int:
    if func in _MEANS and out.itemsize == 2:
        return 4 * (given.numel() + out.numel())
    return 0 if given.dtype is out.dtype else given.numel() * out.itemsize


def _record(tracker: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    nbytes = converted(func, args, out) if out.is_cpu else 0
    if nbytes:
        tracker.scratch(nbytes, str(func))


AFTER: dict[Any, After] = dict.fromkeys((*_ELEMENTWISE, *_SUMS), _record)
