"""Chooses the kernel of F.scaled_dot_product_attention as a GPU would, and calls the op that saves the same tensors.

Follows aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (which kernels can run) and .../attention.cpp (input
preparation). Honours torch.nn.attention.sdpa_kernel and torch.backends.cuda.enable_*_sdp, which write its flags.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ckpt_ft.errors import UserError

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
# Compute capabilities; `same_kernels` in cuda.py knows every place where one is compared.
SMALL_SHARED_MEMORY = (86, 89, 120, 121)
PREFERS_CUDNN = (90, 100)


class Call:
    """One call of scaled_dot_product_attention: query (B, H, L, E), key and value (B, H or fewer, S, E)."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, gqa: bool
    ) -> None:
        self.query, self.key, self.value, self.mask = query, key, value, mask
        self.dropout, self.causal = dropout, causal
        self.trains = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        self.head, self.value_head = query.size(-1), value.size(-1)
        self.grouped = gqa and key.dim() == 4 and key.size(-3) != query.size(-3)
        same_heads = query.dim() == 4 and query.size(-3) == key.size(-3) == value.size(-3)
        last_dims_dense = all(t.stride(-1) == 1 for t in (query, key, value))
        self.regular = query.dim() == 4 and last_dims_dense and (same_heads or self.grouped) and 0 not in query.shape

    def fits_flash(self, arch: int) -> bool:
        """check_flash_attention_hardware_support and related checks: sm80+, half, no mask, head size up to 256."""
        small_smem = arch in SMALL_SHARED_MEMORY
        heads = self.head == self.value_head and self.head <= 256
        if small_smem and self.trains and self.head > 192:
            heads = heads and self.head > 224 and not self.dropout
        square = not self.causal or self.query.size(-2) == self.key.size(-2)
        return self.regular and arch >= 80 and self.query.dtype in HALF and self.mask is None and heads and square

    def fits_cudnn(self, arch: int) -> bool:
        """check_cudnn_*: sm80+, half precision, head size a multiple of 8 up to 128 (256 on Hopper, B200)."""
        limit = 256 if arch in PREFERS_CUDNN else 128
        heads = max(self.head, self.value_head) <= limit and self.head % 8 == 0 and self.value_head % 8 == 0
        long = self.query.size(-2) > 1 and self.key.size(-2) > 1
        return self.regular and arch >= 80 and self.query.dtype in HALF and heads and long

    def fits_efficient(self, arch: int) -> bool:
        """check_mem_efficient_*: bfloat16 from sm80, no grouped heads, head size aligned for the matrix units."""
        dtypes = (*HALF, torch.float32) if arch >= 80 else (torch.float16, torch.float32)
        dtype = self.query.dtype
        # minimum_gemm_alignment
        alignment = 8 if dtype in HALF and arch >= 75 else 4 if arch >= 80 or dtype in HALF else 1
        aligned = self.head % alignment == 0 and self.value_head % alignment == 0
        return self.regular and not self.grouped and dtype in dtypes and aligned


def choose(call: Call, arch: int) -> str:
    """ "cudnn", "flash", "efficient" or "math" on compute capability `arch` (75 for 7.5). [select_sdp_backend]

    Raises:
        UserError: None that `sdpa_kernel` allows takes this call, as PyTorch raises on the card.
    """
    allowed = torch.backends.cuda
    flash = allowed.flash_sdp_enabled() and call.fits_flash(arch)
    cudnn = allowed.cudnn_sdp_enabled() and call.fits_cudnn(arch)
    if cudnn and arch in PREFERS_CUDNN:  # check_prefer_cudnn_attention, cuDNN 9.15+
        return "cudnn"
    if flash:
        return "flash"
    if allowed.mem_efficient_sdp_enabled() and call.fits_efficient(arch):
        return "efficient"
    if allowed.math_sdp_enabled():
        return "math"
    if cudnn:
        return "cudnn"
    dtype = str(call.query.dtype).removeprefix("torch.")
    raise UserError(
        f"no attention kernel that may run takes heads of {call.head} in {dtype} on compute capability {arch / 10}: "
        "flash attention takes float16 and bfloat16, from 8.0 on (A100, L4); sdpa chooses among all kernels",
        attn_implementation="sdpa",
    )


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    arch: int,
) -> Tensor:
    """scaled_dot_product_attention as it runs on compute capability `arch`."""
    call = Call(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    kernel = choose(call, arch)
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # convert_boolean_attn_mask creates an additive mask
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -torch.inf)
    if kernel == "math":
        math = aten._scaled_dot_product_attention_math
        return math(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
    scale = query.size(-1) ** -0.5 if scale is None else scale
    if kernel == "flash":
        head = query.size(-1)
        if head % 8:  # pad_last_dim<8>
            query, key, value = (torch.nn.functional.pad(t, (0, 8 - head % 8)) for t in (query, key, value))
        out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :head]
    if attn_mask is not None:
        keys, padding = attn_mask.size(-1), -attn_mask.size(-1) % 16
        if kernel == "efficient" and padding:  # rows in multiples of 16 [preprocess_mask]
            attn_mask = torch.nn.functional.pad(attn_mask, (0, padding))[..., :keys]
        attn_mask = attn_mask.expand(*query.shape[:3], key.size(2))
    run = getattr(aten, f"_scaled_dot_product_{kernel}_attention")
    return run(query, key, value, attn_mask, call.trains, dropout_p, is_causal, scale=scale)[0]
