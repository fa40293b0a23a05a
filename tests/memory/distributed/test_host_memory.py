"""Host memory in a trace: offloaded tensors leave the device and count as host memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_launch import CONFIGS, llama
from torch import nn

from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.errors import UserError
from ckpt_ft.export.page import step_page
from ckpt_ft.export.timeline import HOST_COLOURS
from ckpt_ft.memory.cost.schedule import HOST
from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.planning.estimate import _smaller_steps
from ckpt_ft.spec.command import command_for, launch_words
from ckpt_ft.spec.flags import Edit, fields_of
from ckpt_ft.spec.launch import Launch, ZeroOptions, read_launch
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.standins import liger

OPTIMIZER, BOTH = ZeroOptions(offload_optimizer=True), ZeroOptions(offload_optimizer=True, offload_param=True)


def trace(launch: Launch, accumulation: int = 1) -> StepTrace:
    return replace(llama(launch), accumulation=accumulation).trace(1)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bytes_of_zero_in_host_memory(stage: int, ranks: int) -> None:
    """Per parameter of a rank's shard: fp32 weight, gradient and two averages, plus what each stage adds."""
    count = sum(p.numel() for p in llama(None).model.parameters())
    found = trace(Launch(f"zero{stage}", ranks, mixed_precision="bf16", zero=OPTIMIZER))
    half = 0 if stage == 3 else 2  # counted as optimizer: a half-precision copy of the shard
    sums = 2 if stage == 3 else 0  # counted as gradients: the accumulated sum
    assert found.at_host_peak["optimizer"] == pytest.approx((12 + half) * count / ranks, rel=1e-3)
    assert found.at_host_peak["gradients"] == pytest.approx((4 + sums) * count / ranks, rel=1e-3)
    assert found.peak_host == sum(found.at_host_peak.values())
    assert found.at_peak["optimizer"] < 1024 * count // 1000  # step counts
    parameters = 2 * count / (ranks if stage == 3 else 1)
    assert found.at_peak["parameters"] == pytest.approx(parameters, rel=1e-3)
    updates = [op for op in found.ops if op.stream == HOST and "fused_adamw" in op.name and op.at >= found.start]
    assert sum(op.nbytes for op in updates) >= 16 * count / ranks


def test_nvme_is_answered_as_host_memory() -> None:
    away = {f"offload_{what}_device": "nvme" for what in ("optimizer", "param")}
    config = {
        "distributed_type": "DEEPSPEED", "mixed_precision": "bf16", "deepspeed_config": {"zero_stage": 3, **away}
    }  # fmt: skip
    left: dict[str, str] = {}
    assert read_launch(config, left_out=left)[0] == Launch("zero3", 1, mixed_precision="bf16", zero=BOTH)
    assert list(left) == ["offload_optimizer nvme", "offload_param nvme"]
    with pytest.raises(UserError, match="offload_optimizer nvme: answered as host memory: the disk is not predicted"):
        read_launch(config)


def test_offloaded_parameters_leave_the_gpu() -> None:
    count = sum(p.numel() for p in llama(None).model.parameters())
    found = trace(Launch("zero3", 2, mixed_precision="bf16", zero=BOTH))
    assert found.at_peak["parameters"] == 0
    assert found.at_host_peak["parameters"] == pytest.approx(2 * count / 2, rel=1e-3)
    copies = [op for op in found.ops if op.name.startswith("aten.copy_") and not op.kernels and op.stream != HOST]
    copied = sum(op.nbytes for op in copies if op.at >= found.start)
    assert copied >= 2 * count / 2  # each shard is copied to the GPU for its gather


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_bytes_of_fsdp2_offload(precision: str) -> None:
    """The host has fp32 parameters, gradients and two averages; the GPU has shards only while they are gathered."""
    count = sum(p.numel() for p in llama(None).model.parameters())
    launch = Launch("fsdp2", 2, mixed_precision=precision)
    kept, away = trace(launch, 2), trace(replace(launch, offload_params=True), 2)
    assert away.at_peak["parameters"] == away.at_peak["gradients"] == 0
    # step counts of a fused optimizer
    assert away.at_peak["optimizer"] <= 512 * len(list(llama(None).model.parameters()))
    assert away.at_host_peak["optimizer"] == pytest.approx(8 * count / 2, rel=1e-3)
    shards = (4 * p.numel() // 2 for p in llama(None).model.parameters())
    pinned = sum(2 ** math.ceil(math.log2(nbytes)) for nbytes in shards)  # the pinned allocator rounds up
    assert away.at_host_peak["parameters"] == away.at_host_peak["gradients"] == pinned > 4 * count / 2
    assert kept.peak_host == 0
    assert away.peak_allocated < kept.peak_allocated
    assert away.seconds > kept.seconds


def test_host_memory_of_fsdp2_survives_json() -> None:
    asked = llama(Launch("fsdp2", 2, offload_params=True))
    assert asked.trace(1).peak_host == StepTrace.from_json(asked.trace(1).to_json()).peak_host > 0


def test_results_of_pinned_tensors_are_in_host_memory() -> None:
    model = nn.Linear(64, 64)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        parked = torch.empty(1000, pin_memory=True)
        doubled = parked * 2
        back = torch.empty(1000).copy_(doubled)
        model(back[:64]).sum().backward()
        model.zero_grad()

    found = trace_step(model, step, device="a100-80gb")
    assert found.peak_host == 4096 + 4000  # the pinned allocator rounds up
    assert found.host_kinds == {"pinned": 4096, "pageable": 4000}
    assert trace_step(model, step, device="cpu").peak_host == 0
    _, section = step_page(found).sections
    view = section.data
    held = [n for n, born, life in zip(view["bytes"], _moments(view), view["life"], strict=True)
            if born <= view["peak"] and (life < 0 or view["peak"] < born + life)]  # fmt: skip
    assert (section.title, view["categories"], view["reserved"]) == (
        "Host memory over the step",
        list(HOST_COLOURS),
        [],
    )
    assert sum(held) == 4096 + 4000


def _moments(view: dict[str, Any]) -> Iterator[int]:
    """Yields the moment of each allocation; the page stores it relative to the previous one of the same category."""
    last: dict[int, int] = {}
    for kind, made in zip(view["category"], view["made"], strict=True):
        last[kind] = last.get(kind, 0) + made
        yield last[kind]


def test_offload_configurations_are_read_and_written() -> None:
    for name, launch in (
        ("deepspeed_zero2_offload", Launch("zero2", 8, mixed_precision="bf16", zero=OPTIMIZER)),
        ("deepspeed_zero3_offload", Launch("zero3", 8, mixed_precision="bf16", zero=BOTH)),
        ("fsdp2_offload", Launch("fsdp2", 8, mixed_precision="bf16", offload_params=True)),
    ):
        assert read_launch(CONFIGS / f"{name}.yaml")[0] == launch
        assert "offload" in " ".join(launch_words(launch))


def test_offload_flag_becomes_a_launch() -> None:
    for words, launch in (
        ({"offload": "all"}, Launch("zero3", 1, zero=BOTH)),
        ({"offload": "optimizer", "launch": "zero2", "processes": 4}, Launch("zero2", 4, zero=OPTIMIZER)),
        ({"offload": "all", "launch": "fsdp2", "processes": 2}, Launch("fsdp2", 2, offload_params=True)),
    ):
        assert fields_of(words)["launch"] == launch
    assert str(Launch("zero3", 1, zero=BOTH)) == "zero3, all in host memory, on 1 GPU"
    both = fields_of({"offload": "all", "gpus": 2, "launch": "fsdp2,zero3"})["launches"]
    assert [launch.offload_params or launch.zero.offload_param for launch in both] == [True] * len(both)
    for words, message in (
        ({"offload": "most"}, "--offload most: give optimizer, or all"),
        ({"offload": "all", "launch": "zero2", "processes": 2}, "--offload all with zero2: .* give --launch zero3 or"),
        ({"offload": "optimizer", "launch": "ddp", "processes": 2}, "--offload optimizer with ddp"),
    ):
        with pytest.raises(UserError, match=message):
            fields_of(words)


def test_offload_is_suggested_before_adapters() -> None:
    spec = TrainingSpec.of("Qwen/Qwen3-4B", dtype="bfloat16", seq_length=128)
    shape: Any = SimpleNamespace(shape={"seq_length": 128})
    (away, *adapters) = [changes for changes, _ in _smaller_steps(spec, shape, 128, {}) if "optimizer" not in changes]
    edit = Edit(away)
    assert edit.text(spec) == "--offload all --bf16"
    assert edit.of(spec).launch.launch == Launch("zero3", 1, mixed_precision="bf16", zero=BOTH)
    said = command_for(edit.of(spec), "causal-lm")
    assert "--zero_stage 3 --offload_optimizer_device cpu --offload_param_device cpu" in said
    assert [sorted(changes) for changes in adapters] == [["lora_r"], ["load_in_4bit", "load_in_8bit", "lora_r"]]
    for other in (spec.edit(lora_r=16), spec.edit(launch=Launch("ddp", 2))):
        assert not any("launch" in changes for changes, _ in _smaller_steps(other, shape, 128, {}))


def test_offload_of_lion_is_refused() -> None:
    class Lion(torch.optim.SGD):
        pass

    asked = llama(Launch("zero2", 2, zero=OPTIMIZER))
    asked = replace(asked, make_optimizer=lambda model: Lion(model.parameters(), lr=0.1))
    with pytest.raises(UserError, match="offload_optimizer with Lion is not modelled"):
        asked.trace(1)


def test_liger_loss_with_offload_under_zero3() -> None:
    """Liger reads the head's weight without calling the head, so the model gathers it; all inputs are offloaded."""
    asked = llama(Launch("zero3", 2, mixed_precision="bf16", zero=BOTH))
    liger.apply(asked.model, {})
    apply_policy(asked.model, "full,offload")
    found = asked.trace(8)
    assert found.at_host_peak["activations"] >= 4 * 8 * 256 * 256 * 2  # of four blocks, in bfloat16
    assert not any("log_softmax" in op.name for op in found.ops)
