"""Tiny checkpoints of known models: their configurations with small sizes, random weights, a tokenizer."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ckpt_ft.workloads.model_config import KnownModel, known_models
from ckpt_ft.workloads.transformers_models import class_and_task, task_of

_SIZES: dict[int, tuple[str, ...]] = {
    0: ("pad_token_id", "padding_idx", "num_nextn_predict_layers", "first_k_dense_replace"),
    1: ("bos_token_id", "n_group", "topk_group", "max_window_layers"),
    2: (
        "eos_token_id", "num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "encoder_layers",
        "decoder_layers", "num_key_value_heads", "kv_n_heads", "num_experts_per_tok", "moe_k", "moe_top_k",
        "linear_num_key_heads",
    ),
    4: (
        "num_attention_heads", "n_head", "n_heads", "num_experts", "num_local_experts", "moe_num_experts",
        "n_routed_experts", "linear_num_value_heads", "encoder_attention_heads", "decoder_attention_heads",
    ),
    8: (
        "head_dim", "d_kv", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
        "linear_key_head_dim", "linear_value_head_dim", "query_pre_attn_scalar", "mamba_d_state", "mamba_dt_rank",
        "global_head_dim",
    ),
    32: (
        "hidden_size", "d_model", "n_embd", "dim", "embed_dim", "out_hidden_size", "word_embed_proj_dim",
        "projection_dim", "pooler_hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size",
    ),
    64: (
        "intermediate_size", "ffn_dim", "hidden_dim", "d_ff", "ffn_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim",
    ),
    128: ("max_position_embeddings", "n_positions", "max_seq_len"),
    2048: ("vocab_size",),
}  # fmt: skip
_SMALL = {name: size for size, names in _SIZES.items() for name in names}
_OTHERS = {
    "layer_types": lambda kinds: [kinds[0], next((kind for kind in kinds if kind != kinds[0]), kinds[0])],
    "mrope_section": lambda parts: [2, 1, 1],
    "num_heads": lambda heads: [2] * len(heads) if isinstance(heads, list) else 4,
    "hidden_sizes": lambda sizes: [32] * len(sizes),
    "depths": lambda sizes: [1] * len(sizes),
    "partial_rotary_factor": lambda share: 0.5,
}


def families(*tasks: str) -> list[KnownModel]:
    """Returns the first known model of each type whose published class is trained on one of `tasks`."""
    found: dict[str, KnownModel] = {}
    for model in known_models().values():
        if (task := task_of(model.kind)) and task.name in tasks:
            found.setdefault(model.config["model_type"], model)
    return list(found.values())


def small(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration with two layers and small widths."""
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} if "vocab_size" in config else {}
    made = {}
    for name, value in {**config, **ids}.items():
        if name in ("_name_or_path", "output_attentions"):
            continue  # DBRX's parts write them and do not read them, with transformers 5.16
        if isinstance(value, dict):
            value = small(value)
        elif name in _OTHERS and value:
            value = _OTHERS[name](value)
        elif name == "num_key_value_heads" and value == config.get("num_attention_heads"):
            value = _SMALL["num_attention_heads"]
        elif isinstance(value, int):
            value = _SMALL.get(name, value)
        made[name] = value
    return made


def write_checkpoint(folder: Path, model: KnownModel, tokenizer: Path | None = None) -> str:
    """Saves the tiny model, with random weights, and the tokenizer; returns the directory."""
    from transformers import AutoConfig

    kind, _ = class_and_task(model.name, model.config)
    whole = AutoConfig.for_model(**model.config).to_dict()  # with what the published file leaves to the class
    parsed = AutoConfig.for_model(**small(whole))
    with torch.device("meta"):
        assert kind(parsed).num_parameters() < 2_000_000, f"{model.name}: a size is missing in _SIZES"
    torch.manual_seed(0)
    made = kind(parsed)
    made.save_pretrained(folder)
    for file in tokenizer.glob("*token*") if tokenizer else ():
        shutil.copy(file, folder)
    return str(folder)
