"""Published steps of mixtures of experts, traced.

    python benchmarks/experts.py

prime-rl (its repository, benchmarks/baselines): Qwen3-30B-A3B on eight H200, every block checkpointed, experts by
grouped products, the loss in chunks, two micro-batches of 1 x 16,384 tokens. Assumed: fp32 weights and Adam, bf16
computation, and a reduction of the gradients after each micro-batch.

axolotl (its repository, examples/glm47-flash/qlora.yaml): GLM-4.7-Flash on one card of 48 GB, traced as the file says,
with the plugin for the loss, and as its comment says with adapters on the experts, too.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Glm4MoeLiteConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.spec.launch import Launch
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.workload import update


def prime_rl() -> StepTrace:
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


def axolotl(plain_loss: bool = False, **more: Any) -> StepTrace:
    """The step of axolotl's example, `more` fields of its spec; the configuration's defaults are GLM-4.7-Flash's."""
    with tempfile.TemporaryDirectory() as folder:
        Glm4MoeLiteConfig(architectures=["Glm4MoeLiteForCausalLM"]).save_pretrained(folder)
        spec = TrainingSpec.of(
            folder, dtype="bfloat16", mixed_precision="bf16", load_in_4bit=True, double_quant=True,
            quantize_moe_experts=True, lora_r=32, lora_targets=("q_proj", "v_proj", "k_proj", "o_proj"),
            lora_dropout=0.0, seq_length=2048, rows="packed", batch_size=2, accumulation=4, optimizer="adamw_8bit",
            attn_implementation="flash_attention_2", cut_cross_entropy=not plain_loss, **more,
        )  # fmt: skip
        workload = load(spec, "a6000")
        apply_policy(workload.model, "full")
        return workload.trace(2)


EXPERTS: dict[str, Any] = {"lora_target_parameters": ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")}
# name -> GiB of `max_memory_reserved`, seconds of the step (0: not published), how it is traced
ROWS: dict[str, tuple[float, float, Callable[[], StepTrace]]] = {
    "Qwen3-30B-A3B, 8 H200, 2 x 1 x 16384, full": (74.588, 7.401, prime_rl),
    "GLM-4.7-Flash, QLoRA, experts packed, 2 x 2048": (24, 0.0, axolotl),
    "the same, adapters on experts, too": (34, 0.0, partial(axolotl, **EXPERTS)),
}


if __name__ == "__main__":
    for name, (gib, seconds, trace) in ROWS.items():
        found = trace()
        print(f"{name}: {found.peak_reserved / 2**30:.2f} GiB reserved (published {gib}), "
              f"{found.seconds:.3f} s (published {seconds or 'none'})")  # fmt: skip
    for name, more in (("QLoRA", {}), ("adapters on experts, too", EXPERTS)):
        print(f"GLM-4.7-Flash, plain loss, {name}: {axolotl(plain_loss=True, **more).peak_reserved / 2**30:.2f} GiB")
