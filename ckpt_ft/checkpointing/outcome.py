"""Runs one training step of a model from a given seed and records its results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ckpt_ft.errors import UserError

from . import rng


def default_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the output's `loss`, or else the mean square of its first float tensor; UserError if it has neither."""
    if isinstance(batch, Mapping):
        out = model(**batch)
    else:
        out = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    given = getattr(out, "loss", None)
    if isinstance(given, torch.Tensor):
        return given
    leaves = torch.utils._pytree.tree_leaves(dict(out) if isinstance(out, Mapping) else out)
    first = next((x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()), None)
    if first is None:
        raise UserError(f"the output of {type(model).__name__} has neither a loss nor a tensor of floats; give `loss`")
    return first.float().square().mean()


@dataclass(frozen=True)
class Outcome:
    """The results of one step; `half` is true if any gradient was in half precision."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    random: rng.Snapshot
    half: bool


def outcome_of(model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], torch.Tensor], seed: int) -> Outcome:
    """Run one forward and backward pass from `seed`, then restore the model's previous gradients and buffers.

    A buffer that the step registers is removed afterwards, so that the next step registers it again.
    """
    own = {name: p.grad for name, p in model.named_parameters()}
    registered = [(m, dict(m._buffers), set(m._non_persistent_buffers_set)) for m in model.modules()]
    values = [(b, b.detach().clone()) for b in model.buffers()]
    for p in model.parameters():
        p.grad = None
    rng.start_from(seed)
    try:
        value = loss(model, batch)
        if value.numel() != 1:
            raise UserError(f"the step's loss has the shape {tuple(value.shape)}; it must be one number")
        if not value.requires_grad:
            raise UserError(
                "the step's loss needs no gradient: nothing in the model is trainable, or the batch has no labels"
            )
        half = _in_half_precision(value)
        value.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        after = {name: b.detach().clone() for name, b in model.named_buffers()}
        return Outcome(value.detach().reshape(()), gradients, after, rng.snapshot(device_of(model), host=True), half)
    finally:
        for name, p in model.named_parameters():
            p.grad = own.get(name)
        for module, buffers, transient in registered:
            module._buffers = buffers
            module._non_persistent_buffers_set = transient
        with torch.no_grad():
            for b, value in values:
                b.copy_(value)


def _in_half_precision(loss: torch.Tensor) -> bool:
    """Whether any gradient in the graph of `loss` is in half precision, through autocast or the weights' dtype."""
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if any(metadata.dtype in (torch.bfloat16, torch.float16) for metadata in node._input_metadata):
            return True
        nodes += [following for following, _ in node.next_functions]
    return False


def device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))
