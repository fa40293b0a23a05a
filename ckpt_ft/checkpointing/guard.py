"""What must not come together with a policy: the library's own checkpointing, switched on once the policy stands."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import nn

from ckpt_ft.errors import UserError
from ckpt_ft.policy import Policy

from .standin import StandIn

_flag = attrgetter("gradient_checkpointing")


class Guard(StandIn):
    """The model's forward. With gradients it refuses to run where transformers or diffusers would checkpoint as well.

    Their switches set a flag on every block, and nothing is called that could tell; so the flags are looked at,
    eighty in three microseconds.
    """

    def __init__(self, model: nn.Module, policy: Policy) -> None:
        super().__init__(model)
        self.policy = policy
        self.flagged: list[Any] = [
            module for module in model.modules() if isinstance(getattr(module, "gradient_checkpointing", None), bool)
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling() and any(map(_flag, self.flagged)):
            self._refuse(next(filter(_flag, self.flagged)))
        return self.forward(*args, **kwargs)

    def _refuse(self, module: nn.Module) -> None:
        raise UserError(
            f"policy '{self.policy}' stands on {type(self.module).__name__}, and its library's own gradient "
            f"checkpointing was switched on afterwards (in {type(module).__name__}): leave out "
            "gradient_checkpointing_enable() or gradient_checkpointing=True (TRL's configs turn it on by default), or "
            "remove the policy"
        )
