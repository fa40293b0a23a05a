"""prime-rl's benchmark steps: Qwen3 under FSDP2, every block checkpointed and compiled, and a mixture of experts.

prime-rl (its repository, benchmarks/baselines and benchmarks/scripts/run_single_benchmark.py, January 2026): fp32
parameters, gradients and Adam states, bf16 computation, two micro-batches of one row, FlashAttention-2 on an A6000 and
FlashAttention-3 on an H100, expandable segments. `sft` computes the loss of each token from fp32 logits; its loop
deletes the name of the logits before the backward, but a dictionary still contains them. `rl` computes the loss
in chunks; here it is that of ordinary training under the policy `head`, without what reinforcement learning adds.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.memory.distributed.group import rank_of
from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.spec.launch import Launch
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.workload import update

ROWS = Path(__file__).parent / "data" / "prime_rl.csv"


@dataclass(frozen=True)
class Row:
    """A published step: GiB of `max_memory_reserved`, and the mean seconds."""

    kind: str
    model: str
    tokens: int
    gpus: int
    gpu: str
    checkpointing: str
    reserved_gib: float
    seconds: float

    @property
    def name(self) -> str:
        return (
            f"{self.model.partition('/')[2]}, {self.kind}, {self.gpus} {self.gpu.upper()}, 2 x 1 x {self.tokens}, "
            f"`{self.checkpointing}`"
        )

    def trace(self) -> StepTrace:
        flash = 3 if self.gpu == "h100" and self.kind != "compiled" else 2
        return trace(self.model, self.tokens, self.gpus, self.gpu, self.checkpointing, self.kind, flash)


def rows(*kinds: str) -> Iterator[Row]:
    """The rows of these kinds; those of "compiled" were seen first."""
    with ROWS.open(encoding="utf-8") as file:
        for cells in csv.DictReader(file):
            numbers = {name: int(cells[name]) for name in ("tokens", "gpus")}
            measured = {name: float(cells[name]) for name in ("reserved_gib", "seconds")}
            if cells["kind"] in kinds:
                yield Row(**{**cells, **numbers, **measured})  # type: ignore[arg-type]


def trace(
    name: str, tokens: int, gpus: int, gpu: str, checkpointing: str = "full", kind: str = "sft", flash: int = 2
) -> StepTrace:
    """One rank's step. flash: version of FlashAttention."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    spec = TrainingSpec.of(name, seq_length=tokens, attn_implementation=f"flash_attention_{flash}")
    model: Any = load(spec, gpu).model
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    apply_policy(model, f"{checkpointing},head" if kind == "rl" else checkpointing)
    for block in model.model.layers:
        block.compile()

    def sharded(model: Any) -> torch.optim.Optimizer:
        for block in model.model.layers:
            fully_shard(block, mesh=mesh, mp_policy=precision)
        fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
        return torch.optim.AdamW(model.parameters(), fused=True)

    def step(model: Any, optimizer: Any) -> None:
        ids = torch.zeros(1, tokens, dtype=torch.long)
        labels = ids.clone()
        for _ in range(2):
            if kind != "rl":
                out = {"logits": model(input_ids=ids, use_cache=False).logits.float()}
                loss = functional.cross_entropy(out["logits"].flatten(0, 1), labels.flatten(), reduction="none").mean()
            else:
                loss = model(input_ids=ids, labels=labels, use_cache=False).loss
            (loss / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    with rank_of(gpus) as mesh:
        found = trace_step(model, step, make_optimizer=sharded, device=gpu)
    return replace(found, alloc_conf="expandable_segments:True")


def trace_of_experts() -> StepTrace:
    """Qwen3-30B-A3B on eight H200: the step of one rank, with grouped products and the loss in chunks.

    Assumed: fp32 weights and Adam, bf16 computation, and a reduction of the gradients after each micro-batch.
    """
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
