"""What a policy does not go with: the library's own checkpointing, and places where autograd takes no hooks."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import nn

from ckpt_ft.errors import UserError
from ckpt_ft.policy import Policy

from .parameters import has, modules_in
from .standin import StandIn

_flag = attrgetter("gradient_checkpointing")
_hooks_are_off = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message  # None where they are on


class Guard(StandIn):
    """The model's forward. With gradients it refuses to run where transformers or diffusers would checkpoint as well,
    and where nothing can be kept from being saved (inside of `torch.func.grad`).

    Their switches set a flag on every block, and nothing is called that could tell; so the flags are looked at,
    eighty in three microseconds.
    """

    def __init__(self, model: nn.Module, policy: Policy) -> None:
        super().__init__(model)
        self.policy = policy
        self.flagged: list[Any] = [
            module
            for module in modules_in(model)
            if has(module, "gradient_checkpointing") and isinstance(module.gradient_checkpointing, bool)
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            if any(map(_flag, self.flagged)):
                self._refuse(next(filter(_flag, self.flagged)))
            if (message := _hooks_are_off()) is not None:
                raise UserError(
                    f"policy '{self.policy}' on {type(self.module).__name__} needs autograd's saved-tensor hooks, and "
                    f"they are off here ({message.partition('. ')[0]}); remove the policy for this call"
                )
        return self.forward(*args, **kwargs)

    def _refuse(self, module: nn.Module) -> None:
        raise UserError(
            f"policy '{self.policy}' stands on {type(self.module).__name__}, and its library's own gradient "
            f"checkpointing was switched on afterwards (in {type(module).__name__}): leave out "
            "gradient_checkpointing_enable() or gradient_checkpointing=True (TRL's configs turn it on by default), or "
            "remove the policy"
        )
