"""What is said where no policy fits."""

from __future__ import annotations

from torch import nn

from ckpt_ft.units import format_at_least, format_bytes

from .estimates import Estimates
from .proposals import blocks_of


def too_small(estimates: Estimates, model: nn.Module) -> str:
    """What to say when nothing fits: by how much, and the smallest budget that would do."""
    room, at = estimates.room, estimates.batch or 1
    if not estimates.anchors:
        return f"no policy suits {type(model).__name__}: " + "; ".join(estimates.rejected.values())
    leanest = min(estimates.anchors, key=lambda policy: estimates.reserved(policy, at))
    estimates.tracer.trace(leanest, at)
    needed = room.needs(estimates.estimate(leanest, at))
    parameters = sum(p.numel() * p.element_size() for p in dict.fromkeys(model.parameters()))
    below = ""
    if parameters > room.budget:
        below = (
            f" (the parameters alone take {format_bytes(parameters)}, {format_bytes(parameters - room.budget)} more)"
        )
    launch = estimates.tracer.workload.launch
    under = f"'{leanest}' with {launch}" if launch else f"'{leanest}'"
    blocks = "" if blocks_of(model).blocks else "; it has no repeated blocks to checkpoint"
    return (
        f"a budget of {format_bytes(room.budget)}: no policy fits a batch of {at}{below}; the smallest budget that "
        f"works is {format_at_least(needed)}, under {under}{blocks}"
    )
