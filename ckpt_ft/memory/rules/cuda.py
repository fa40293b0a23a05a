"""Rules for tracing fake CPU tensors as if they were on a GPU: what CUDA does differently from the CPU.

Three tables, each row with its source (paths are PyTorch's):
- composite: ops that choose their kernel, and so what autograd saves, by device; replaced above autograd.
- rules: ops whose results differ on CUDA; replaced below autograd.
- extra_allocations: memory that an op allocates besides its results: temporary scratch, and persistent workspaces.

Autocast's lists are in autocast.py, attention kernels in sdpa.py.

cuDNN's choice of algorithm is not documented. Scratch of convolutions follows the two algorithms that need memory,
each used where it is the fast one; nothing of it is fitted to a model. Depthwise, grouped and channels-last
convolutions are assumed to need none.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ckpt_ft.compat.modules import CAPTURABLE, clipped_types, foreach_types
from ckpt_ft.compat.patches import patched
from ckpt_ft.compat.tensors import FakeTensor, kernels_found
from ckpt_ft.memory.gpus import GPU
from ckpt_ft.memory.record.dispatch import After, Rule
from ckpt_ft.memory.record.recorder import Recorder
from ckpt_ft.memory.rules import autocast, sdpa

from .fake_kernels import as_dtype

aten = torch.ops.aten
_ARGUMENTS = {
    aten.convolution.default: (0, 1, 3, 8),
    aten.convolution_backward.default: (1, 2, 4, 9),
}  # input, weight, stride, groups


def winograd(batch: int, channels_in: int, channels_out: int, size: torch.Size) -> int:
    """Bytes of non-fused Winograd F(4x4, 3x3): 36 values for each 16 of input and output, and each 9 of weight.

    [Lavin and Gray 2016, arXiv:1509.09308]
    """
    tiles = batch * prod(-(-n // 4) for n in size)
    return 36 * 4 * (channels_in * channels_out + tiles * (channels_in + channels_out))


def convolution_workspace(arch: int) -> After:
    """Records the scratch of a convolution, or of its backward, whose two halves run one after the other."""

    def record(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        input, weight, stride, groups = (args[at] for at in _ARGUMENTS[func])
        output = out if isinstance(out, Tensor) else args[0]
        if weight.dim() != 4 or groups != 1 or not input.is_contiguous():
            return
        tf32 = arch >= 80 and torch.backends.cudnn.allow_tf32
        if (arch >= 70 and input.dtype == torch.float16) or (arch >= 80 and input.dtype == torch.bfloat16) or tf32:
            # Tensor cores need channels-last operands, so contiguous ones are copied.
            # [docs.nvidia.com/deeplearning/performance/dl-performance-convolutional: tensor layouts]
            recorder.scratch(input.nbytes + weight.nbytes + output.nbytes, str(func))
        elif weight.shape[2:] == (3, 3) and list(stride) == [1, 1]:
            recorder.scratch(winograd(input.size(0), weight.size(1), weight.size(0), output.shape[2:]), str(func))

    return record


# -- composite: above autograd ----------------------------------------------------------------------------------------


def dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """CUDA has a fused kernel that saves a bool mask; the CPU saves a mask of input's dtype. [native/Dropout.cpp]"""
    if not train or p == 0 or not input.numel():
        return input
    return aten.native_dropout(input, p, train)[0] if p < 1 else input * torch.zeros_like(input)


def softmax(op: Any, input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """One kernel converts float16 to float32, without a float32 copy of the input. [native/SoftMax.cpp, softmax()]"""
    if input.dtype == torch.float16 and dtype == torch.float32:
        return op(input, dim, True)
    return op(input if dtype is None else input.to(dtype), dim, False)


def to(
    input: Tensor, dtype: torch.dtype | None = None, layout: torch.layout | None = None,
    device: torch.device | None = None, pin_memory: bool | None = None, non_blocking: bool = False,
    copy: bool = False, memory_format: torch.memory_format | None = None,
) -> Tensor:  # fmt: skip
    """Copies only if dtype or memory format changes: the device is the same. [native/TensorConversions.cpp]"""
    same = dtype in (None, input.dtype) and memory_format in (None, torch.preserve_format)
    return input if same and not copy else aten._to_copy(input, dtype=dtype, memory_format=memory_format)


def composite(arch: int) -> dict[str, Callable[..., Any]]:
    """Kernels for the AutogradCPU key."""
    return {
        "dropout": dropout,
        "to.dtype_layout": to,
        "softmax.int": partial(softmax, aten._softmax),
        "log_softmax.int": partial(softmax, aten._log_softmax),
        "scaled_dot_product_attention": partial(sdpa.attention, arch=arch),
    }


# -- rules: below autograd --------------------------------------------------------------------------------------------


def float32_statistics(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """LayerNorm's and cuDNN's BatchNorm keep float32 statistics (unlike GroupNorm), and no reserve.

    [native/cuda/layer_norm_kernel.cu; native/cudnn/BatchNorm.cpp, for contiguous tensors]
    """
    out, mean, rstd = func(*args, **kwargs)
    return out, as_dtype(mean, torch.float32), as_dtype(rstd, torch.float32)


def fused_rms_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """CUDA has one kernel, which saves rstd in float32; the CPU runs five ops. [native/cuda/layer_norm_kernel.cu]"""
    input, shape = args[:2]
    statistics = list(input.shape[: input.dim() - len(shape)]) + [1] * len(shape)
    return torch.empty_like(input), torch.empty(statistics, dtype=torch.float32, device=input.device)


RESERVE = (
    "an LSTM is taken to keep four gates and its cell's state for backward (cuDNN's reserve is not published); "
    "its seconds are those of its memory traffic"
)


def lstm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """cuDNN keeps a reserve for backward; its layout is not published, and RESERVE states the assumption."""
    output, *states, workspace = func(*args, **kwargs)
    return output, *states, workspace.new_empty(5 * output.nbytes)


RULES: dict[Any, Rule] = {
    aten.mkldnn_rnn_layer.default: lstm,
    aten.native_layer_norm.default: float32_statistics,
    aten.native_batch_norm.default: float32_statistics,
    aten._fused_rms_norm.default: fused_rms_norm,
}


def seeds(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Without dropout, its seed and offset are CPU tensors. [native/transformers/cuda/attention.cu]"""
    dropout = args[5] if len(args) > 5 else 0.0
    return () if dropout else (2, 3)


# For each op, the indices of results on the host.
ON_HOST: dict[Any, Callable[[tuple[Any, ...]], tuple[int, ...]]] = {
    aten._scaled_dot_product_efficient_attention.default: seeds
}


# -- extra allocations: scratch and workspaces -----------------------------------------------------------------------


CUBLASLT_WORKSPACE = 2**20  # parseCUDABlasLtWorkspaceSize in cuda/CublasHandlePool.cpp


def cublas_workspace(arch: int) -> int:
    """Bytes of the workspace of each thread's cuBLAS handle, 32 MiB on Hopper. [cuda/CublasHandlePool.cpp]"""
    return 32 * 2**20 if arch == 90 else 2 * 4096 * 2**10 + 8 * 16 * 2**10


def matmul(arch: int) -> After:
    """The first matmul of each thread allocates a persistent cuBLAS workspace; autograd runs in its own thread.

    A matmul with a bias uses cuBLASLt, which has its own workspace of 1 MiB.
    [cuda/CublasHandlePool.cpp; native/cuda/Blas.cpp, isInputCompliesAddmmCudaLt]
    """
    given: set[tuple[bool, bool]] = set()

    def workspace(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        in_autograd = recorder.context.phase == "backward"
        fused_bias = func is aten.addmm.default and args[0].dim() == 1 and min(args[2].shape) > 1 and not kwargs
        for uses_lt, nbytes in ((False, cublas_workspace(arch)), (True, CUBLASLT_WORKSPACE)):
            if (in_autograd, uses_lt) not in given and (fused_bias or not uses_lt):
                given.add((in_autograd, uses_lt))
                recorder.allocate(nbytes, "workspace", str(func))

    return workspace


def softmax_backward(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """The kernel allocates grad * output, of the gradient's size and dtype. [native/cuda/SoftMax.cu]"""
    recorder.scratch(args[0].nbytes, str(func))


def efficient_backward(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """Scratch: delta per row, and a float32 accumulator of the query's gradient if that is in half precision.

    In float32, delta is not computed by the kernel but as (grad_out * out).sum(-1).
    [native/transformers/cuda/attention_backward.cu; mem_eff_attention/kernel_backward.h]
    """
    grad, query = args[:2]
    batch, heads, length, head = query.shape
    delta = batch * heads * length
    padded = _up(length, 64) * _up(head, 64 if head <= 64 else 128)
    more = grad.numel() if query.dtype == torch.float32 else batch * heads * padded
    recorder.scratch(4 * (delta + more), str(func))


def flash_backward(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """Scratch: float32 query gradient and row sums, in multiples of 128 rows; with GQA also key and value gradients.

    [native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd]
    """
    query, key = args[1], args[2]
    batch, heads, length, head = query.shape
    rows, width = batch * heads * _up(length, 128), _up(head, 32)
    expanded = 2 * batch * heads * key.size(2) * head * query.itemsize if key.size(1) != heads else 0
    recorder.scratch(rows * 4 + rows * width * 4 + expanded, str(func))


def fft(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
    """cuFFT's work area: one copy of the complex data, the minimum in its guide; measured in 2 and 3 dimensions.

    Complex-to-real also transforms a copy, because cuFFT may write into its input.
    [docs.nvidia.com/cuda/cufft: cufftEstimate; JuliaGPU/CUDA.jl issue 894; native/cuda/SpectralOps.cpp]
    """
    recorder.scratch(out.nbytes if out.is_complex() else 2 * args[0].nbytes, str(func))


def sparse_added(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """Adding sparse values of a wider dtype converts the dense tensor, and the sum is another copy.

    [native/sparse/cuda/SparseCUDATensorMath.cu, add_out_dense_sparse_cuda]
    """
    dense, other = args[:2]
    if isinstance(other, Tensor) and other.is_sparse and torch.result_type(dense, other) != out.dtype:
        recorder.scratch(2 * dense.numel() * torch.result_type(dense, other).itemsize, str(func))


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def extra_allocations(arch: int) -> dict[Any, After]:
    """For each op, the function to call after its results are recorded."""
    workspace = matmul(arch)
    matmuls = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.addbmm, aten.mv, aten.addmv, aten.dot)
    convolution = convolution_workspace(arch)
    return {
        **{getattr(op, overload): workspace for op in matmuls for overload in op.overloads()},
        aten.mkldnn_rnn_layer.default: lambda recorder, *_: recorder.note(RESERVE),
        aten._softmax_backward_data.default: softmax_backward,
        aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
        aten._scaled_dot_product_flash_attention_backward.default: flash_backward,
        **{op.default: fft for op in (aten._fft_c2c, aten._fft_r2c, aten._fft_c2r)},
        aten.add.Tensor: sparse_added,
        aten.add_.Tensor: sparse_added,
        aten.convolution.default: convolution,
        aten.convolution_backward.default: convolution,
    }


def same_kernels(gpu: GPU) -> tuple[bool | int, ...]:
    """A key that two cards share if every rule answers alike for both, so that a step has one trace on either."""
    arch = gpu.capability
    preferred = arch if arch in sdpa.PREFERS_CUDNN else 0
    return arch >= 70, arch >= 75, arch >= 80, arch in sdpa.SMALL_SHARED_MEMORY, preferred


# -- while a step is traced -------------------------------------------------------------------------------------------


def _find_kernels_anew(ops: Iterable[str]) -> None:
    """Make the python dispatcher of torch.compile forget which kernels of `ops` it has found.

    Otherwise a model that is compiled after a trace would look for a kernel that is gone, and lose its gradients.
    """
    for op in ops:
        kernels_found(autocast.overload_of(op)).clear()


@contextmanager
def behave_like(arch: int, compiled: bool = False) -> Iterator[None]:
    """Makes CPU tensors behave like CUDA's wherever PyTorch asks for the device above dispatch."""
    library = torch.library.Library("aten", "IMPL")
    held = [library]  # dropping it unregisters its kernels
    del library
    replaced = [*composite(arch), "_fused_rms_norm", *(op for op, _ in autocast.kernels())]
    with ExitStack() as stack:
        stack.callback(_find_kernels_anew, replaced)
        stack.callback(held.clear)
        for op, kernel in composite(arch).items():
            held[0].impl(op, kernel, "AutogradCPU")
        # A backend kernel makes autograd treat it as one op, as on CUDA; below, RULES answers for it.
        held[0].impl("_fused_rms_norm", torch.ops.aten._fused_rms_norm, "CPU")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # overriding kernels is intended
            for op, kernel in autocast.kernels():
                held[0].impl(op, kernel, autocast.KEY, allow_override=True)
        _find_kernels_anew(replaced)
        stack.enter_context(autocast.cuda_means_cpu(compiled))
        # Saved tensors go to pinned host memory, which a trace excludes; unpinned copies are timed like pinned ones.
        stack.enter_context(patched(save_on_cpu=_init))
        # Optimizers default to foreach on CUDA only. [torch/optim/optimizer.py, _default_to_fused_or_foreach]
        stack.enter_context(patched(foreach_devices=lambda: ["cpu", "cuda"]))
        if "transformers.integrations.moe" in sys.modules and not compiled:
            stack.enter_context(patched(takes_grouped_mm=lambda *tensors: arch >= 80))
        for module in {sys.modules[kind.__module__] for kind in vars(torch.optim).values() if isinstance(kind, type)}:
            if hasattr(module, CAPTURABLE):
                stack.enter_context(patch.object(module, CAPTURABLE, lambda *args, **kwargs: ["cpu", "cuda"]))
        yield


@contextmanager
def fakes_are_tensors() -> Iterator[None]:
    """Lets optimizers use foreach kernels on fake tensors."""
    with ExitStack() as stack:
        for types in (foreach_types, clipped_types):
            types.append(FakeTensor)
            stack.callback(types.remove, FakeTensor)
        yield


def _to_host(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.size(), dtype=tensor.dtype, layout=tensor.layout, pin_memory=True).copy_(tensor)
    torch.cuda.synchronize()  # the copy is not asynchronous
    return host


def _to_device(host: Tensor) -> Tensor:
    return torch.empty_like(host).copy_(host)


def _init(self: Any, pin_memory: bool = False, device_type: str = "cuda") -> None:
    saved_tensors_hooks.__init__(self, _to_host, _to_device)
