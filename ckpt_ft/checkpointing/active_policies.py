"""Finds the policies applied to a model, rejects overlapping ones, and suspends them temporarily."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ckpt_ft.errors import UserError

from .applied_policy import MARK, AppliedPolicy, made
from .module_state import modules_in
from .standin import StandIn


def policies_on(model: nn.Module) -> list[AppliedPolicy]:
    """Return the policies that are applied to `model` or to parts of it."""
    return [module.__dict__[MARK] for module in model.modules() if MARK in module.__dict__]


@contextmanager
def suspended(model: nn.Module) -> Iterator[None]:
    """Suspend every policy on `model` and its parts, and restore them on exit.

    Policies applied meanwhile are removed on exit. Policies that are removed meanwhile are not restored.
    """
    standing = policies_on(model)
    for applied in reversed(standing):
        applied.pause()
    try:
        yield
    finally:
        for other in policies_on(model):
            other.remove()
        for applied in standing:
            if not applied.removed:
                applied.resume()


def refuse_overlap(applied: AppliedPolicy) -> None:
    """Raise UserError if a policy is applied to a model that contains `applied.model`, or to a part of it."""
    model, kind = applied.model, type(applied.model).__name__
    for other in made:
        if other.standing and model in modules_in(other.model):
            raise UserError(
                f"policy '{applied.policy}': {kind} is part of a {type(other.model).__name__} on which "
                f"'{other.policy}' stands; remove() that one first, or apply one policy to the whole"
            )
    for module in modules_in(model):
        forward = module.__dict__.get("forward")
        if MARK in module.__dict__ or (isinstance(forward, StandIn) and forward.acts):
            name = next(name for name, inner in model.named_modules() if inner is module)
            raise UserError(
                f"policy '{applied.policy}': a policy stands on a part of {kind} already ({name}, "
                f"{type(module).__name__}); remove() that one first, or apply policies to separate parts"
            )
