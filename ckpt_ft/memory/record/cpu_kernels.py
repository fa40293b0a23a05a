"""Finds the memory that CPU kernels allocate and free inside, where dispatch does not see it.

- Blocked layouts and scratchpads: oneDNN copies its operands into blocked layouts, the result included, and works in a
  scratchpad besides. How much depends on the algorithm that it chooses for this CPU's instructions and threads
  [aten/src/ATen/native/mkldnn/Conv.cpp; oneDNN, "Memory format propagation", "Primitive attributes: scratchpad"].
  Attention allocates a block of scores for each thread [native/cpu/FlashAttentionKernel.cpp]. Matmuls in half
  precision are converted if the CPU has no instructions for them. No formula is right on two machines, so the kernels
  are measured by PyTorch's own record of allocations on this thread: around each call in a measured step, and in a
  trace of fake tensors by one call on real zeros of the same shapes.
- Copies in another dtype: an elementwise op on tensors of several dtypes (LoRA in float32 added to a bfloat16 base)
  computes in a dtype that holds them all. A GPU's kernel converts each element as it reads it. On the CPU, operands of
  other dtypes are copied first, and so is a result that is written in place
  [aten/src/ATen/TensorIterator.cpp, compute_types]. Sums convert what they add up [native/ReduceOpsUtils.h]; a mean of
  half precision goes through float32 [native/ReduceOps.cpp].
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler_legacy import profile

from ckpt_ft.compat.autograd import stop_profiler
from ckpt_ft.compat.tensors import no_modes, tree_map_only

from .dispatch import After, Rule, call_key
from .recorder import Recorder

aten = torch.ops.aten

MATMULS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)  # only in half precision
KERNELS = (
    *MATMULS,
    aten.convolution.default,
    aten.convolution_backward.default,
    aten.mkldnn_rnn_layer.default,
    aten.mkldnn_rnn_layer_backward.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
_LARGEST_MATMUL = 2**34  # multiplications: about a second
_TRAINS = 15  # index of mkldnn_rnn_layer's argument `train`
_known: dict[Any, tuple[int, int]] = {}  # results of `_on_zeros`, by call


# -- copies in another dtype ------------------------------------------------------------------------------------------

_COMPARISONS = tuple(getattr(aten, name).Tensor for name in ("eq", "ne", "lt", "le", "gt", "ge"))
_IN_PLACE = tuple(getattr(aten, name).Tensor for name in ("add_", "sub_", "mul_", "div_"))
_BY_OPERANDS = (*_COMPARISONS, *_IN_PLACE)  # the result's dtype is not the dtype of the computation
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
    """Most bytes that the kernel of one of CASTS's ops has allocated at once besides its result `out`."""
    if func in _MEANS and out.itemsize == 2:
        return 4 * (args[0].numel() + out.numel())
    if func in _SUMS:
        return 0 if args[0].dtype is out.dtype else args[0].numel() * out.itemsize
    operands = [x for x in args[func is aten.where.self :] if isinstance(x, Tensor)]  # a condition is not converted
    common = out.dtype
    if func in _BY_OPERANDS:
        common = torch.result_type(*operands) if len(operands) == 2 else operands[0].dtype
    copied = sum(x.numel() for x in operands if x.dtype is not common and x.dim())
    if func in _IN_PLACE and out.dtype is not common:
        copied += out.numel()
    return copied * common.itemsize


def _record_casts(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    if out.is_cpu and (nbytes := converted(func, args, out)):
        recorder.scratch(nbytes, str(func))


CASTS: dict[Any, After] = dict.fromkeys((*_ELEMENTWISE, *_SUMS), _record_casts)


# -- scratch of real kernels ------------------------------------------------------------------------------------------


def takes_scratch(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call of one of KERNELS may allocate scratch."""
    return func not in MATMULS or args[-1].dtype in (torch.bfloat16, torch.float16)


def observed(call: Callable[[], Any]) -> tuple[Any, int]:
    """The result of `call`, and the most bytes it had allocated at once besides what it left.

    The bytes are 0 inside a profiler of the user's, since profilers cannot be nested.
    """
    profiler = profile(profile_memory=True)
    try:
        profiler.__enter__()
    except RuntimeError:
        return call(), 0
    try:
        out = call()
    finally:
        records = stop_profiler()
    changes = [event.cpu_memory_usage() for thread in records for event in thread if event.kind() == "memory_alloc"]
    held = list(accumulate(changes, initial=0))
    return out, max(held) - held[-1]


def real_kernels() -> tuple[dict[Any, Rule], dict[Any, After]]:
    """Rules for real tensors: each of KERNELS runs under the profiler; then its scratch is recorded."""
    taken = 0

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal taken
        if not takes_scratch(func, args):
            taken = 0
            return func(*args, **kwargs)
        out, taken = observed(lambda: func(*args, **kwargs))
        return out

    def record(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if taken:
            recorder.scratch(taken, str(func))

    return dict.fromkeys(KERNELS, run), {**CASTS, **dict.fromkeys(KERNELS, record)}


# -- scratch of fake tensors' kernels ---------------------------------------------------------------------------------


def _scratch(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """Record the scratch of the kernel for arguments of these shapes, strides and dtypes."""
    if not takes_scratch(func, args):
        return
    if func in MATMULS and args[-2].numel() * args[-1].shape[-1] > _LARGEST_MATMUL:  # the operands are the last two
        return
    nbytes, _ = _on_zeros(func, args, kwargs)
    if nbytes:
        recorder.scratch(nbytes, str(func))


def _lstm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The fake kernel returns an empty workspace for backward. [torch/_meta_registrations.py, mkldnn_rnn_layer]"""
    *results, workspace = func(*args, **kwargs)
    return (*results, workspace.new_empty(_on_zeros(func, args, kwargs)[1] if args[_TRAINS] else 0))


def _on_zeros(func: Any, args: Any, kwargs: Any) -> tuple[int, int]:
    """The bytes of the scratch of a call on real zeros, and of the last of its results."""
    key = func, call_key(args, kwargs), torch.get_num_threads(), torch.backends.mkldnn.enabled
    if key not in _known:
        with no_modes():
            real, named = tree_map_only(Tensor, _zeros, (args, kwargs))
            out, taken = observed(lambda: func(*real, **named))
            _known[key] = taken, getattr(out[-1], "nbytes", 0)
    return _known[key]


def _zeros(fake: Tensor) -> Tensor:
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype).zero_()


FAKE_RULES: dict[Any, Rule] = {aten.mkldnn_rnn_layer.default: _lstm}
FAKE_AFTER: dict[Any, After] = {**CASTS, **dict.fromkeys(KERNELS, _scratch)}
