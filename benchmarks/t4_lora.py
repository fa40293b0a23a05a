"""Traces of published LoRA steps on a Tesla T4.

The rows are benchmarks/data/t4_lora_steps.csv, whose README describes the loop.
Models are built from the numbers of the rows, on the meta device, offline.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.standins.quantised_layers import prepare_kbit, to_nf4
from ckpt_ft.units import MIB

ROWS = Path(__file__).resolve().parent / "data" / "t4_lora_steps.csv"
PHASES = ("forward", "backward", "optimizer")


def published() -> list[dict[str, str]]:
    """Returns the rows of the CSV."""
    with ROWS.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def efficient_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> Any:
    """SDPA with the memory-efficient kernel only; keys and values are repeated for all query heads."""
    groups = query.size(1) // key.size(1)
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None
        )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("sdpa_efficient", efficient_attention)
AttentionMaskInterface.register("sdpa_efficient", sdpa_mask)


def build(row: dict[str, str]) -> nn.Module:
    """Returns the row's model with its adapters, on the meta device."""
    theirs = {"num_layers": "num_hidden_layers", "num_kv_heads": "num_key_value_heads"}
    ours = (
        "hidden_size",
        "num_layers",
        "num_attention_heads",
        "num_kv_heads",
        "intermediate_size",
        "vocab_size",
        "head_dim",
    )
    kind = "qwen2" if row["model_id"].startswith("Qwen/Qwen2") else "llama"  # Qwen2 has biases on q, k and v
    sizes = {theirs.get(name, name): int(row[name]) for name in ours}
    config = AutoConfig.for_model(
        kind, **sizes, tie_word_embeddings=row["tie_word_embeddings"] == "true", use_cache=False
    )
    rank = int(row["lora_rank"])
    lora = LoraConfig(
        r=rank, lora_alpha=2 * rank, task_type="CAUSAL_LM", target_modules=row["lora_targets"].split("|")
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float16, attn_implementation=row["attention"])
        if row["quantization"] == "nf4":
            model = prepare_kbit(to_nf4(model))  # as the published runs did
        model = get_peft_model(model, lora)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    model.base_model.model.activation_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    return model.train()


def trace(row: dict[str, str]) -> StepTrace:
    """Traces the row's step for its GPU."""
    model = build(row)
    shape = int(row["batch_size"]), int(row["seq_len"])
    batch = torch.zeros(shape, dtype=torch.long)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=True)
        out = model(input_ids=batch, labels=batch)
        out.loss.backward()
        optimizer.step()

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    return trace_step(model, step, make_optimizer=adamw, device="t4")


def errors(row: dict[str, str], trace: StepTrace) -> dict[str, float]:
    """Returns signed relative errors: predicted over published, minus one."""
    have = {"allocated": trace.peak_allocated, "reserved": trace.peak_reserved}
    have |= {phase: trace.peaks[phase] for phase in PHASES}
    return {name: nbytes / MIB / float(row[f"peak_{name}_mib"]) - 1 for name, nbytes in have.items()}


def label(row: dict[str, str]) -> str:
    """Returns the name of one row."""
    weights = "nf4" if row["quantization"] == "nf4" else "fp16"
    return f"{row['model_id'].split('/')[1]} {weights} {row['attention']} {row['batch_size']}x{row['seq_len']}"
