"""Bytes that each policy keeps between forward and backward, and the step's peak, predicted without a GPU.

    python benchmarks/policy_memory.py [--device a100-80gb] [--models NAME ...] [--json FILE]

`kept` is what forward leaves for backward (tensor bytes of activations alive when backward begins), `peak` the most
that is allocated in the step, as CUDA's caching allocator counts it. GiB = 2**30 bytes.
"""

from __future__ import annotations

import argparse
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from ckpt_ft.checkpointing.apply import apply_policy, remove_policy
from ckpt_ft.errors import UserError, run
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.units import GIB
from ckpt_ft.workloads.load import load

BF16 = {"dtype": "bfloat16"}
LORA = {"dtype": "float16", "lora_r": 16, "lora_dropout": 0.0}
# name -> (Hub id, batch size, settings)
WORKLOADS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "Llama-7B": ("meta-llama/Llama-2-7b-hf", 1, {**BF16, "seq_length": 2048}),
    "Qwen-1.5B LoRA": ("Qwen/Qwen2.5-1.5B", 2, {**LORA, "seq_length": 1024}),
    "SDXL U-Net": ("stabilityai/stable-diffusion-xl-base-1.0", 1, BF16),
    "SD 1.5 U-Net": ("stable-diffusion-v1-5/stable-diffusion-v1-5", 4, {"mixed_precision": "fp16"}),
    "ViT-L": ("google/vit-large-patch16-224", 32, {"mixed_precision": "bf16"}),
    "ResNet-50": ("microsoft/resnet-50", 32, {}),
}
POLICIES = ("none", "full", "save:attention+matmul+conv", "pointwise")
HEAD_POLICIES = ("full,head", "pointwise,head")  # for language models


def measure(name: str, device: str) -> dict[str, dict[str, int]]:
    """Returns kept bytes and peak bytes by policy."""
    model_id, batch, settings = WORKLOADS[name]
    workload = load(TrainingSpec.of(model_id, **settings), "t4")
    policies = POLICIES + (HEAD_POLICIES if workload.kind == "causal-lm" else ())
    rows: dict[str, dict[str, int]] = {}
    for policy in policies:
        apply_policy(workload.model, policy)
        trace = replace(workload, device=device).trace(batch)
        remove_policy(workload.model)
        rows[policy] = {"kept": kept_bytes(trace), "peak": trace.peak_allocated}
    return rows


def kept_bytes(trace: StepTrace) -> int:
    """Returns the bytes of activations that are alive when the measured step's backward begins."""
    begins = next(at for at, name in trace.marks if name == "backward" and at >= trace.start)
    return sum(s.nbytes for s, _ in trace.live_at(begins - 1) if s.category == "activations")


def table(name: str, rows: dict[str, dict[str, int]]) -> str:
    """Returns a Markdown table of one workload."""
    model_id, batch, settings = WORKLOADS[name]
    lines = [f"{name}: `{model_id}`, batch {batch}, {settings or 'fp32'}", ""]
    lines += ["| policy | kept GiB | / none | peak GiB | / none |", "|---|---|---|---|---|"]
    for policy, row in rows.items():
        cells = [f"{row[key] / GIB:.2f} | {row[key] / rows['none'][key]:.2f}" for key in ("kept", "peak")]
        lines.append(f"| {policy} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Traces and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="a100-80gb")
    parser.add_argument("--models", nargs="+", default=list(WORKLOADS))
    parser.add_argument("--json", type=Path, help="also write the bytes")
    args = parser.parse_args()
    if unknown := set(args.models) - set(WORKLOADS):
        raise UserError(f"--models: no workload {', '.join(sorted(unknown))}; there are {', '.join(WORKLOADS)}")
    warnings.filterwarnings("ignore")
    print(f"predicted for {args.device}; torch {torch.__version__}, transformers {transformers.__version__}")
    results = {}
    for name in args.models:
        results[name] = measure(name, args.device)
        print("\n" + table(name, results[name]), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"device": args.device, "bytes": results}, indent=1) + "\n")


if __name__ == "__main__":
    run(main)
