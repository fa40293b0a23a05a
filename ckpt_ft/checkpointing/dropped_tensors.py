"""Saved-tensor hooks that drop what a run saves; the first tensor that backward asks for starts a second run.

The mechanism is that of `torch.utils.checkpoint` without reentrant autograd (its notes explain nesting, retained
graphs and backward inside of forward). It does less work for each saved tensor, of which a transformer block has 50:
it makes one object with a weak reference, and compares shape, dtype and device once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointError

from ckpt_ft.compat.autograd import graph_task, make_saved_tensor, pop_hooks, push_hooks, set_grad
from ckpt_ft.compat.compiler import uncompiled

_NO_TASK = -1
_grad_modes: list[bool] = []  # of the backwards with a second run in progress, innermost last


class RunComplete(Exception):
    """Raised to stop a second run once it has saved as many tensors as the first; holds the list of their slots."""


class _Slot:
    """Replaces a saved tensor in autograd; it has the tensor from recomputation until its use."""

    __slots__ = ("__weakref__", "device", "dtype", "shape", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.tensor: torch.Tensor | None = None


class DroppedTensors:
    """The tensors that one run saves. Subclasses define `repeat`, the second run."""

    def __init__(self) -> None:
        self.slots: list[weakref.ref[_Slot]] = []  # a slot dies with the node that saved its tensor
        self.task = _NO_TASK  # the backward for which the tensors were recomputed

    def repeat(self) -> None:
        """Repeat the first run; `RunComplete` stops it."""
        raise NotImplementedError

    def pack(self, tensor: torch.Tensor) -> _Slot:
        slot = _Slot(tensor)
        self.slots.append(weakref.ref(slot))
        return slot

    def unpack(self, slot: _Slot) -> torch.Tensor:
        task = graph_task()
        tensor = slot.tensor
        if tensor is None or task != self.task or task == _NO_TASK:
            _without_dynamo(self._recompute)
            self.task, tensor = task, slot.tensor
            assert tensor is not None
            if task == _NO_TASK:  # something reads a saved tensor outside of a backward
                for reference in self.slots:
                    if (other := reference()) is not None:
                        other.tensor = None
        slot.tensor = None
        return tensor

    def _recompute(self) -> None:
        slots, made, total = self.slots, 0, len(self.slots)

        def pack(tensor: torch.Tensor) -> torch.Tensor:  # must not refer to `self`: reference cycle
            nonlocal made
            tensor = tensor.detach() if tensor.requires_grad else tensor
            if made == total:  # the forward has caught `RunComplete` (a fast path with a fallback, a `finally`)
                return tensor
            if (slot := slots[made]()) is not None:
                if tensor.shape != slot.shape or tensor.dtype != slot.dtype or tensor.device != slot.device:
                    raise CheckpointError(
                        f"the second run of a checkpoint saved a tensor of {tuple(tensor.shape)} {tensor.dtype} on "
                        f"{tensor.device} where its first saved {tuple(slot.shape)} {slot.dtype} on {slot.device}: "
                        "it depends on state outside of it"
                    )
                slot.tensor = tensor
            made += 1
            if made == total:
                raise RunComplete(slots)
            return tensor

        grad = torch.is_grad_enabled()
        _grad_modes.append(grad)
        set_grad(True)
        push_hooks(pack, same)
        try:
            self.repeat()
        except RunComplete as complete:
            if complete.args[0] is not slots:
                raise
        finally:
            pop_hooks()
            set_grad(grad)
            _grad_modes.pop()
        if made != total:
            raise CheckpointError(
                f"the second run of a checkpoint saved {made} tensors for backward where its first saved "
                f"{total}: it depends on state outside of it"
            )


@uncompiled
def _without_dynamo(function: Callable[[], None]) -> None:
    """Call a function that compiled autograd must not trace."""
    function()


def same(tensor: torch.Tensor) -> torch.Tensor:
    """A hook that changes nothing."""
    return tensor


def saved_tensor(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Save `tensor` under the active hooks, as an autograd node does; return a function that checks and returns it."""
    if make_saved_tensor is not None:
        unpack: Callable[[], torch.Tensor] = make_saved_tensor(tensor, is_output=False).unpack
    else:
        out = _Saved.apply(torch.empty(0, requires_grad=True), tensor)  # its node forgets the tensor with it

        def unpack() -> torch.Tensor:
            saved: torch.Tensor = out.grad_fn.saved_tensors[0]
            return saved

    def as_in_backward() -> torch.Tensor:
        """Unpacks in the grad mode of backward, which shows a hook (`pointwise`) whether this is double backward."""
        grad = torch.is_grad_enabled()
        set_grad(_grad_modes[-1] if _grad_modes else grad)
        try:
            return unpack()
        finally:
            set_grad(grad)

    return as_in_backward


class _Saved(torch.autograd.Function):
    """Saves a tensor for a backward that never runs."""

    @staticmethod
    def forward(ctx: Any, empty: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return torch.empty_like(empty)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("nothing depends on this node")
