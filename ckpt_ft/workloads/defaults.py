"""What is taken where nothing is asked for; flags say it before torch is imported."""

from __future__ import annotations

SEQ_LENGTH = 1024  # tokens
LORA_DROPOUT = 0.05  # of the recipes that train transformers models
# Towers of a vision-language model that `--train_towers` names.
TRAINED_TOWERS = {"language": ("language",), "vision": ("vision",), "both": ("language", "vision")}
