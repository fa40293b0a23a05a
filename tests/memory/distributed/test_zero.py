"""ZeRO on one traced rank: the peaks of DeepSpeed's engine on two real ranks, and its configurations."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forked_ranks import run_ranks
from test_launch import CONFIGS, llama
from two_ranks import PROCESSES, workload
from vision_language_configs import QWEN25
from zero_ranks import cases, main, spans

from ckpt_ft.errors import UserError
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.spec.launch import Launch, ZeroOptions, read_launch
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.workloads.load import load


def measure(rank: int, out: str, few: str) -> None:
    main(out, few)


@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_traced_rank_has_the_peaks_of_deepspeeds_ranks(few: bool, tmp_path: Path) -> None:
    """Compares the peaks of forward, backward and update with the fuller of two ranks."""
    pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install -e '.[deepspeed]'")
    run_ranks(measure, str(tmp_path), "few" if few else "")
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(PROCESSES)]
    for name, stage, precision, policy, lora, accumulation, options in cases(few):
        zero, sp = ZeroOptions.read(options, name), 2 if name.endswith("sp") else 1
        launch = Launch(f"zero{stage}", PROCESSES, mixed_precision=precision, zero=zero, sp=sp)
        trace = workload(launch, policy, lora, accumulation).trace(2)
        begins = max(at for at, phase in trace.marks if phase == "optimizer")
        for phase, peak in spans(trace, begins).items():
            assert peak == pytest.approx(max(rank[name][phase] for rank in ranks), rel=2e-4), (name, phase)


def sent_by(trace: StepTrace) -> int:
    """Returns the bytes that the rank sends in the measured step."""
    return sum(op.wire for op in trace.ops if op.at >= trace.start)


def test_bytes_of_each_zero_stage() -> None:
    """bf16 weights, fp32 master weights and two fp32 averages: 2 + 12 bytes per parameter (arXiv:1910.02054)."""
    asked, processes = replace(llama(None), device="cpu"), 8
    count = sum(p.numel() for p in asked.model.parameters())
    for stage in (1, 2, 3):
        trace = replace(asked, launch=Launch(f"zero{stage}", processes, mixed_precision="bf16")).trace(1)
        parameters = 2 * count / (processes if stage == 3 else 1)
        assert trace.at_peak["parameters"] == pytest.approx(parameters, rel=1e-3)
        assert trace.at_peak["optimizer"] == pytest.approx(12 * count / processes, rel=1e-3)
        # An all-reduce and a gather of 2 bytes per parameter; stage 3 gathers a small model once and reduces it.
        assert sent_by(trace) == pytest.approx((2 if stage == 3 else 3) * 2 * count * (1 - 1 / processes), rel=1e-3)
    frugal = ZeroOptions(max_live_parameters=0, max_reuse_distance=0, param_persistence_threshold=0)
    trace = replace(asked, launch=Launch("zero3", processes, mixed_precision="bf16", zero=frugal)).trace(1)
    assert sent_by(trace) == pytest.approx(3 * 2 * count * (1 - 1 / processes), rel=1e-3)  # gathered for backward too
    assert all(p.dtype == torch.float32 for p in asked.model.parameters())


def test_zero_restores_the_model_and_its_trace_round_trips() -> None:
    asked = llama(None)
    alone = asked.trace(2)
    held = [(module, module._parameters, dict(module._parameters)) for module in asked.model.modules()]
    trace = replace(asked, launch=Launch("zero3", 4, mixed_precision="bf16")).trace(2)
    loaded = StepTrace.from_json(trace.to_json())
    assert loaded == trace
    assert loaded.seconds == trace.seconds
    assert all(module._parameters is table and dict(table) == values for module, table, values in held)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in asked.model.modules())
    assert asked.trace(2).events == alone.events


def test_automatic_sizes_of_a_vision_language_model_are_those_of_its_text(tmp_path: Path) -> None:
    """As transformers' HfTrainerDeepSpeedConfig fills them in."""
    qwen = {**QWEN25, "architectures": ["Qwen2_5_VLForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(qwen))
    asked = load(TrainingSpec.of(str(tmp_path), seq_length=16), "cpu")
    peaks = [
        replace(asked, launch=Launch("zero3", 4, mixed_precision="bf16", zero=zero)).trace(1).peak_allocated
        for zero in (ZeroOptions(None, False, None, None), ZeroOptions(16 * 16, False, 230, 160))
    ]
    assert peaks[0] == peaks[1]


def test_zero_without_an_optimizer_is_refused() -> None:
    with pytest.raises(UserError, match="zero2: it shards the states of an optimizer, and there is none"):
        replace(llama(None), launch=Launch("zero2", 2), make_optimizer=None).trace(1)
    frozen = llama(Launch("zero1", 2))
    frozen.model.requires_grad_(False)
    with pytest.raises(UserError, match="no parameter is trained"):
        frozen.trace(1)


def test_our_deepspeed_configs_are_read() -> None:
    for stage in (2, 3):
        launch = read_launch(CONFIGS / f"deepspeed_zero{stage}.yaml", processes=4)[0]
        assert launch == Launch(f"zero{stage}", 4, mixed_precision="bf16")
        assert launch.zero.filled(stage, None).overlap_comm is (stage == 3)


def test_deepspeed_file_is_read(tmp_path: Path) -> None:
    file, config = tmp_path / "zero.json", tmp_path / "launch.yaml"
    config.write_text(
        f"distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config: {{deepspeed_config_file: {file}}}"
    )

    def written(**options: object) -> Launch:
        file.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, **options}}))
        return read_launch(config)[0]

    read = written(reduce_bucket_size="auto", stage3_prefetch_bucket_size=5e6, sub_group_size=1e9, overlap_comm=False)
    assert read.mixed_precision == "bf16"
    assert read.zero == ZeroOptions(None, False, 5_000_000)
    filled = read.zero.filled(3, 64)
    assert (filled.reduce_bucket_size, filled.prefetch_bucket_size) == (64 * 64, 5_000_000)
    for options, message in (
        ({"zero_quantized_weights": True}, "zero_quantized_weights: True: only DeepSpeed.s default is predicted"),
        ({"reduce_bucket_size": "many"}, "reduce_bucket_size many: give a whole number"),
        ({"buckets": 3}, "zero_optimization.buckets: 3: no such setting is known"),
        ({"offload_param": {"device": "nvme"}}, "offload_param nvme: answered as host memory"),
        ({"offload_optimizer": {"device": "cpu", "ratio": 0.5}}, "the whole optimizer is predicted in host memory"),
    ):
        with pytest.raises(UserError, match=message):
            written(**options)
    with pytest.raises(UserError, match="reduce_bucket_size: auto, and the model has no hidden_size"):
        read.zero.filled(3, None)
    file.write_text(json.dumps({"data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 1}}))
    with pytest.raises(UserError, match="data_types: ...: it is not predicted; leave it out"):
        read_launch(config)[0]
