"""The optimizers that a workload can name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn


def optimizer_maker(name: str) -> Callable[[nn.Module], Any] | None:
    """model -> the optimizer of `settings.OPTIMIZERS` called `name` over its trainable parameters; None for "none"."""
    return None if name == "none" else partial(make_optimizer, name=name)


def make_optimizer(model: nn.Module, name: str) -> Any:
    """The optimizer called `name` over the trainable parameters of `model`."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    if name == "sgd":
        return torch.optim.SGD(trainable, lr=1e-2)
    if name == "adafactor":
        from transformers import Adafactor

        return Adafactor(trainable, scale_parameter=False, relative_step=False, lr=1e-4)
    if name == "adamw_8bit":
        from ckpt_ft.standins.adamw_8bit import AdamW8bit

        return AdamW8bit(trainable, lr=1e-4)
    return torch.optim.AdamW(trainable, lr=1e-4, fused=True if name == "adamw_fused" else None)
