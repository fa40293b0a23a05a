"""Seconds of a step: host, device, network and copies overlap; compared with ResNet-50's published ratios."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import flop_registry
from transformers import ResNetConfig, ResNetForImageClassification

from ckpt_ft import apply_policy, trace_step
from ckpt_ft.memory.cost import op_work, schedule
from ckpt_ft.memory.cost.collectives import collective_seconds, memory_left, nccl_bytes, network_share
from ckpt_ft.memory.cost.kernels import KERNEL_GAP, KERNEL_RAMP
from ckpt_ft.memory.gpus import GPU, find_gpu
from ckpt_ft.memory.record.events import Op
from ckpt_ft.spec.launch import Launch
from ckpt_ft.units import MIB

NO_HOST = schedule.Host(per_op=0.0, per_launch=0.0)
A100 = find_gpu("a100-80gb")
# 100 SMs, 100 TFLOP/s in half precision, 10 in fp32 (20 as TF32), 1 TB/s; each rate is reached in full.
ROUND = GPU("round", (8, 0), 100, 2**34, 0, 1e12, 10e12, 20e12, 100e12, 100e12, 0, 1.0, 1.0, 1.0)


BETWEEN = KERNEL_RAMP + KERNEL_GAP


def op(name="aten.mm.default", flops=0, nbytes=0, dtype="float16", kernels=1, shape=(), around="", stream="", wire=0):
    return Op(name, flops, nbytes, dtype, "forward", "", 0, kernels, stream, wire, shape, around)


def event(what, stream, back=0):
    return Op(f"event.{what}", 0, 0, "", "", "", 0, 0, stream, shape=(back,))


def test_attention_counts_every_head_of_the_query():
    """Equals torch's formula for ungrouped heads; grouped heads have as many flops."""
    query, grad = torch.empty(2, 4, 6, 8), torch.empty(2, 4, 6, 16)
    for heads in (4, 2):
        key, value = torch.empty(2, heads, 10, 8), torch.empty(2, heads, 10, 16)
        assert op_work.attention_flops(query, key, value) == 2 * 2 * 4 * 6 * 10 * (8 + 16)
        assert op_work.attention_flops(grad, query, key, value, backward=True) == 2 * 2 * 4 * 6 * 10 * (3 * 8 + 2 * 16)
    key, value = torch.empty(2, 4, 10, 8), torch.empty(2, 4, 10, 8)
    for kernel in ("flash", "efficient", "cudnn"):
        packet = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention")
        backward = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention_backward")
        for op, args in ((packet, (query, key, value)), (backward, (query, query, key, value))):
            flops = op_work.work_rule(op.default).flops
            assert flops is not None
            assert flops is not flop_registry[op]  # torch 2.11 refuses grouped heads
            assert flops(*args) == flop_registry[op](*args)


@pytest.mark.parametrize(("transposed", "groups"), [(False, 1), (True, 1), (False, 4), (False, 16)])
def test_convolution_backward_counts_input_and_weight_gradients(transposed, groups):
    """Equals torch's formula without groups; with groups it is twice the forward's flops."""
    given, weight = torch.empty(2, 16, 10, 10), torch.empty(16, 16 // groups, 3, 3)
    how = ([2, 2], [1, 1], [1, 1], transposed, [1, 1] if transposed else [0, 0], groups)
    out = (
        torch.nn.functional.conv_transpose2d(given, weight, None, 2, 1, 1) if transposed else torch.empty(2, 16, 5, 5)
    )
    forward = flop_registry[torch.ops.aten.convolution](given, weight, None, *how, out_val=out)
    for mask in ([True, True, False], [False, True, True]):
        found = op_work.convolution_backward_flops(out, given, weight, None, *how, mask)
        assert found == sum(mask[:2]) * forward
        results = tuple(t if wanted else None for t, wanted in zip((given, weight, weight), mask, strict=True))
        theirs = flop_registry[torch.ops.aten.convolution_backward]
        if groups == 1:
            assert found == theirs(out, given, weight, None, *how, mask, out_val=results)


def seconds(ops, gpu=ROUND, host=NO_HOST, launch=None):
    return schedule.step_seconds(ops, gpu, host, launch)


def test_step_of_small_kernels_is_limited_by_the_host():
    ops = [op("aten.add.Tensor", nbytes=100) for _ in range(1000)]
    host = schedule.Host(per_op=10e-6, per_launch=5e-6)
    parts = seconds(ops, host=host)
    assert parts.total == pytest.approx(1000 * 15e-6 + BETWEEN)
    assert (parts.issuing, parts.compute) == pytest.approx((1000 * 15e-6, 1000 * BETWEEN), rel=1e-4)
    assert parts.host == pytest.approx(parts.total - parts.compute)
    assert parts.bound == "host"


def test_host_and_device_overlap():
    slow = op("aten.add.Tensor", nbytes=10**9)  # 1 ms on the device
    views = [op("aten.view.default", kernels=0)] * 50
    host = schedule.Host(per_op=10e-6, per_launch=0.0)
    # The views are issued while the device works, so the second kernel does not wait for the host.
    together = seconds([slow, *views, slow], host=host)
    assert together.total == pytest.approx(10e-6 + 2 * (1e-3 + BETWEEN))
    assert (together.host, together.bound) == (pytest.approx(10e-6), "compute")
    assert seconds([slow, *views * 3, slow], host=host).total == pytest.approx(1.52e-3 + 1e-3 + BETWEEN)


def test_metadata_queries_cost_no_time():
    assert schedule.step_seconds([op("prim.device.default", kernels=0)] * 1000, A100).total == 0.0


def test_reading_a_value_waits_for_the_device():
    slow, issue = op("aten.add.Tensor", nbytes=10**9), schedule.Host(per_op=10e-6, per_launch=0.0)
    ahead = seconds([slow] * 3, host=issue)
    waited = seconds([slow, op("aten._local_scalar_dense.default", nbytes=8), slow, slow], host=issue)
    # The second kernel is issued only after the first one's result is available.
    assert waited.total - ahead.total == pytest.approx(BETWEEN + schedule.READ_BACK + 10e-6, rel=1e-3)


def test_hooks_and_dispatch_modes_cost_host_time():
    host = schedule.Host()
    plain, hooks, mode = (host.issue(op(around=around)) for around in ("", "hooks", "mode"))
    assert (hooks - plain, mode - plain) == pytest.approx((10e-6, 17e-6))
    assert schedule.Host(slower=2.0).issue(op(around="mode")) == 2 * mode
    assert host.issue(op("ckpt_ft.dequantize_nf4.default")) - plain == pytest.approx(70e-6)
    assert host.issue(op("fsdp.all_gather_copy_in.default")) - plain == pytest.approx(550e-6)
    assert schedule.Host.beside(find_gpu("t4")).slower == 1.7
    assert schedule.Host.beside(find_gpu("h100")).slower == 1.0


def test_collective_slows_concurrent_kernels():
    launch = Launch("ddp", 8, link=1e9)
    gather = op("c10d.allgather_.default", wire=10**6, stream="gather")  # 1 ms and its latency
    alone = seconds([op("aten.add.Tensor", nbytes=10**9)], A100)
    concurrent = seconds([gather, op("aten.add.Tensor", nbytes=10**9)], A100, launch=launch)
    assert concurrent.compute == pytest.approx(alone.compute * (1 + network_share(A100)))
    assert network_share(A100) == pytest.approx(108 / 84 - 1)
    took = collective_seconds(10**6, launch, A100, "c10d.allgather_.default")
    assert took == pytest.approx(8.4e-6 + 7 * 3.4e-6 + 1e-3)
    assert concurrent.communicating == pytest.approx(took)
    assert concurrent.network == pytest.approx(took - concurrent.compute)


def test_collective_uses_memory_bandwidth():
    """It moves each byte twice: at 0.25 TB/s, memory-bound kernels keep half the bandwidth; matmuls lose only SMs."""
    launch = Launch("ddp", 8, link=0.25e12)
    gather = op("c10d.allgather_.default", wire=10**10, stream="gather")  # 40 ms
    copy, matmul = op("aten.add.Tensor", nbytes=10**9), op(flops=10**11, shape=(1, 4096, 4096, 2980, 0))
    assert memory_left(launch, ROUND) == 0.5
    moved, multiplied = (
        seconds([gather, each], ROUND, launch=launch).compute / seconds([each], ROUND).compute
        for each in (copy, matmul)
    )
    assert moved == pytest.approx(2, rel=0.01)
    assert multiplied == pytest.approx(1 + network_share(ROUND))


def test_compute_stream_waits_for_an_event():
    launch = Launch("ddp", 8, link=1e9)
    gather = op("c10d.allgather_.default", wire=10**6, stream="gather")
    parts = seconds(
        [
            gather,
            event("record", "gather"),
            event("record", ""),
            event("wait", "", back=1),
            op("aten.add.Tensor", nbytes=10**9),
        ],
        launch=launch,
    )
    took = collective_seconds(10**6, launch, ROUND, "c10d.allgather_.default")
    assert parts.network == pytest.approx(took)
    assert parts.total == pytest.approx(took + 1e-3 + BETWEEN)


def test_copies_to_the_host_limit_the_step():
    """A copy begins when the preceding kernel has ended."""
    copy = op("aten.copy_.default", nbytes=10**9, kernels=0)
    parts = seconds([op("aten.add.Tensor", nbytes=10**9), copy])
    assert parts.copying == pytest.approx(10**9 / ROUND.host_bandwidth)
    assert parts.total == pytest.approx(parts.copying + parts.compute)
    assert (parts.copies, parts.bound) == (pytest.approx(parts.copying), "copies")


def test_copies_overlap_computation_until_a_wait():
    """Copying a block's weights takes 2 ms, one block ahead: blocks of 1 ms wait for it, blocks of 3 ms do not."""
    copy = op("aten.copy_.default", nbytes=int(2e-3 * ROUND.host_bandwidth), kernels=0, stream="side")
    millisecond = op("aten.add.Tensor", nbytes=10**9)

    def blocks(work, count=4):
        for _ in range(count):  # wait for these weights, start the copy of the next block's
            yield from (event("wait", ""), event("record", ""), event("wait", "side"), copy, event("record", "side"))
            yield from [millisecond] * work

    forward, backward = seconds(blocks(1)), seconds(blocks(3))
    assert (forward.copies, forward.network) == (pytest.approx(4 * 1e-3, rel=1e-2), 0)
    assert forward.total == pytest.approx(8e-3, rel=1e-2)
    assert (backward.copies, backward.total) == (0, pytest.approx(12e-3, rel=1e-2))
    assert forward.copying == backward.copying == pytest.approx(8e-3)


def test_host_optimizer_starts_with_the_first_gradient():
    """Each gradient is copied after its kernel; the host computes its update while later kernels run."""
    copy = op("aten.copy_.default", nbytes=int(1e-3 * ROUND.host_bandwidth), kernels=0, stream="side")
    kernel = op("aten.add.Tensor", nbytes=2 * 10**9)
    sent = [kernel, event("record", ""), event("wait", "side"), copy, event("record", "side")]
    host = dataclasses.replace(NO_HOST, bandwidth=1e12)
    adam = op("aten._fused_adamw_.default", nbytes=2 * 10**9, kernels=0, stream=schedule.HOST)
    update = [part for back in (4, 2, 0) for part in (event("sync", "", back), adam)]
    parts = seconds([*sent * 3, *update], host=host)
    assert parts.total == pytest.approx(3 * 2e-3 + 1e-3 + 2e-3, rel=1e-2)
    assert seconds([*sent * 3, event("await", ""), *[adam] * 3], host=host).total == pytest.approx(13e-3, rel=1e-2)


def test_assignment_of_tensor_data_has_no_kernel():
    tensor = torch.empty(4, 8)
    ask = torch.ops.aten._has_compatible_shallow_copy_type.default
    assert op_work.measure(ask, (tensor, torch.empty(0)), {}, True) == op_work.Work()


def test_gpu_of_twice_the_rates_is_faster():
    double = {rate: 2 * getattr(A100, rate) for rate in ("bandwidth", "fp32", "tf32", "fp16", "bf16")}
    ops = [op(flops=2 * n**3, nbytes=6 * n**2) for n in range(64, 4096, 64)]
    faster = dataclasses.replace(A100, **double)
    fast, slow = (schedule.step_seconds(ops, gpu, NO_HOST).total for gpu in (faster, A100))
    assert slow / 2 < fast < slow


def resnet_seconds(policy: str) -> float:
    """Predicts the seconds of forward and backward of ResNet-50 on 32 x 3 x 224 x 224 on a T4."""
    with torch.device("meta"):
        model = ResNetForImageClassification(ResNetConfig(num_labels=1000)).train()
    apply_policy(model, policy)

    def step(model: torch.nn.Module, optimizer: None) -> None:
        model(torch.zeros(32, 3, 224, 224), labels=torch.zeros(32, dtype=torch.long)).loss.backward()
        model.zero_grad()

    return trace_step(model, step, device="t4").seconds


def test_recomputation_of_resnet50_has_the_published_cost():
    """Published ms per iteration on a T4: none 276.69, stages 3 and 4 by block 316.66, stages 368.39, full 368.90."""
    seconds = [resnet_seconds(policy) for policy in ("none", "stages:3+4", "stages", "full")]
    assert seconds[0] == pytest.approx(0.27669, rel=0.15)
    assert [s / seconds[0] for s in seconds[1:]] == pytest.approx(
        [316.66 / 276.69, 368.39 / 276.69, 368.90 / 276.69], rel=0.05
    )


def test_reading_step_counts_of_adam_does_not_wait():
    """AdamW reads two values of each parameter's count on the host, without a wait; the loss is on the device."""

    def step(model, optimizer):
        loss = model(torch.ones(4, 8)).sum()
        loss.backward()
        optimizer.step()
        loss.item()

    trace = trace_step(
        torch.nn.Linear(8, 8), step, make_optimizer=lambda m: torch.optim.AdamW(m.parameters()), device="a100-80gb"
    )
    read = [op for op in trace.ops if "_local_scalar_dense" in op.name and op.at >= trace.start]
    assert [op.kernels for op in read] == [0, 0, 0, 0, 1]
    counts = next(op for op in trace.ops if op.name.startswith("aten._foreach_add_.") and op.at >= trace.start)
    assert (counts.kernels, counts.nbytes) == (0, 0)


def test_step_waits_at_each_synchronisation():
    """The host runs ahead of eight large matmuls, unless it waits for each of them."""

    def step(waits):
        def stepped(model, optimizer):
            for _ in range(8):
                model(torch.ones(4096, 4096, dtype=torch.bfloat16))
                if waits:
                    torch.cuda.reset_peak_memory_stats()
                    torch.cuda.synchronize()

        return stepped

    with torch.device("meta"):
        model = torch.nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16)
    ahead, waiting = (trace_step(model, step(waits), device="a100-80gb") for waits in (False, True))
    assert [op.name for op in waiting.ops].count("event.await") == 16
    assert waiting.seconds > ahead.seconds + 7 * schedule.READ_BACK
    assert waiting.seconds_parts.compute == pytest.approx(ahead.seconds_parts.compute)
    assert waiting.peak_reserved == ahead.peak_reserved


def test_capturable_adam_reads_nothing_on_the_host():
    def step(model, optimizer):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()

    def make(model):
        return torch.optim.AdamW(model.parameters(), capturable=True)

    trace = trace_step(torch.nn.Linear(8, 8), step, make_optimizer=make, device="a100-80gb")
    assert not any("_local_scalar_dense" in op.name for op in trace.ops)


def test_nccl_has_buffers_per_connection() -> None:
    """Ulysses on eight H100: 7 x 32 connections for the all-to-all and three rings of 24 channels, of 12 MiB each."""
    h100, t4 = find_gpu("h100"), find_gpu("t4")
    assert nccl_bytes(Launch("zero3", 1), h100) == 0
    assert nccl_bytes(Launch("ddp", 8), h100) == nccl_bytes(Launch("fsdp2", 8), h100) == 24 * 12 * MIB
    assert nccl_bytes(Launch("zero3", 8), h100) == 2 * 24 * 12 * MIB
    assert nccl_bytes(Launch("zero3", 8, sp=8), h100) == (3 * 24 + 7 * 32) * 12 * MIB
    assert nccl_bytes(Launch("zero3", 16, sp=16), h100) == (3 * 24 + 7 * 16) * 12 * MIB
    assert nccl_bytes(Launch("fsdp2", 8, tp=2), h100) == 3 * 24 * 12 * MIB
    assert nccl_bytes(Launch("zero2", 4, sp=2), t4) == (3 * 4 + 1 * 2) * 12 * MIB
