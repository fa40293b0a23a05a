"""Published steps of mixtures of experts, traced.

    python benchmarks/experts.py

prime-rl (its repository, benchmarks/baselines): Qwen3-30B-A3B on eight H200, every block checkpointed, experts by
grouped products, the loss in chunks, two micro-batches of 1 x 16,384 tokens. Assumed: fp32 weights and Adam, bf16
computation, and a reduction of the gradients after each micro-batch.

axolotl (its repository, examples/glm47-flash/qlora.yaml): GLM-4.7-Flash on one card of 48 GB, estimated as the
file says, with its evaluation, and as its comment says with adapters on the experts, too.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml
from peft.tuners.lora import layer
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.planning.estimate import Estimate, estimate
from ckpt_ft.spec.flags import fields_of
from ckpt_ft.spec.launch import Launch
from ckpt_ft.spec.training_file import read_training_file
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.workload import update


def prime_rl() -> StepTrace:
    """Traces the step of one of the eight ranks."""
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


# The settings of the example's file (axolotl, examples/glm47-flash/qlora.yaml) that affect the estimate.
FILE: dict[str, Any] = {
    "base_model": "zai-org/GLM-4.7-Flash", "load_in_4bit": True, "quantize_moe_experts": True, "val_set_size": 0.1,
    "plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"], "adapter": "qlora", "lora_r": 32,
    "lora_dropout": 0, "lora_target_modules": ["q_proj", "v_proj", "k_proj", "o_proj"], "sequence_len": 2048,
    "sample_packing": True, "gradient_accumulation_steps": 4, "micro_batch_size": 2, "optimizer": "adamw_torch_8bit",
    "bf16": "auto", "gradient_checkpointing": True, "attn_implementation": "flash_attention_2", "evals_per_epoch": 1,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"lora_target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


def axolotl(whole_products: bool = False, **more: Any) -> Estimate:
    """Estimates the run of axolotl's example, including its evaluation.

    Args:
        whole_products: whether PEFT multiplies the two factors of an adapter on experts before it adds them. Version
            0.20, which axolotl 0.19 pins, always does; version 0.21 does so for weights in 8-bit floats only.
        more: further settings of the file.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(yaml.safe_dump({**FILE, **more}))
        file.flush()
        given = fields_of({**read_training_file(file.name, "axolotl").flags, "device": "a6000"})
    spec = TrainingSpec.of(FILE["base_model"], **{name: value for name, value in given.items() if name != "model"})
    halves = ("bfloat16",) if whole_products else ()
    with patch.object(layer, "UPCAST_DTYPES", (*layer.UPCAST_DTYPES, *halves)):
        return estimate(spec)


# name -> GiB of `max_memory_reserved`, seconds of the step (0: not published), how it is traced
ROWS: dict[str, tuple[float, float, Callable[[], StepTrace | Estimate]]] = {
    "Qwen3-30B-A3B, 8 H200, 2 x 1 x 16384, full": (74.588, 7.401, prime_rl),
    "GLM-4.7-Flash, QLoRA, experts packed, 2 x 2048": (24, 0.0, axolotl),
    "the same, adapters on experts, too": (34, 0.0, partial(axolotl, whole_products=True, **EXPERTS)),
}


if __name__ == "__main__":
    for name, (gib, seconds, trace) in ROWS.items():
        found = trace()
        print(f"{name}: {found.peak_reserved / 2**30:.2f} GiB reserved (published {gib}), "
              f"{found.seconds:.3f} s (published {seconds or 'none'})")  # fmt: skip
    print(f"with PEFT 0.21, adapters on experts, too: {axolotl(**EXPERTS).peak_reserved / 2**30:.2f} GiB")
    for name, more in (("QLoRA", {}), ("adapters on experts, too", EXPERTS)):
        alone = axolotl(whole_products=True, val_set_size=0.0, **more)
        print(f"GLM-4.7-Flash, no evaluation, {name}: {alone.peak_reserved / 2**30:.2f} GiB")
