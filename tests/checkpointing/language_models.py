"""Tiny language models of a dozen architectures, and the numbers of one step for bitwise comparison."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCABULARY = 61
_COMMON = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2,
    "vocab_size": VOCABULARY, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED = {**_COMMON, "num_key_value_heads": 1}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_GROUPED},
    "qwen3": {**_GROUPED, "head_dim": 8},
    "mistral": {**_GROUPED, "sliding_window": 4},
    "gemma": {**_GROUPED, "head_dim": 8},
    "gpt2": {
        "n_embd": 16, "n_layer": 4, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": 32, "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "phi": {**_GROUPED},
    "opt": {
        **{k: v for k, v in _COMMON.items() if k != "intermediate_size"},
        "ffn_dim": 32,
        "word_embed_proj_dim": 16,
    },
    "bert": {**_COMMON},
    "t5": {
        "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 3, "num_heads": 2, "vocab_size": VOCABULARY,
        "pad_token_id": 0, "decoder_start_token_id": 0,
    },
    "mixtral": {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**_GROUPED, **_EXPERTS, "moe_intermediate_size": 8, "head_dim": 8},
    "mamba": {"hidden_size": 16, "num_hidden_layers": 4, "vocab_size": VOCABULARY, "state_size": 4},
    "jamba": {
        **_GROUPED, **_EXPERTS, "use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 1,
        "expert_layer_period": 2, "mamba_d_state": 4, "mamba_dt_rank": 4,
    },
}  # fmt: skip
_DROPOUT = (
    "attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "dropout", "dropout_rate", "hidden_dropout_prob",
    "attention_probs_dropout_prob", "hidden_dropout", "resid_dropout",
)  # fmt: skip


def make(name: str, variant: str = "plain") -> nn.Module:
    """Returns the model in train mode; `variant` is plain (no dropout), lora or dropout."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

    config = AutoConfig.for_model(name, **CONFIGS[name])
    for key in _DROPOUT:
        if key in config.to_dict():
            setattr(config, key, 0.1 if variant == "dropout" else 0.0)
    auto = {"bert": AutoModelForMaskedLM, "t5": AutoModelForSeq2SeqLM}.get(name, AutoModelForCausalLM)
    torch.manual_seed(0)
    model = auto.from_config(config)
    if variant == "lora":
        from peft import LoraConfig, get_peft_model

        targets = ["in_proj", "x_proj"] if name == "mamba" else "all-linear"
        model = get_peft_model(
            model,
            LoraConfig(
                r=2,
                target_modules=targets,
                lora_dropout=0.0 if "num_experts_per_tok" in CONFIGS[name] else 0.1,
                fan_in_fan_out=name == "gpt2",
            ),
        )
        for key, p in model.named_parameters():  # adapters start at zero, which would give half of them no gradient
            if "lora_B" in key:
                nn.init.normal_(p)
    return model.train()


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (2, 6), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def numbers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns what a step leaves: loss, gradients, buffers, random state."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(2)
    loss = model(**batch()).loss
    loss.backward()
    gradients = {f"gradient {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    buffers = {f"buffer {name}": b.clone() for name, b in model.named_buffers()}
    return {"loss": loss.detach(), "random": torch.get_rng_state(), **gradients, **buffers}


def differing(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    """Returns the names of values that are not bit-equal or are on one side only."""
    return [
        name
        for name in mine.keys() | theirs.keys()
        if name not in mine or name not in theirs or not torch.equal(mine[name], theirs[name])
    ]
