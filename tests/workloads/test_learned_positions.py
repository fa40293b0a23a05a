"""Sequences longer than the trained positions: rotary models run them, position tables limit the length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_configs import write_config
from transformers import AutoConfig, AutoModelForCausalLM

from ckpt_ft.errors import UserError
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.model_config import stretch_positions

_SIZES = {
    "vocab_size": 80, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# Kinds of positions: rotary, learned, a precomputed table, ALiBi, none.
_UNLIMITED = [
    ("llama", "LlamaForCausalLM", {}),
    ("qwen3", "Qwen3ForCausalLM", {"head_dim": 8}),
    ("gpt_neox", "GPTNeoXForCausalLM", {}),
    ("gemma3_text", "Gemma3ForCausalLM", {"head_dim": 8, "sliding_window": 32}),
    ("phi3", "Phi3ForCausalLM", {}),
    ("bloom", "BloomForCausalLM", {"n_head": 2, "n_layer": 1}),
]
_LIMITED = [
    ("gpt2", "GPT2LMHeadModel", {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}),
    ("opt", "OPTForCausalLM", {"ffn_dim": 32, "word_embed_proj_dim": 16}),
    ("gptj", "GPTJForCausalLM", {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "rotary_dim": 4}),
    ("mpt", "MptForCausalLM", {"d_model": 16, "n_layers": 1, "n_heads": 2, "max_seq_len": 64}),
]


def _written(directory: Path, kind: str, named: str, more: dict[str, Any]) -> str:
    return write_config(directory, {"model_type": kind, "architectures": [named], **_SIZES, **more})


@pytest.mark.parametrize(("kind", "named", "more"), _UNLIMITED)
def test_model_without_positions_has_any_length(kind: str, named: str, more: dict[str, Any], tmp_path: Path) -> None:
    workload = load(TrainingSpec.of(_written(tmp_path, kind, named, more), seq_length=200), "cpu")
    assert workload.shape["seq_length"] == 200
    real = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**_SIZES, **more}))
    loss = real(input_ids=torch.arange(200)[None] % 64, labels=torch.arange(200)[None] % 64).loss
    assert torch.isfinite(loss)
    said = [note for note in workload.notes if "200 tokens" in note]
    assert said == (
        []
        if kind == "bloom"
        else [
            "sequences of 200 tokens: the model was trained on 64 positions; rotary positions run at any length, and "
            "--rope-scaling yarn stretches them"
        ]
    )


@pytest.mark.parametrize(("kind", "named", "more"), _LIMITED)
def test_position_table_limits_the_length(kind: str, named: str, more: dict[str, Any], tmp_path: Path) -> None:
    model = _written(tmp_path, kind, named, more)
    load(TrainingSpec.of(model, seq_length=64), "cpu")
    with pytest.raises(UserError, match="sequence length 65: .* has 64 positions"):
        load(TrainingSpec.of(model, seq_length=65), "cpu")
    with pytest.raises(UserError, match=f"a {kind} has no rotary positions to scale"):
        load(TrainingSpec.of(model, seq_length=64, rope_scaling="yarn"), "cpu")


def test_trace_has_the_scaled_positions(tmp_path: Path) -> None:
    model = _written(tmp_path, *_UNLIMITED[0])
    plain, scaled = (
        load(TrainingSpec.of(model, seq_length=256, rope_scaling=kind), "cpu") for kind in ("none", "yarn")
    )
    config: Any = scaled.model.config
    assert config.rope_parameters == {
        "rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
    }  # fmt: skip
    assert scaled.notes[0].endswith("trained on 64 positions; rope_scaling yarn with factor 4")
    # YaRN's attention factor scales cos and sin for any length, so the operators are the same
    assert [op.name for op in plain.trace(1).ops] == [op.name for op in scaled.trace(1).ops]


def test_sliding_window_layers_are_not_scaled() -> None:
    config = AutoConfig.for_model("gemma3_text", max_position_embeddings=64)
    stretch_positions(config, "linear", 128)
    assert config.rope_parameters["sliding_attention"]["rope_type"] == "default"
    assert config.rope_parameters["full_attention"]["factor"] == 2.0
    with pytest.raises(UserError, match="rope_type linear already; give none to keep it"):
        stretch_positions(config, "yarn", 128)
