"""Rejects what a policy cannot work with: a library's own checkpointing, disabled hooks, and nn.DataParallel."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import nn

from ckpt_ft.compat.autograd import TransformType, transform_level, transforms
from ckpt_ft.compat.modules import REPLICATE
from ckpt_ft.errors import UserError
from ckpt_ft.policy import Policy

from .dropped_tensors import same
from .module_contents import has, modules_in
from .standin import StandIn

_flag = attrgetter("gradient_checkpointing")


def _is_batched() -> bool:
    """Whether torch.vmap is among the active transforms of torch.func."""
    stack = transforms() or []
    return any(one.key() == TransformType.Vmap for one in stack)


class Guard(StandIn):
    """Replaces the model's forward: counts steps for verification and rejects what a policy cannot be combined with.

    If `refuses` is true, a forward pass with gradients raises UserError if transformers or diffusers would checkpoint
    as well, or if autograd accepts no saved-tensor hooks (inside `torch.func.grad`).

    nn.DataParallel is always rejected: its replicas share the stand-ins, and would use the original's parameters.

    The libraries' switches only set a flag on every block and call nothing that could be intercepted, so each forward
    pass reads the flags (80 flags take 3 us).
    """

    def __init__(self, model: nn.Module, policy: Policy, refuses: bool) -> None:
        super().__init__(model)
        self.policy, self.refuses = policy, refuses
        self.flagged: list[Any] = [
            module
            for module in modules_in(model)
            if has(module, "gradient_checkpointing") and isinstance(module.gradient_checkpointing, bool)
        ]

    def _put_on(self) -> None:
        super()._put_on()
        vars(self.module)[REPLICATE] = self._refuse_replicas
        self._index()  # before accelerate's compile_regions copies the model's attributes

    def remove(self) -> None:
        super().remove()
        self.module.__dict__.pop(REPLICATE, None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        verification = self.verification
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or verification.inside:
            return self.forward(*args, **kwargs)
        if transform_level() is not None and _is_batched():
            raise UserError(
                f"policy '{self.policy}' on {type(self.module).__name__} does not work inside of torch.vmap, whose "
                "tensors backward cannot run the model's blocks with; remove the policy for this call"
            )
        if self.refuses and any(map(_flag, self.flagged)):
            self._refuse(next(filter(_flag, self.flagged)))
        if self.refuses or self.policy.head:
            try:
                with torch.autograd.graph.saved_tensors_hooks(same, same):
                    pass
            except RuntimeError as error:
                raise self._without_hooks(str(error)) from error
        verification.begin_step()
        try:
            output = self.forward(*args, **kwargs)
            verification.read_flags_together(self.module, output)
        except RuntimeError as error:  # torch.func inside of a block
            if "saved tensor hooks" in str(error):
                raise self._without_hooks(str(error)) from error
            raise
        finally:
            verification.end_forward()
        return output

    def _without_hooks(self, message: str) -> UserError:
        return UserError(
            f"policy '{self.policy}' on {type(self.module).__name__} needs autograd's saved-tensor hooks, and they "
            f"are off here ({message.partition('. ')[0]}); remove the policy for this call"
        )

    def _refuse(self, module: nn.Module) -> None:
        raise UserError(
            f"policy '{self.policy}' is applied to {type(self.module).__name__}, and its library's own gradient "
            f"checkpointing was switched on afterwards (in {type(module).__name__}): leave out "
            "gradient_checkpointing_enable() or gradient_checkpointing=True (TRL's configs turn it on by default), or "
            "remove the policy"
        )

    def _refuse_replicas(self) -> nn.Module:
        raise UserError(
            f"policy '{self.policy}' on {type(self.module).__name__}: nn.DataParallel's replicas would run on the "
            "parameters of the first device; start one process for each GPU (torchrun, accelerate launch), or show "
            "one GPU (CUDA_VISIBLE_DEVICES=0)"
        )
