"""THE training step: forward and backward of each micro-batch, then what comes after them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from ckpt_ft.memory.distributed.wrap import without_synchronisation


class Engine(Protocol):
    """What of accelerate's Accelerator a training step needs."""

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[Any]:
        """Around each micro-batch."""

    def backward(self, loss: torch.Tensor) -> None:
        """Gradients of a micro-batch's loss, scaled where several make a step."""

    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float) -> Any:
        """Clip gradients in place."""


class _Alone:
    """An Engine of one process."""

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float) -> Any:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)


ALONE = _Alone()


class Ranks(_Alone):
    """An Engine of one of several processes: gradients are synchronised in the last micro-batch alone."""

    def __init__(self, micro_batches: int) -> None:
        self.left = micro_batches

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[Any]:
        self.left -= 1
        return without_synchronisation(models[0]) if self.left else contextlib.nullcontext()


def optimizer_step(
    model: nn.Module,
    optimizer: Any,
    micro_batches: Iterable[Any],
    compute_loss: Callable[[Any, Any], torch.Tensor],
    *,
    max_grad_norm: float = 0.0,
    parameters: Sequence[torch.Tensor] | None = None,
    engine: Engine = ALONE,
) -> None:
    """Forward and backward of each micro-batch, clipping, the optimizer, gradients dropped: in Trainer's order.

    Args:
        compute_loss: (model, micro-batch) -> scalar; whatever else it makes is dropped before backward.
        parameters: those to clip; the model's by default.
        engine: an Accelerator, or nothing for one process.
    """
    for batch in micro_batches:
        with engine.accumulate(model):
            loss = compute_loss(model, batch)
            engine.backward(loss)
    update(model, optimizer, max_grad_norm, parameters, engine)


def update(
    model: nn.Module,
    optimizer: Any,
    max_grad_norm: float,
    parameters: Sequence[torch.Tensor] | None = None,
    engine: Engine = ALONE,
) -> None:
    """What of it comes after the last backward."""
    if max_grad_norm:
        engine.clip_grad_norm_(model.parameters() if parameters is None else parameters, max_grad_norm)
    if optimizer is not None:
        optimizer.step()
    model.zero_grad(set_to_none=True)
