"""A workload's trace, in which alike blocks run once, is the one in which every block runs: of each kind of model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.memory.fake import skipping
from ckpt_ft.memory.fake import step as tracing
from ckpt_ft.memory.gpus import find_gpu
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.settings import Settings

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

CASES: dict[str, tuple[dict[str, Any], str, Settings]] = {
    "unet": (UNET, "none", Settings(dtype="bfloat16", lora_r=2, optimizer="adamw")),
    "flux": (FLUX, "full,offload", Settings(dtype="bfloat16", optimizer="adamw_8bit", accumulation=2)),
    "qlora": (
        LLAMA,
        "pointwise,head",
        Settings(dtype="bfloat16", seq_length=16, lora_r=2, lora_dropout=0.1, load_in_4bit=True, accumulation=3),
    ),
    "llama": (LLAMA, "save:attention+matmul", Settings(seq_length=16, mixed_precision="bf16", optimizer="adafactor")),
    "mixtral": (MIXTRAL, "modules:mlp", Settings(seq_length=16, optimizer="sgd")),
    "bart": (BART, "full", Settings(seq_length=16, lora_r=2, dtype="bfloat16")),
}


def rows(trace: StepTrace) -> list[int]:
    """Events; frees in a row sorted: autocast drops its cache of weights in the order of a hash map of addresses."""
    told: list[int] = []
    freed: list[int] = []
    for event in [*trace.events, len(trace.storages)]:
        if event < 0:
            freed.append(event)
        else:
            told += [*sorted(freed), event]
            freed = []
    return told


SLOW = ("unet", "flux", "llama", "bart")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES])
def test_a_workloads_trace(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, policy, settings = CASES[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    workload = load(str(tmp_path / "config.json"), settings, find_gpu("a100-40gb"))
    apply_policy(workload.model, policy)
    gaps: list[int] = []
    unrolled = skipping.unrolled

    def counted(trace: StepTrace, repeated: list[Any], late: int) -> StepTrace:
        gaps.append(len(repeated))
        return unrolled(trace, repeated, late)

    monkeypatch.setattr(skipping, "unrolled", counted)
    spliced = workload.trace(2)
    assert gaps[-1] >= 2  # in both steps
    step = workload.step(2)
    every = tracing.trace_step(workload.model, step, make_optimizer=workload.make_optimizer, device=workload.device)
    every = workload.whole(every)
    assert spliced.storages == every.storages
    assert spliced.ops == every.ops
    assert rows(spliced) == rows(every)
    assert (spliced.marks, spliced.notes) == (every.marks, every.notes)
    assert spliced.seconds_parts == every.seconds_parts
    assert spliced.peaks == every.peaks
