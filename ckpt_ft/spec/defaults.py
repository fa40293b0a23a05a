"""Defaults of settings that flags show before torch is imported."""

from __future__ import annotations

SEQ_LENGTH = 1024  # tokens
IMAGE_SIZE = (1024, 1024)  # width and height in pixels
LORA_R = 16  # where LoRA is asked for without a rank
LORA_DROPOUT = 0.05  # in the recipes that train transformers models; 0 in diffusion models
DEFAULT_GPU = "a100-80gb"  # where no GPU is named and none is at hand
# Towers of a vision-language model that `--train_towers` names.
TRAINED_TOWERS = {"language": ("language",), "vision": ("vision",), "both": ("language", "vision")}
