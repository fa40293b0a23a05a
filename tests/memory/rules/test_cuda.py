"""Rules for CUDA kernels: which kernel runs, what it saves, and what it allocates temporarily."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.memory.rules.cuda import winograd

MIB = 2**20


def trace(call, *inputs: torch.Tensor, device: str = "t4") -> StepTrace:
    """Returns the trace of `call(*inputs)` and its backward; the inputs are parameters."""
    model = nn.ParameterList([nn.Parameter(x) for x in inputs])
    return trace_step(model, lambda model, _: call(*model).sum().backward(), device=device, warmup_steps=0)


def names(trace: StepTrace, phase: str = "forward") -> list[str]:
    return [op.name.removeprefix("aten.").partition(".")[0] for op in trace.ops if op.phase == phase]


def saved_bytes(trace: StepTrace, op: str) -> list[int]:
    """Returns the bytes of each storage from `op` that is alive when backward begins."""
    begin = next(at for at, name in trace.marks if name == "backward")
    return [storage.nbytes for storage, _ in trace.live_at(begin - 1) if op in storage.op]


def qkv(heads: int = 4, length: int = 128, head: int = 64, dtype: torch.dtype = torch.float16, kv_heads: int = 0):
    return [torch.zeros(2, h, length, head, dtype=dtype) for h in (heads, kv_heads or heads, kv_heads or heads)]


KERNELS = [
    # GPU, dtype, head size, mask, kernel
    ("t4", torch.float16, 64, False, "efficient"),
    ("t4", torch.float32, 64, False, "efficient"),
    ("t4", torch.bfloat16, 64, False, "math"),
    ("t4", torch.float16, 60, False, "math"),
    ("a100-40gb", torch.bfloat16, 64, False, "flash"),
    ("a100-40gb", torch.bfloat16, 64, True, "efficient"),
    ("a100-40gb", torch.float32, 64, False, "efficient"),
    ("a100-40gb", torch.float32, 62, False, "math"),
    ("a100-40gb", torch.bfloat16, 264, False, "efficient"),
    ("rtx-4090", torch.float16, 200, False, "efficient"),
    ("h100", torch.bfloat16, 64, False, "cudnn"),
    ("h100", torch.float32, 64, False, "efficient"),
]


@pytest.mark.parametrize(("gpu", "dtype", "head", "masked", "kernel"), KERNELS)
def test_attention_kernel_of_a_call(gpu: str, dtype: torch.dtype, head: int, masked: bool, kernel: str) -> None:
    mask = torch.ones(128, 128, dtype=torch.bool) if masked else None
    ran = names(
        trace(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask), *qkv(head=head, dtype=dtype), device=gpu)
    )
    fused = [name for name in ran if name.startswith("_scaled_dot_product")]
    assert fused == ([] if kernel == "math" else [f"_scaled_dot_product_{kernel}_attention"])
    assert ("bmm" in ran) == (kernel == "math")


def test_sdpa_kernel_chosen_by_the_user_runs() -> None:
    def pinned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    assert "_scaled_dot_product_efficient_attention" in names(trace(pinned, *qkv(), device="a100-40gb"))
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    try:
        assert "bmm" in names(trace(F.scaled_dot_product_attention, *qkv()))
    finally:
        torch.backends.cuda.enable_mem_efficient_sdp(True)


def test_attention_kernel_of_grouped_heads() -> None:
    def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    assert "_scaled_dot_product_flash_attention" in names(trace(grouped, *qkv(kv_heads=2), device="a100-40gb"))
    assert "bmm" in names(trace(grouped, *qkv(kv_heads=2), device="t4"))


def test_bytes_that_attention_kernels_save() -> None:
    out = 2 * 4 * 100 * 64 * 2
    efficient = saved_bytes(trace(F.scaled_dot_product_attention, *qkv(length=100)), "efficient")
    # rows of the log-sum-exp are padded to 32; the random seeds are on the host
    assert sorted(efficient) == sorted([out, 2 * 4 * 128 * 4])
    flash = saved_bytes(trace(F.scaled_dot_product_attention, *qkv(length=100), device="a100-40gb"), "flash")
    assert {out, 2 * 4 * 100 * 4} <= set(flash)


def test_dropout_saves_a_bool_mask() -> None:
    x = torch.zeros(1000, 1000)
    assert sorted(saved_bytes(trace(lambda x: F.dropout(x, 0.1), x), "dropout")) == [10**6]
    nothing = trace(lambda x: F.dropout(x, 0.0) + F.dropout(x, 0.5, training=False), x)
    assert names(nothing) == ["add", "sum", "ones_like"]


def test_softmax_of_half_in_float32_is_one_kernel() -> None:
    x = torch.zeros(1024, 1024, dtype=torch.float16)
    fused = trace(lambda x: F.softmax(x, -1, dtype=torch.float32), x)
    assert names(fused)[:1] == ["_softmax"]
    product = [s.nbytes for s in fused.storages if s.op == "aten._softmax_backward_data.default"]
    assert sorted(product) == [2 * MIB, 4 * MIB]  # the half-precision gradient, and grad * output in float32
    cast = trace(lambda x: F.softmax(x, -1, dtype=torch.float32), x.bfloat16())
    assert names(cast)[:2] == ["_to_copy", "_softmax"]


def test_statistics_of_norms_are_float32() -> None:
    x = torch.zeros(8, 64, dtype=torch.float16)
    assert sorted(saved_bytes(trace(lambda x: F.layer_norm(x, (64,)) * x, x), "layer_norm")) == [32, 32, 1024]
    image, weight = torch.zeros(2, 8, 4, 4, dtype=torch.float16), torch.zeros(8)
    norm = trace(lambda x, w: F.group_norm(x, 2, w, w) * x, image, weight)
    assert sorted(saved_bytes(norm, "group_norm")) == [16, 16, 512]


def test_rms_norm_is_one_kernel() -> None:
    x, weight = torch.zeros(8, 64, dtype=torch.float16), torch.zeros(64, dtype=torch.float16)
    fused = trace(lambda x, w: F.rms_norm(x, (64,), w), x, weight)
    assert "_fused_rms_norm" in names(fused)
    assert "_fused_rms_norm_backward" in names(fused, "backward")
    assert sorted(saved_bytes(fused, "rms_norm")) == [32]  # rstd in float32; the output is not saved


@pytest.mark.parametrize(("gpu", "nbytes"), [("t4", 8519680), ("a100-40gb", 8519680), ("h100", 32 * MIB)])
def test_cublas_workspaces(gpu: str, nbytes: int) -> None:
    model, x = nn.Linear(64, 64), torch.zeros(2, 64)

    def step(model: nn.Module, _: object) -> None:
        model(x).sum().backward()

    workspaces = [s.nbytes for s in trace_step(model, step, device=gpu).storages if s.category == "workspace"]
    assert workspaces == [nbytes, MIB, nbytes]  # the main thread's, cuBLASLt's for the bias, and the autograd thread's
    assert trace_step(model, step, device="cpu").at_peak["workspace"] == 0


def test_autocast_follows_the_cuda_operator_lists() -> None:
    def ops(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda"):
            y = x @ w
            assert y.dtype == torch.float16
            assert torch.is_autocast_enabled()
            assert [f(y).dtype for f in (torch.exp, lambda y: y.softmax(-1), lambda y: F.layer_norm(y, (64,)))] == [
                torch.float32
            ] * 3
            assert [f(y).dtype for f in (torch.relu, lambda y: torch.cat([y, y]), lambda y: y.max(-1).values)] == [
                torch.float16
            ] * 3
            assert (y.sum().dtype, torch.bmm(x[None], w[None]).dtype) == (torch.float32, torch.float16)
            assert torch.addcmul(x, y, y).dtype == torch.float32
            with torch.autocast("cuda", enabled=False):
                assert (x @ w).dtype == torch.float32
            return (y @ w).sum()

    x, w = torch.zeros(64, 64), torch.zeros(64, 64)
    casts = [
        op
        for op in trace(ops, x, w).ops
        if op.name == "aten._to_copy.default" and op.phase == "forward" and op.dtype == "float32"
    ]
    # x and w are cast once and cached; bmm's operands are views of them, which are not cached
    assert len(casts) == 2 + 2
    assert torch.exp(torch.zeros(1, dtype=torch.float16)).dtype == torch.float16


def test_convolution_workspaces() -> None:
    x, w = torch.zeros(4, 64, 32, 32), torch.zeros(128, 64, 3, 3)
    conv = trace(lambda x, w: F.conv2d(x, w, padding=1), x, w)
    expected = winograd(4, 64, 128, torch.Size([32, 32]))
    assert expected == 36 * 4 * (64 * 128 + 4 * 8 * 8 * (64 + 128))
    output = 4 * 128 * 32 * 32 * 4
    assert [s.nbytes for s in conv.storages if s.op == "aten.convolution.default"] == [output, expected]
    half = trace(lambda x, w: F.conv2d(x, w, padding=1), x.half(), w.half())
    copies = 2 * (x.numel() + w.numel()) + output // 2
    assert [s.nbytes for s in half.storages if s.op == "aten.convolution.default"] == [output // 2, copies]


def test_step_counts_of_adam_are_on_the_host() -> None:
    model, x = nn.Linear(64, 64, bias=False), torch.zeros(2, 64)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(x).sum().backward()
        optimizer.step()

    adam = trace_step(model, step, make_optimizer=lambda model: torch.optim.AdamW(model.parameters()), device="t4")
    assert adam.at_peak["optimizer"] == 2 * 64 * 64 * 4
    assert any("_foreach" in op.name for op in adam.ops)
