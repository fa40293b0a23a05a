"""torch.autocast("cuda") on fake CPU tensors.

CPU autocast casts the traced tensors, and its lists of ops differ from CUDA's: CUDA computes softmax, norms, exp, pow
and sums in float32, which CPU autocast leaves alone. While a step is traced, kernels for the AutocastCPU key follow
CUDA's lists (aten/src/ATen/autocast_mode.h, AT_FORALL_LOWER_PRECISION_FP, AT_FORALL_FP32, ...). Ops that both treat
alike keep their C++ kernels, and with them the cache of cast weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch

from ckpt_ft.compat.patches import patched
from ckpt_ft.compat.tensors import DispatchKey, excluded, schema_of, tree_map

KEY = "AutocastCPU"

# CUDA runs them in the lower precision; CPU autocast does not know them.
LOWER = (
    "_convolution", "convolution", "addmv", "addr", "mv", "einsum", "chain_matmul", "linalg_multi_dot", "lstm_cell",
    "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "_scaled_dot_product_flash_attention", "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell",
)  # fmt: skip
# CUDA runs them in float32; CPU autocast does not know them.
FLOAT32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
    "group_norm", "rms_norm", "cosine_similarity", "nuclear_norm", "nuclear_norm.dim", "pdist", "renorm", "logsumexp",
    "dist", "linalg_matrix_norm", "linalg_vector_norm", "frobenius_norm.dim", "upsample_nearest1d",
    "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa",
    "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa",
)  # fmt: skip
# On CUDA their output is float32 unless a dtype is given: the kernel converts while it reads and stores no cast.
FLOAT32_OUTPUT = ("softmax.int", "log_softmax.int", "cumprod", "cumsum", "sum", "sum.dim_IntList")
# CUDA runs them in the widest dtype among the inputs.
WIDEST = ("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "index_put", "scatter_add", "tensordot")
# CPU autocast casts these; CUDA's leaves them alone.
UNTOUCHED = (
    "cat", "stack", "avg_pool3d", "adaptive_avg_pool3d", "adaptive_max_pool3d", "max_pool3d", "replication_pad1d",
    "replication_pad2d", "replication_pad3d", "reflection_pad1d", "reflection_pad2d", "cross_entropy_loss", "polar",
    "view_as_complex", "index_copy", "_native_multi_head_attention", "_addmm_activation",
)  # fmt: skip


def overload_of(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _is_castable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


Choose = Callable[[Iterable[Any]], torch.dtype | None]  # arguments -> the dtype to cast them to, None for none


def _widest(given: Iterable[Any]) -> torch.dtype:
    wide = any(_is_castable(value) and value.dtype == torch.float32 for value in given)
    return torch.float32 if wide else torch.get_autocast_dtype("cpu")


def _casting(choose: Choose, op: Any) -> Callable[..., Any]:
    """Returns a kernel that runs `op` on arguments cast to the dtype `choose(arguments)`."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = choose((*args, *kwargs.values()))
        if dtype is not None:
            args, kwargs = tree_map(lambda value: value.to(dtype) if _is_castable(value) else value, (args, kwargs))
        with excluded(DispatchKey.AutocastCPU, True):
            return op(*args, **kwargs)

    return kernel


def _with_float32_output(op: Any) -> Callable[..., Any]:
    arguments = [argument.name for argument in schema_of(op).arguments]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(arguments, args, strict=False)) | kwargs
        if given.get("dtype") is None and _is_castable(args[0]):
            given["dtype"] = torch.float32
        with excluded(DispatchKey.AutocastCPU, True):
            return op(**given)

    return kernel


_TREATMENTS = (
    (LOWER, partial(_casting, lambda given: torch.get_autocast_dtype("cpu"))),
    (FLOAT32, partial(_casting, lambda given: torch.float32)),
    (FLOAT32_OUTPUT, _with_float32_output),
    (WIDEST, partial(_casting, _widest)),
    (UNTOUCHED, partial(_casting, lambda given: None)),
)


def kernels() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields (op, kernel for the AutocastCPU key) for every op that CUDA's autocast treats differently."""
    for names, treatment in _TREATMENTS:
        for name in names:
            yield name, treatment(overload_of(name))


@contextmanager
def cuda_means_cpu(compiled: bool = False) -> Iterator[None]:
    """Makes torch.autocast("cuda"), with its default float16, apply to CPU tensors, and report its state so.

    compiled: the functions that report it stay torch's own, which torch.compile evaluates without breaking its graph.
    """
    autocast = torch.amp.autocast_mode.autocast
    init, enabled, dtype_of = autocast.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype

    @wraps(init)  # torch.compile binds arguments by its signature
    def as_cuda(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or dtype_of("cuda")
        init(self, device_type, dtype, *args, **kwargs)

    def is_enabled(device_type: str = "cuda") -> bool:
        return enabled("cpu" if device_type == "cuda" else device_type)

    def get_dtype(device_type: str) -> torch.dtype:
        return dtype_of("cpu" if device_type == "cuda" and enabled("cpu") else device_type)

    own: dict[str, Any] = {} if compiled else {"autocast_is_on": is_enabled, "autocast_dtype": get_dtype}
    # GradScaler("cuda") disables itself if CUDA is not available. [torch/amp/grad_scaler.py]
    with patched(make_autocast=as_cuda, no_scaler=lambda: False, **own):
        yield
