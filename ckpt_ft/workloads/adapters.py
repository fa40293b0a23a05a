"""What keeps most weights frozen: 4-bit layers and LoRA adapters, on a model that may be on the meta device."""

from __future__ import annotations

from typing import Any

import torch

from ckpt_ft.errors import UserError, one_line

from .settings import DTYPES, Settings


def adapt(model: Any, settings: Settings) -> Any:
    """`model` with 4-bit weights and LoRA adapters (fp32 on a half-precision base, as peft makes them), if asked."""
    if settings.load_in_4bit:
        from ckpt_ft.standins.nf4 import to_nf4

        to_nf4(model, DTYPES[settings.dtype])
    if not settings.lora_r:
        return model
    from peft import LoraConfig, get_peft_model

    targets = list(settings.lora_targets) or "all-linear"
    try:
        with torch.device("meta"):
            adapted = get_peft_model(
                model, LoraConfig(r=settings.lora_r, lora_alpha=2 * settings.lora_r, target_modules=targets)
            )
    except ValueError as error:
        raise UserError(f"--lora-targets {' '.join(settings.lora_targets)}: {one_line(error, 200)}") from error
    if settings.dtype != "float32":
        for p in adapted.parameters():
            if p.requires_grad:
                p.data = p.data.float()
    return adapted.train()
