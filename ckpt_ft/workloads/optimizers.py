"""The optimizers that a workload can name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn


def optimizer_maker(name: str, ema: bool = False) -> Callable[[nn.Module], Any] | None:
    """model -> the optimizer of `settings.OPTIMIZERS` called `name` over its trainable parameters; None for "none".

    ema: a moving average follows its steps.
    """
    if name == "none":
        return None
    make = partial(make_optimizer, name=name)
    return (lambda model: Averaged(make(model))) if ema else make


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


class Averaged:
    """An optimizer with a moving average of its parameters, as diffusers' EMAModel makes it: one after another."""

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float = 0.9999) -> None:
        self.optimizer, self.decay = optimizer, decay
        self.param_groups = optimizer.param_groups

    @torch.no_grad()
    def step(self) -> None:
        """The optimizer's step, then the average's, which is part of the optimizer's state."""
        self.optimizer.step()
        parameters = [p for group in self.param_groups for p in group["params"]]
        average: dict[int, torch.Tensor] = self.optimizer.state["average"]  # type: ignore[index]  # any key is one
        for at, parameter in enumerate(parameters):
            if at not in average:
                average[at] = torch.empty_like(parameter, dtype=torch.float32)
            average[at].sub_((1 - self.decay) * (average[at] - parameter))
