"""Predicted largest batches: the tutorial's table on an A100-80GB, ResNet-50's on a T4, and a comparison of finders.

    python benchmarks/max_batch.py [table] [t4] [finders]

table    without checkpointing, under `full`, and under the plan's pick, for four models
t4       ResNet-50, fp32, 224 x 224, no optimizer, and the batches that were measured (docs/planning.md)
finders  against accelerate's find_executable_batch_size on the same budgeted CPU: steps run, OOMs and seconds
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from accelerate.utils import find_executable_batch_size
from transformers import LlamaConfig, LlamaForCausalLM

from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.memory.gpus import find_gpu
from ckpt_ft.memory.record.tracker import Tracker
from ckpt_ft.planning.batch_size import find_max_batch_size, predict_max_batch_size
from ckpt_ft.planning.budget import Candidate
from ckpt_ft.planning.plan import plan
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.units import MIB, format_bytes
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.workload import Workload

LORA: dict[str, Any] = {"dtype": "bfloat16", "lora_r": 16, "lora_dropout": 0.0}
TABLE = {
    "SD 2.1 U-Net": ("stabilityai/stable-diffusion-2-1", TrainingSpec.of(mixed_precision="bf16")),
    "SDXL U-Net": ("stabilityai/stable-diffusion-xl-base-1.0", TrainingSpec.of(mixed_precision="bf16")),
    "Llama-2-7B, LoRA 16, 1024 tokens": ("meta-llama/Llama-2-7b-hf", TrainingSpec.of(**LORA)),
    "ViT-L/16": ("google/vit-large-patch16-224", TrainingSpec.of(mixed_precision="bf16")),
}
MOST = 2048  # upper limit of the table's search
FOUND_ON_T4 = {"none": "177", "stages:3+4": "205", "full": "256 (the most that was tried)"}


def table() -> None:
    """`none` and `full` are planned separately, up to `MOST`; the pick's row shows its policy."""
    gpu = find_gpu("a100-80gb")
    print("| model | none | full | pick | samples/s: full | pick |\n|---|---:|---:|---|---:|---:|")
    for title, (name, settings) in TABLE.items():
        workload = load(settings.edit(model=name), gpu)

        def best(policies: list[str] | None, workload: Workload = workload) -> Candidate:
            return plan(workload, policies=policies, max_batch_size=MOST, jobs=0).best

        none, full, pick = best(["none"]), best(["full"]), best(None)
        batches = [f"{row.batch}+" if row.batch == MOST else str(row.batch) for row in (none, full, pick)]
        speeds = [f"{row.samples_per_second / none.samples_per_second:.2f}" for row in (full, pick)]
        print(
            f"| {title} | {batches[0]} | {batches[1]} | {pick.policy}, {batches[2]} | {' | '.join(speeds)} |",
            flush=True,
        )


def t4() -> None:
    gpu = find_gpu("t4")
    workload = load(TrainingSpec.of("microsoft/resnet-50", optimizer="none", max_grad_norm=0.0), gpu)
    print("| policy | found by trying | predicted: reserved bytes fit | predicted: runs at all | waits a step |")
    print("|---|---:|---:|---:|---:|")
    for policy, tried in FOUND_ON_T4.items():
        found = predict_max_batch_size(workload, policy, margin=0, max_batch_size=512)
        print(f"| {policy} | {tried} | {found.batch} | {found.last} | {found.retries} |", flush=True)


def finders() -> None:
    config = LlamaConfig(
        vocab_size=2048, hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).train()

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, size: int) -> None:
        ids = torch.zeros(size, 128, dtype=torch.long)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        model.zero_grad()

    def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.0)

    print("| budget | policy | finder | batch | steps run | OOMs | seconds |\n|---|---|---|---:|---:|---:|---:|")
    for budget, policy in ((150 * MIB, "none"), (150 * MIB, "full"), (400 * MIB, "none"), (400 * MIB, "full")):
        apply_policy(model, policy)
        began = time.perf_counter()
        ours = find_max_batch_size(
            model,
            lambda size: lambda m, o: step(m, o, size),
            budget,
            make_optimizer=make_optimizer,
            max_batch_size=256,
        )
        ooms = sum(not trial.fits for trial in ours.trials)
        row = f"| {format_bytes(budget)} | {policy} |"
        print(
            f"{row} ckpt_ft | {ours.batch} | {len(ours.trials)} | {ooms} | {time.perf_counter() - began:.1f} |",
            flush=True,
        )

        tried: list[int] = []

        @find_executable_batch_size(starting_batch_size=256)
        def shrink(size: int) -> int:
            tried.append(size)  # noqa: B023  called before the loop goes on
            optimizer = make_optimizer(model)
            for _ in range(2):
                model.zero_grad()
                with Tracker(model, optimizer, limit=budget, ops=False):  # noqa: B023
                    step(model, optimizer, size)
            return size

        began = time.perf_counter()
        batch = shrink()
        seconds = time.perf_counter() - began
        print(f"{row} accelerate | {batch} | {len(tried) + 1} | {len(tried) - 1} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    for part in sys.argv[1:] or ("table", "t4", "finders"):
        print(f"torch {torch.__version__}: {part}\n")
        {"table": table, "t4": t4, "finders": finders}[part]()
        print()
