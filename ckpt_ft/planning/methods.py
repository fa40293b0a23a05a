"""The ways of fine-tuning that people compare: all weights, LoRA, LoRA on weights in 4 bits, states on the host."""

from __future__ import annotations

from typing import Any

from ckpt_ft.errors import UserError
from ckpt_ft.spec.defaults import LORA_R
from ckpt_ft.spec.flags import Edit
from ckpt_ft.spec.optimizers import OFFLOADING
from ckpt_ft.spec.training_spec import TrainingSpec

METHODS: dict[str, dict[str, Any]] = {
    "full": {"lora_r": 0, "load_in_4bit": False, "double_quant": False, "prepare_kbit": False, "load_in_8bit": False},
    "LoRA": {"lora_r": LORA_R, "load_in_4bit": False, "load_in_8bit": False},
    "QLoRA": {"lora_r": LORA_R, "load_in_4bit": True, "load_in_8bit": False},
}


def method_of(spec: TrainingSpec, method: str) -> TrainingSpec:
    """`spec` with a method of METHODS; the rank is the spec's own, or the recipes' default."""
    rank = {"lora_r": spec.adapter.lora_r} if spec.adapter.lora_r and METHODS[method]["lora_r"] else {}
    return spec.edit(**METHODS[method] | rank)


def named_method(method: str) -> str:
    """The member of METHODS that `method` spells in any case; raises UserError if there is none."""
    found = next((name for name in METHODS if name.lower() == method.lower()), "")
    if not found:
        raise UserError(f"method '{method}': choose from {', '.join(METHODS)}")
    return found


def offloaded(spec: TrainingSpec) -> Edit | None:
    """The edit that puts AdamW's states into host memory, for one process that trains all weights; None for others."""
    launched = spec.launch.launch is not None or spec.launch.launches
    if spec.optimizer.name not in ("adamw", "adamw_fused") or spec.adapter.trains or launched:
        return None
    if spec.precision.mixed_precision == "fp16":
        return None
    name = OFFLOADING["states" if spec.data.accumulation > 1 else "gradients"]
    return Edit({"optimizer": name, "max_grad_norm": 0.0})
