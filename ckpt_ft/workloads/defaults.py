"""What is taken where nothing is asked for; flags say it before torch is imported."""

from __future__ import annotations

SEQ_LENGTH = 1024  # tokens
LORA_DROPOUT = 0.05  # of the recipes that train transformers models
