"""What keeps most weights frozen: 4-bit layers and LoRA adapters, on a model that may be on the meta device."""

from __future__ import annotations

from typing import Any

import torch

from ckpt_ft.errors import UserError, one_line

from .settings import DTYPES, LORA_DROPOUT, Settings


def adapt(model: Any, settings: Settings) -> Any:
    """`model` with 4-bit weights and LoRA adapters (fp32 on a half-precision base, as peft makes them), if asked."""
    if settings.load_in_4bit:
        from ckpt_ft.standins.nf4 import prepare_kbit, to_nf4

        to_nf4(model, torch.bfloat16 if settings.dtype == "float32" else DTYPES[settings.dtype])
        if settings.prepare_kbit:
            prepare_kbit(model)
    if not settings.lora_r:
        return model
    from peft import LoraConfig, get_peft_model

    rank, dropout = settings.lora_r, settings.lora_dropout
    lora = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=LORA_DROPOUT if dropout is None else dropout,
        target_modules=list(settings.lora_targets) or "all-linear",
    )
    try:
        with torch.device("meta"):
            adapted = get_peft_model(model, lora)
    except ValueError as error:
        raise UserError(f"LoRA targets {', '.join(settings.lora_targets)}: {one_line(error, 200)}") from error
    if settings.dtype != "float32":
        for p in adapted.parameters():
            if p.requires_grad:
                p.data = p.data.float()
    return adapted.train()


def notes_on(settings: Settings) -> tuple[str, ...]:
    """Which of two ways was taken where users may expect the other, one sentence each."""
    if not settings.load_in_4bit:
        return ()
    if settings.prepare_kbit:
        return ("4 bits: embeddings, norms and head in float32, as peft.prepare_model_for_kbit_training leaves them",)
    return (f"4 bits: embeddings, norms and head in {settings.dtype}, as loaded, without peft's k-bit preparation",)
