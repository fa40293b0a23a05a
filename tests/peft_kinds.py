"""The kinds of PEFT adapters, each with the settings that it needs for a tiny Llama."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from peft import PeftType
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from versions import is_older

from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.workloads.adapters import adapt

TARGETS = {"target_modules": ["q_proj", "v_proj"]}
# settings of a kind in addition to the modules that it adapts
KINDS: dict[str, dict[str, Any]] = {
    "ADALORA": {**TARGETS, "total_step": 10},
    "ADAPTION_PROMPT": {"adapter_layers": 2, "adapter_len": 4},
    "BOFT": {**TARGETS, "boft_block_size": 4},
    "C3A": {**TARGETS, "block_size": 64},
    "IA3": {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "OFT": {**TARGETS, "oft_block_size": 4, "r": 0},
    "VBLORA": {**TARGETS, "vector_length": 64},
    "SHADOW": {"r": 8},  # adapts whole blocks
    "TRAINABLE_TOKENS": {"token_indices": [1, 2, 3]},
}


def configuration(kind: str) -> dict[str, Any]:
    if kind not in PEFT_TYPE_TO_CONFIG_MAPPING:
        pytest.skip(f"an older PEFT, without {kind}")
    if kind == "SHIRA" and is_older("peft", "0.21"):
        pytest.skip("an older PEFT, whose SHiRA reads the values of a mask")
    fields = {field.name for field in dataclasses.fields(PEFT_TYPE_TO_CONFIG_MAPPING[kind])}
    given = KINDS.get(kind) or (TARGETS if "target_modules" in fields else {})
    if "num_virtual_tokens" in fields:
        given = {**given, "num_virtual_tokens": 4}
    return {"peft_type": kind, "task_type": "CAUSAL_LM", **given}


LORA: dict[str, Any] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, **TARGETS}
BLOCKS = {"target_modules_bd_a": ["q_proj"], "target_modules_bd_b": ["v_proj"], "nblocks": 2}
LORAS: dict[str, dict[str, Any]] = {
    "alora": {"alora_invocation_tokens": [5, 6]}, "bdlora": {"use_bdlora": BLOCKS}, "dora": {"use_dora": True},
    "kasa": {"kasa_config": {}}, "mica": {"init_lora_weights": "mica"}, "velora": {"velora_config": {}},
}  # fmt: skip
KNOWN = (*sorted({kind.value for kind in PeftType} - {"XLORA"}), *LORAS)  # X-LoRA combines existing adapters


def adapted(kind: str, dtype: torch.dtype = torch.float32, layers: int = 3) -> tuple[nn.Module, dict[str, Tensor]]:
    """Returns a tiny Llama with adapters after initialization, where many would do nothing, and a batch."""
    given = {**LORA, **LORAS[kind]} if kind in LORAS else configuration(kind)
    fields = {field.name for field in dataclasses.fields(PEFT_TYPE_TO_CONFIG_MAPPING[given["peft_type"]])}
    if set(given) - fields:
        pytest.skip(f"an older PEFT, without {kind}")
    dropouts = {name: 0.1 for name in fields if "dropout" in name} if dtype is torch.float32 else {}
    shape = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=layers, num_attention_heads=4, vocab_size=96,
        num_key_value_heads=2, max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    settings = TrainingSpec.of(peft={**given, **dropouts}, dtype=str(dtype).removeprefix("torch."))
    model = adapt(LlamaForCausalLM(shape).to(dtype), settings)  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.02 * torch.randn_like(parameter))
    ids = torch.arange(2 * 48).view(2, 48) % 96
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    if given["peft_type"] in ("MULTITASK_PROMPT_TUNING", "POLY"):
        batch["task_ids"] = torch.zeros(2, dtype=torch.long)
    return model, batch
