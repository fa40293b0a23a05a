"""Tries other policies where backward has raised a VerificationError: which of them pass on the same batch?"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .parity import check_parity

# The first two re-run no block; the others re-run only parts of each.
CANDIDATES = ("pointwise", "offload", "modules:attention", "modules:mlp")


def tried(model: nn.Module, batch: Any, failed: str, loss: Callable[[nn.Module, Any], torch.Tensor] | None) -> str:
    """What to tell someone whose step failed under `failed`: which of `CANDIDATES` change no number of it.

    Each is tried by `check_parity`: three steps, in the memory of training without a policy and more gradients. If
    `failed` passes as well, a trial would tell nothing about the others, and the line says so.
    """
    if _passes(model, batch, failed, loss):
        return (
            f"one step made alone passes under '{failed}' as well: what differed was changed from outside of the "
            "model and its loss, and other policies were not tried"
        )
    passed = [policy for policy in CANDIDATES if policy != failed and _passes(model, batch, policy, loss)]
    shown = ", ".join(f"'{policy}'" for policy in passed)
    return f"tried on this step's batch, passed: {shown or 'none of ' + ', '.join(CANDIDATES)}"


def _passes(model: nn.Module, batch: Any, policy: str, loss: Callable[[nn.Module, Any], torch.Tensor] | None) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return check_parity(model, batch, policy, loss=loss).ok
        except Exception:  # a number differs, it matches nothing in this model, or there is not the memory
            return False
