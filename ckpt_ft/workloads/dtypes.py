"""The dtypes that settings name: apart from them, so that options can be read without torch."""

from __future__ import annotations

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MIXED_PRECISION = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
