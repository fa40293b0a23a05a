"""A step whose forward and backward are copied in the record equals the step that runs, for each kind of model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trace_models import sorted_events

from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.memory.fake.replay_step import ReplayStep
from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.memory.gpus import find_gpu
from ckpt_ft.memory.record.events import Op
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.planning.tracing import Traced, trace_policies
from ckpt_ft.spec.launch import Launch
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.workload import Workload
from tests.versions import slow_except

UNET = {
    "_class_name": "UNet2DConditionModel", "sample_size": 8, "cross_attention_dim": 8, "block_out_channels": [8, 8],
    "attention_head_dim": 4, "norm_num_groups": 4, "layers_per_block": 1, "transformer_layers_per_block": [7, 1],
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
}  # fmt: skip
FLUX = {
    "_class_name": "FluxTransformer2DModel", "num_layers": 7, "num_single_layers": 8, "attention_head_dim": 16,
    "num_attention_heads": 1, "joint_attention_dim": 8, "pooled_projection_dim": 8, "axes_dims_rope": [4, 4, 8],
}  # fmt: skip
_TEXT = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 8, **_TEXT}
MIXTRAL = {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_hidden_layers": 7, "num_local_experts": 4,
    "num_key_value_heads": 4, **_TEXT,
}  # fmt: skip
BART = {
    "model_type": "bart", "architectures": ["BartForConditionalGeneration"], "vocab_size": 99, "d_model": 32,
    "encoder_layers": 7, "decoder_layers": 7, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
}  # fmt: skip
_SLIDING, _FULL = "sliding_attention", "full_attention"
GEMMA3 = {
    "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "head_dim": 8, "num_key_value_heads": 2,
    "layer_types": [*[_SLIDING, _SLIDING, _FULL] * 6, _SLIDING], "num_hidden_layers": 19, "sliding_window": 8, **_TEXT,
}  # fmt: skip
SDXL = {**UNET, "transformer_layers_per_block": [1, 7], "down_block_types": UNET["down_block_types"][::-1],
        "up_block_types": UNET["up_block_types"][::-1]}  # fmt: skip
_IMAGES_LORA = TrainingSpec.of(dtype="bfloat16", lora_r=2, optimizer="adamw")
_LORA = _IMAGES_LORA.edit(seq_length=16)

CASES: dict[str, tuple[dict[str, Any], str, TrainingSpec]] = {
    "unet": (UNET, "none", TrainingSpec.of(dtype="bfloat16", lora_r=2, optimizer="adamw")),
    "flux": (FLUX, "full,offload", TrainingSpec.of(dtype="bfloat16", optimizer="adamw_8bit", accumulation=2)),
    "qlora": (
        LLAMA,
        "pointwise,head",
        TrainingSpec.of(
            dtype="bfloat16", seq_length=16, lora_r=2, lora_dropout=0.1, load_in_4bit=True, accumulation=3
        ),
    ),
    "llama": (
        LLAMA,
        "save:attention+matmul",
        TrainingSpec.of(seq_length=16, mixed_precision="bf16", optimizer="adafactor"),
    ),
    "mixtral": (MIXTRAL, "modules:mlp", TrainingSpec.of(seq_length=16, optimizer="sgd")),
    "bart": (BART, "full", TrainingSpec.of(seq_length=16, lora_r=2, dtype="bfloat16")),
}

_FSDP2 = Launch("fsdp2", 4, mixed_precision="bf16")
_MIXED = TrainingSpec.of(seq_length=32, mixed_precision="bf16")
_FROZEN = TrainingSpec.of(seq_length=32, dtype="bfloat16", lora_r=2, accumulation=3)
SHARDED: dict[str, tuple[dict[str, Any], str, TrainingSpec, Launch]] = {
    "fsdp2": (LLAMA, "full,head", _MIXED.edit(accumulation=2), _FSDP2),
    "kept": (LLAMA, "none", _MIXED, replace(_FSDP2, reshard_after_forward=False)),
    "lora": (LLAMA, "pointwise", _FROZEN, Launch("fsdp2", 4)),
    "qlora": (LLAMA, "full", _FROZEN.edit(load_in_4bit=True, quant_storage="bfloat16"), Launch("fsdp2", 4)),
    "in host memory": (LLAMA, "full", _MIXED, replace(_FSDP2, offload_params=True)),
    "in one": (LLAMA, "full", _MIXED, replace(_FSDP2, wrap=None)),
    "replicated": (MIXTRAL, "save:attention", _MIXED, replace(_FSDP2, dp_replicate=2)),
    "in a ring": (LLAMA, "full,head,tile:4", _MIXED, replace(_FSDP2, cp=4)),
    "flux": (FLUX, "full", TrainingSpec.of(dtype="bfloat16", lora_r=2), Launch("fsdp2", 4)),
}


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # of Flux, whose single blocks return views
@pytest.mark.parametrize("name", slow_except(SHARDED, "fsdp2"))
def test_replayed_step_under_fsdp2_equals_the_step_that_runs(name: str, tmp_path: Path) -> None:
    config, policy, settings, launch = SHARDED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    gpu = find_gpu("a100-40gb")
    workload = replace(load(settings.edit(model=str(tmp_path / "config.json")), gpu), launch=launch)
    apply_policy(workload.model, policy)
    trace = workload.trace(2)
    made = {"make_optimizer": workload.make_optimizer, "device": workload.device, "launch": launch}
    assert_same(trace, workload.with_metadata(trace_step(workload.model, workload.step(2), **made)))


_REPLAYED: dict[str, tuple[dict[str, Any], str, TrainingSpec]] = {
    **CASES,
    "sdxl": (SDXL, "stages", _IMAGES_LORA),
    "gemma 3": (GEMMA3, "full", _LORA),
    "offload": (LLAMA, "full,offload", _LORA.edit(optimizer="adamw_8bit", accumulation=2)),
    "amp": (LLAMA, "none", TrainingSpec.of(seq_length=16, mixed_precision="bf16", max_grad_norm=0.0)),
    "cpu": (LLAMA, "full", _LORA),
}
_QUICK_AGAIN = ("qlora", "amp")


@pytest.mark.parametrize(
    "name", [n if n in _QUICK_AGAIN else pytest.param(n, marks=pytest.mark.slow) for n in _REPLAYED]
)
def test_replayed_step_equals_the_step_that_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, policy, settings = _REPLAYED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    workload = load(
        settings.edit(model=str(tmp_path / "config.json")), "cpu" if name == "cpu" else find_gpu("a100-40gb")
    )
    (trace,), (run,) = replayed_and_run(workload, [policy], monkeypatch)
    assert_same(trace, run)


@pytest.mark.parametrize("name", ["qlora", pytest.param("sdxl", marks=pytest.mark.slow)])
def test_first_step_of_several_policies_is_replayed_from_the_warm_up(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _, settings = _REPLAYED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    workload = load(settings.edit(model=str(tmp_path / "config.json")), find_gpu("a100-40gb"))
    policies = ["full", "none", "pointwise"]
    for trace, run in zip(*replayed_and_run(workload, policies, monkeypatch), strict=True):
        assert_same(trace, run)


def replayed_and_run(
    workload: Workload, policies: list[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Traced], list[Traced]]:
    """Returns the traces of two sessions: one replays the second step from the first, the other runs it."""
    taken: list[bool] = []
    replay = ReplayStep.replay

    def noted(step: ReplayStep) -> bool:
        taken.append(replay(step))
        return taken[-1]

    monkeypatch.setattr(ReplayStep, "replay", noted)
    traces = trace_policies(workload, policies, workload.step(2))
    monkeypatch.setattr(ReplayStep, "replay", lambda step: False)
    run = trace_policies(workload, policies, workload.step(2))
    assert taken == [True]
    return traces, run


def assert_same(trace: Traced, run: Traced) -> None:
    assert isinstance(trace, StepTrace)
    assert isinstance(run, StepTrace)
    assert trace.storages == run.storages
    assert streams_in_order(trace.ops) == streams_in_order(run.ops)
    assert sorted_events(trace) == sorted_events(run)
    assert (trace.marks, trace.notes, trace.peaks) == (run.marks, run.notes, run.peaks)
    assert not trace.timed or trace.seconds_parts == run.seconds_parts  # a CPU has seconds only after calibration


def streams_in_order(ops: list[Op]) -> list[Op]:
    """Returns `ops` with streams numbered by first appearance, because a step that runs creates new streams."""
    names: dict[str, str] = {"": ""}
    return [replace(op, stream=names.setdefault(op.stream, str(len(names)))) for op in ops]
