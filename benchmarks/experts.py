"""Full training of a mixture of experts under FSDP2: the step of prime-rl's published benchmark, traced.

    python benchmarks/experts.py

The row (prime-rl, benchmarks/baselines): Qwen3-30B-A3B on eight H200, every block checkpointed, experts by grouped
products, the loss in chunks, two micro-batches of 1 x 16,384 tokens. Assumed: fp32 weights and Adam, bf16 computation,
and a reduction of the gradients after each micro-batch.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.spec.launch import Launch
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.workload import update

NAME = "Qwen3-30B-A3B, 8 H200, 2 x 1 x 16384, full"
RESERVED, SECONDS = 74.588, 7.401  # GiB of `max_memory_reserved`, seconds of the step


def trace() -> StepTrace:
    """The step of one of the eight ranks."""
    launch = Launch("fsdp2", 8, mixed_precision="bf16")
    spec = TrainingSpec.of(
        "Qwen/Qwen3-30B-A3B", seq_length=16384, mixed_precision="bf16", attn_implementation="flash_attention_2",
        launch=launch,
    )  # fmt: skip
    workload = load(spec, "h200")
    apply_policy(workload.model, "full,head")
    batch = workload.make_batch(1, None)

    def step(model: nn.Module, optimizer: Any) -> None:
        for _ in range(2):
            loss = workload.loss_of(model, dict(batch))
            loss.backward()
            del loss
        update(model, optimizer, 1.0)

    return replace(workload, loop=lambda samples, length: step).trace_of([step] * 2)


if __name__ == "__main__":
    found = trace()
    print(f"{NAME}: {found.peak_reserved / 2**30:.2f} GiB reserved (published {RESERVED}), "
          f"{found.seconds:.3f} s (published {SECONDS})")  # fmt: skip
