"""Seconds of ops on a GPU: hand-computed rooflines, the two clocks, and ResNet-50's published ratios."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import flop_registry
from transformers import ResNetConfig, ResNetForImageClassification

from ckpt_ft import apply_policy, trace_step
from ckpt_ft.memory.gpus import GPU, find_gpu
from ckpt_ft.memory.record import cost, opinfo
from ckpt_ft.memory.record.events import Op

NO_HOST = cost.Host(per_op=0.0, per_launch=0.0)
A100 = find_gpu("a100-80gb")
# 100 SMs, 100 TFLOP/s in half precision, 10 in fp32 (20 as TF32), 1 TB/s, all of it reached.
ROUND = GPU("round", (8, 0), 100, 2**34, 0, 1e12, 10e12, 20e12, 100e12, 100e12, 0, 1.0, 1.0, 1.0)


def op(name="aten.mm.default", flops=0, nbytes=0, dtype="float16", kernels=1):
    return Op(name, flops, nbytes, dtype, "forward", "", 0, kernels)


def test_attention_counts_every_head_of_the_query():
    """What torch's formulas count where heads are not grouped; grouped ones do as much."""
    query, grad = torch.empty(2, 4, 6, 8), torch.empty(2, 4, 6, 16)
    for heads in (4, 2):
        key, value = torch.empty(2, heads, 10, 8), torch.empty(2, heads, 10, 16)
        assert opinfo.attention_flops(query, key, value) == 2 * 2 * 4 * 6 * 10 * (8 + 16)
        assert opinfo.attention_backward_flops(grad, query, key, value) == 2 * 2 * 4 * 6 * 10 * (3 * 8 + 2 * 16)
    key, value = torch.empty(2, 4, 10, 8), torch.empty(2, 4, 10, 8)
    for kernel in ("flash", "efficient", "cudnn"):
        packet = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention")
        backward = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention_backward")
        assert opinfo.describe(packet.default)[3] is opinfo.attention_flops
        assert opinfo.attention_flops(query, key, value) == flop_registry[packet](query, key, value)
        assert opinfo.describe(backward.default)[3] is opinfo.attention_backward_flops
        assert opinfo.attention_backward_flops(query, query, key, value) == flop_registry[backward](
            query, query, key, value
        )


def test_elementwise_takes_its_memory_traffic():
    assert cost.device_seconds(op("aten.add.Tensor", nbytes=10**9), ROUND) == pytest.approx(1e-3 + cost.KERNEL_GAP)


def test_norms_with_statistics_read_their_input_twice():
    norm = cost.device_seconds(op("aten.native_batch_norm.default", nbytes=10**9), ROUND)
    assert norm == pytest.approx(1.5e-3 + cost.KERNEL_GAP)


def test_a_large_matmul_takes_its_arithmetic():
    edge = 25600  # 200 x 200 tiles: 400 full waves
    large = op(flops=2 * edge**3, nbytes=3 * 2 * edge**2)
    assert cost.device_seconds(large, ROUND) == pytest.approx(2 * edge**3 / 100e12, rel=1e-4)


def test_a_small_matmul_leaves_sms_idle():
    edge = 1280  # 10 x 10 tiles fill 100 SMs once; one more row of tiles needs a second wave
    one_wave = cost.device_seconds(op(flops=2 * edge**3), ROUND) - cost.KERNEL_GAP
    two_waves = cost.device_seconds(op(flops=2 * (edge + 128) ** 3), ROUND) - cost.KERNEL_GAP
    assert one_wave == pytest.approx(2 * edge**3 / 100e12, rel=1e-3)
    assert two_waves == pytest.approx(2 * (edge + 128) ** 3 / 100e12 * 200 / 121, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "dtype", "rate"),
    [
        ("aten.mm.default", "bfloat16", 100e12),
        ("aten.mm.default", "float32", 10e12),
        ("aten.convolution_backward.default", "float32", 20e12),
        ("aten._scaled_dot_product_flash_attention.default", "float16", 70e12),
        ("aten._scaled_dot_product_efficient_attention_backward.default", "float16", 38e12),
    ],
)
def test_rates_by_kind_of_op(name, dtype, rate):
    flops = 2 * 25600**3
    assert cost.device_seconds(op(name, flops, 0, dtype), ROUND) == pytest.approx(flops / rate, rel=1e-3)


def test_a_step_of_small_kernels_takes_the_hosts_time():
    ops = [op("aten.add.Tensor", nbytes=100) for _ in range(1000)]
    host = cost.Host(per_op=10e-6, per_launch=5e-6)
    assert cost.step_seconds(ops, ROUND, host) == pytest.approx(1000 * 15e-6 + 2.9e-6)


def test_host_and_device_overlap():
    slow = op("aten.add.Tensor", nbytes=10**9)  # 1 ms on the device
    views = [op("aten.view.default", kernels=0)] * 50
    host = cost.Host(per_op=10e-6, per_launch=0.0)
    # The views are issued while the device works; the second kernel need not wait for the host.
    assert cost.step_seconds([slow, *views, slow], ROUND, host) == pytest.approx(10e-6 + 2 * (1e-3 + cost.KERNEL_GAP))
    assert cost.step_seconds([slow, *views * 3, slow], ROUND, host) == pytest.approx(1.52e-3 + 1e-3 + cost.KERNEL_GAP)


def test_questions_to_fake_tensors_cost_nothing():
    assert cost.step_seconds([op("prim.device.default", kernels=0)] * 1000, A100) == 0.0


def test_a_tensor_that_is_given_other_data_takes_no_kernel():
    tensor = torch.empty(4, 8)
    ask = torch.ops.aten._has_compatible_shallow_copy_type.default
    assert opinfo.measure(ask, (tensor, torch.empty(0)), {}, True) == (0, 0, "", 0)


def test_twice_the_gpu_is_never_slower():
    double = {rate: 2 * getattr(A100, rate) for rate in ("bandwidth", "fp32", "tf32", "fp16", "bf16")}
    ops = [op(flops=2 * n**3, nbytes=6 * n**2) for n in range(64, 4096, 64)]
    fast, slow = (cost.step_seconds(ops, gpu, NO_HOST) for gpu in (dataclasses.replace(A100, **double), A100))
    assert slow / 2 < fast < slow


def resnet_seconds(policy: str) -> float:
    """Predicted seconds of forward and backward of ResNet-50 on 32 x 3 x 224 x 224, on a T4."""
    with torch.device("meta"):
        model = ResNetForImageClassification(ResNetConfig(num_labels=1000)).train()
    apply_policy(model, policy)

    def step(model: torch.nn.Module, optimizer: None) -> None:
        model(torch.zeros(32, 3, 224, 224), labels=torch.zeros(32, dtype=torch.long)).loss.backward()
        model.zero_grad()

    return trace_step(model, step, device="t4").seconds


def test_resnet50_recompute_costs_what_was_published():
    """T4, ms per iteration: none 276.69, stages 3 and 4 by block 316.66, each stage 368.39, each block 368.90."""
    seconds = [resnet_seconds(policy) for policy in ("none", "stages:3+4", "stages", "full")]
    assert seconds[0] == pytest.approx(0.27669, rel=0.15)
    assert [s / seconds[0] for s in seconds[1:]] == pytest.approx(
        [316.66 / 276.69, 368.39 / 276.69, 368.90 / 276.69], rel=0.05
    )
