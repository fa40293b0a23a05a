"""The three ways of fine-tuning that people compare: all weights, LoRA, and LoRA on weights in 4 bits."""

from __future__ import annotations

from ckpt_ft.errors import UserError

from .defaults import LORA_R
from .training_spec import TrainingSpec

METHODS = ("full", "LoRA", "QLoRA")


def method_of(spec: TrainingSpec, method: str) -> TrainingSpec:
    """`spec` with a method of METHODS; the rank is the spec's own, or the recipes' default.

    Raises:
        UserError: an unknown method.
    """
    name = named_method(method)
    if name == "full":
        return spec.edit(lora_r=0, load_in_4bit=False, load_in_8bit=False, double_quant=False, prepare_kbit=False)
    four = {"load_in_4bit": name == "QLoRA", "load_in_8bit": False}
    return spec.edit(lora_r=spec.adapter.lora_r or LORA_R, **four)


def named_method(method: str) -> str:
    """The member of METHODS that `method` spells in any case; raises UserError if there is none."""
    kinds = {name.lower(): name for name in METHODS}
    if method.lower() not in kinds:
        raise UserError(f"method '{method}': choose from {', '.join(METHODS)}")
    return kinds[method.lower()]
