"""Settings: how a model that is loaded by name is trained, as the options of `ckpt-ft` say it."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass

import torch

from ckpt_ft.errors import UserError
from ckpt_ft.memory.allocator.settings import AllocatorSettings
from ckpt_ft.memory.distributed.launch import Launch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MIXED_PRECISION = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
LORA_DROPOUT = 0.05  # of the recipes that train transformers models
OPTIMIZERS = ("adamw", "adamw_fused", "adamw_8bit", "adafactor", "sgd", "none")


@dataclass(frozen=True)
class Settings:
    """How the model is trained.

    Attributes:
        dtype: of the weights: float32, bfloat16 or float16.
        mixed_precision: autocast: no, bf16 or fp16.
        optimizer: one of `OPTIMIZERS`.
        lora_r: LoRA rank; 0 trains all weights.
        lora_targets: module names that get an adapter; () for every linear layer of the blocks.
        seq_length: tokens of a sequence (language models).
        resolution: pixels of an image's side; 0 for the model's own.
        frames: of a video; 0 for 49 of them.
        accumulation: micro-batches of a step.
        max_grad_norm: gradients are clipped to it; 0 for no clipping.
        attn_implementation: sdpa or eager; "" for what the model prefers.
        load_in_4bit: frozen weights in 4 bits, as bitsandbytes keeps them (NF4).
        launch: on how many processes; None for one.
        launches: to choose from, in a plan.
        alloc_conf: options of the caching allocator, as in PYTORCH_CUDA_ALLOC_CONF.
        prepare_kbit: embeddings, norms and head of a 4-bit model in float32, as peft.prepare_model_for_kbit_training
            leaves them; else as they are loaded.
        lora_dropout: in front of the adapters; None for the recipes' own: `LORA_DROPOUT`, none in diffusion models.
    """

    dtype: str = "float32"
    mixed_precision: str = "no"
    optimizer: str = "adamw_fused"
    lora_r: int = 0
    lora_targets: tuple[str, ...] = ()
    seq_length: int = 1024
    resolution: int = 0
    frames: int = 0
    accumulation: int = 1
    max_grad_norm: float = 1.0
    attn_implementation: str = ""
    load_in_4bit: bool = False
    launch: Launch | None = None
    launches: tuple[Launch, ...] = ()
    alloc_conf: str = ""
    prepare_kbit: bool = False
    lora_dropout: float | None = None

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("mixed precision", self.mixed_precision, MIXED_PRECISION)
        _one_of("optimizer", self.optimizer, OPTIMIZERS)
        _one_of("attention implementation", self.attn_implementation, ("", "sdpa", "eager"))
        AllocatorSettings.parse(self.alloc_conf)
        if self.seq_length < 2:
            raise UserError(f"sequence length {self.seq_length}: a sequence has at least 2 tokens")
        if self.lora_r < 0:
            raise UserError(f"LoRA rank {self.lora_r}: it is at least 1 (0 trains all weights)")
        if self.resolution < 0:
            raise UserError(f"resolution {self.resolution}: a number of pixels, or 0 for the model's own")
        if self.accumulation < 1:
            raise UserError(f"accumulation {self.accumulation}: a step has at least 1 micro-batch")
        if not 0 <= self.max_grad_norm < float("inf"):
            raise UserError(f"gradients clipped to {self.max_grad_norm}: a norm, or 0 for no clipping")
        if self.frames < 0:
            raise UserError(f"frames {self.frames}: a number of them, or 0 for 49")
        if self.load_in_4bit and not self.lora_r:
            raise UserError("4-bit weights cannot be trained themselves: give a LoRA rank too, 16 for example")
        if self.prepare_kbit and not self.load_in_4bit:
            raise UserError("k-bit preparation is of a model that is loaded in 4 bits: ask for both, or leave it out")
        if self.lora_dropout is not None and not 0 <= self.lora_dropout < 1:
            raise UserError(f"LoRA dropout {self.lora_dropout}: a share from 0 up to, but not including, 1")


def _one_of(what: str, given: str, allowed: Collection[str]) -> None:
    if given not in allowed:
        close = difflib.get_close_matches(given, list(allowed), n=1)
        raise UserError(
            f"{what} '{given}'" + (f"; did you mean '{close[0]}'?" if close else "") + f" ({', '.join(allowed)})"
        )
