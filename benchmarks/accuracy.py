"""How far `trace_step` is from published measurements: a row for each, signed errors, median and worst.

    python benchmarks/accuracy.py                  # prints, and writes docs/accuracy.md
    python benchmarks/accuracy.py --rows 3 --no-write

Models are built from the numbers of benchmarks/data/t4_lora_steps.csv, on the meta device, offline; the training loop is
the one its README describes.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ckpt_ft.errors import run
from ckpt_ft.memory.fake import trace_step
from ckpt_ft.memory.nf4 import to_nf4
from ckpt_ft.memory.trace import StepTrace
from ckpt_ft.units import MIB

HERE = Path(__file__).parent
PHASES = ("forward", "backward", "optimizer")


def efficient_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
    """SDPA pinned to the memory-efficient kernel, keys and values repeated to the number of query heads."""
    groups = query.size(1) // key.size(1)
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("sdpa_efficient", efficient_attention)
AttentionMaskInterface.register("sdpa_efficient", sdpa_mask)


def build(row: dict[str, str]) -> nn.Module:
    """The row's model with its adapters, on the meta device."""
    names = {"hidden_size": "hidden_size", "num_layers": "num_hidden_layers", "num_attention_heads": "num_attention_heads",
             "num_kv_heads": "num_key_value_heads", "intermediate_size": "intermediate_size", "vocab_size": "vocab_size",
             "head_dim": "head_dim"}  # fmt: skip
    kind = "qwen2" if row["model_id"].startswith("Qwen/Qwen2") else "llama"  # Qwen2 has biases on q, k and v
    sizes = {theirs: int(row[ours]) for ours, theirs in names.items()}
    config = AutoConfig.for_model(kind, **sizes, tie_word_embeddings=row["tie_word_embeddings"] == "true", use_cache=False)
    rank = int(row["lora_rank"])
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, task_type="CAUSAL_LM", target_modules=row["lora_targets"].split("|"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float16, attn_implementation=row["attention"])
        if row["quantization"] == "nf4":
            model = to_nf4(model)
        model = get_peft_model(model, lora)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    model.base_model.model.activation_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    return model.train()


def trace(row: dict[str, str]) -> StepTrace:
    """The row's step, traced for its card."""
    model = build(row)
    shape, vocabulary = (int(row["batch_size"]), int(row["seq_len"])), int(row["vocab_size"])

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        batch = torch.randint(0, vocabulary, shape)
        optimizer.zero_grad(set_to_none=True)
        out = model(input_ids=batch, labels=batch)
        out.loss.backward()
        optimizer.step()

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    return trace_step(model, step, make_optimizer=adamw, device="t4")


def errors(row: dict[str, str], trace: StepTrace) -> dict[str, float]:
    """Signed relative errors: predicted over published, less one."""
    have = {"peak_allocated": trace.peak_allocated, "peak_reserved": trace.peak_reserved}
    have |= {f"peak_{phase}": trace.peaks[phase] for phase in PHASES}
    found = {name: have[name] / MIB / float(row[f"{name}_mib"]) - 1 for name in have}
    return {**found, "seconds": trace.seconds / float(row["step_seconds"]) - 1}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, help="only the first N rows")
    parser.add_argument("--no-write", action="store_true", help="leave docs/accuracy.md as it is")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    with (HERE / "data" / "t4_lora_steps.csv").open() as file:
        rows = list(csv.DictReader(file))[: arguments.rows]
    for row in rows:
        begin = time.perf_counter()
        step = trace(row)
        found = errors(row, step)
        took = time.perf_counter() - begin
        label = f"{row['model_id'].split('/')[1]:24s} {row['attention']:14s} {row['quantization']:4s} {row['batch_size']}x{row['seq_len']}"
        print(label, *(f"{k.removeprefix('peak_')} {100 * v:+.3f}%" for k, v in found.items()), f"{took:.1f}s", flush=True)
    return 0


if __name__ == "__main__":
    run(main)
