"""Checks that a policy changes no result of a step: loss, gradients, buffers and random state.

Policies that re-run the same operations must match bit for bit. `pointwise` and `head` sum in a different order, so
they must match to a relative 1e-6 in fp32, or 2**-7 in half precision. For each difference, the report names the
likely cause.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ckpt_ft.policy import Policy
from ckpt_ft.tables import DASH, Table, as_text

from . import rng
from .active_policies import suspended
from .apply import apply_policy
from .outcome import Outcome, default_loss, device_of, outcome_of

REORDERED_TOLERANCE = 1e-6  # relative, in fp32, for the rounding of reordered sums
REORDERED_TOLERANCE_HALF = 2**-7  # one bf16 rounding in each of the two steps
# With reordered sums, differences of small gradients are relative to this fraction of the model's largest gradient.
# Their terms may cancel, as for an attention's key bias, whose gradient is zero except for rounding.
CANCELLED = 1e-2
Install = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Row:
    """One compared quantity: its values without and with the policy, and their relative difference.

    worst: the name of the tensor with the largest difference; "" if there is none.
    """

    what: str
    plain: str
    policy: str
    difference: float
    same: bool
    worst: str = ""


@dataclass(frozen=True)
class Parity:
    """The result of `check_parity`; `ok` is true if nothing differs."""

    policy: str
    rows: list[Row]
    causes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(row.same for row in self.rows)

    def __str__(self) -> str:
        header = ("quantity", "without", "with", "relative difference", "result")
        cells = [
            (
                row.what,
                row.plain or DASH,
                row.policy or DASH,
                f"{row.difference:.1e}" if row.difference else "0",
                "same" if row.same else "DIFFERS",
            )
            for row in self.rows
        ]
        table = Table(f"parity of policy {self.policy}", header, cells, text=(0, 4))
        worst = [f"{row.what}: farthest apart in {row.worst}" for row in self.rows if row.worst]
        return as_text([table]) + "\n".join((*worst, *self.causes, *self.notes))


def check_parity(
    model: nn.Module,
    batch: Any,
    policy: str | dict[str, Any] | Policy | Install,
    *,
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    seed: int = 0,
) -> Parity:
    """Run one step of `model` on `batch` without and with `policy` from the same state, and compare the results.

    Parameters, gradients, buffers, random state and any applied policy are restored afterwards.

    Args:
        model: a model on any device; its train or eval mode is not changed.
        batch: a mapping is passed as keyword arguments, a tuple or list as positional arguments, a tensor as is.
        policy: a policy, or a function that enables another kind of checkpointing on a deep copy of the model.
        loss: scalar of (model, batch); by default the output's `loss`, or the mean square of its first float tensor.
        seed: seed of the random state at the start of both steps.

    Raises:
        UserError: the policy is malformed or matches nothing, or the loss is not one number or requires no gradient.
    """
    loss = loss or default_loss
    started = rng.snapshot(device_of(model), host=True)
    try:
        with suspended(model):
            apply_policy(model, "none")
            plain = outcome_of(model, batch, loss, seed)
            noise = outcome_of(model, batch, loss, seed)
            if callable(policy):
                name, tolerance = getattr(policy, "__name__", "given"), 0.0
                other = copy.deepcopy(model)
                policy(other)
            else:
                parsed = Policy.parse(policy)
                name, tolerance = str(parsed), _reordered(plain) if parsed.reorders else 0.0
                other = model
                apply_policy(model, parsed, verify="never")  # a difference is measured here, not raised
            with_policy = outcome_of(other, batch, loss, seed)
    finally:
        started.restore()
    return _compare(model, name, plain, noise, with_policy, tolerance)


def _reordered(plain: Outcome) -> float:
    return REORDERED_TOLERANCE_HALF if plain.half else REORDERED_TOLERANCE


def _compare(model: nn.Module, name: str, plain: Outcome, noise: Outcome, other: Outcome, tolerance: float) -> Parity:
    shared = plain.gradients.keys() & other.gradients.keys()

    largest = max((float(g.abs().max()) for g in plain.gradients.values() if g.numel()), default=0.0)
    cancelled = CANCELLED * largest if tolerance else 0.0

    def worst(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], scale: float = 0.0) -> tuple[float, str]:
        both = mine.keys() & theirs.keys()
        return max(((_relative(mine[key], theirs[key], scale), key) for key in both), default=(0.0, ""))

    loss, floor = _relative(plain.loss, other.loss), _relative(plain.loss, noise.loss)
    gradient, at = worst(plain.gradients, other.gradients, cancelled)
    lost, gained = plain.gradients.keys() - other.gradients.keys(), other.gradients.keys() - plain.gradients.keys()
    buffer, which = worst(plain.buffers, other.buffers)
    random = plain.random == other.random
    rows = [
        Row("loss", f"{plain.loss:.9g}", f"{other.loss:.9g}", loss, loss <= max(tolerance, floor)),
        Row(
            "parameters that received a gradient"
            + (f" ({len(lost)} lost theirs, {len(gained)} have a new one)" if lost or gained else ""),
            str(len(plain.gradients)),
            str(len(other.gradients)),
            0.0,
            not lost and not gained,
        ),
        Row(
            "gradients",
            f"{len(shared)} tensors",
            f"{len(shared)} tensors",
            gradient,
            gradient <= max(tolerance, worst(plain.gradients, noise.gradients, cancelled)[0]),
            at if gradient else "",
        ),
        Row(
            "buffers",
            f"{len(plain.buffers)} tensors",
            f"{len(other.buffers)} tensors",
            buffer,
            buffer <= worst(plain.buffers, noise.buffers)[0],
            which if buffer else "",
        ),
        Row("random state after the step", "", "", 0.0, random or plain.random != noise.random),
    ]
    return Parity(name, rows, _causes(model, rows, plain, other), _notes(model, plain, noise))


def _causes(model: nn.Module, rows: list[Row], plain: Outcome, other: Outcome) -> list[str]:
    """Return the likely cause of each difference."""
    loss, _, gradients, buffers, random = rows
    causes = []
    missing = [name for name in plain.gradients if name not in other.gradients]
    if missing:
        causes.append(
            f"frozen front: {len(missing)} parameters ({missing[0]}, ...) train without it and not with it. A "
            "reentrant checkpoint whose inputs need no gradient trains nothing and looks fast, and so does no_grad "
            "inside a region; use use_reentrant=False. Or what they train through, a KV cache say, was taken away"
        )
    gained = [name for name in other.gradients if name not in plain.gradients]
    if gained:
        causes.append(
            f"{len(gained)} parameters ({gained[0]}, ...) receive a gradient with it and none without: backward "
            "reaches parts of the model that the plain step does not train"
        )
    if not buffers.same:
        norm = buffers.worst.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked")
        twice = f"BatchNorm twice: its running statistics ({buffers.worst}) were updated"
        other_buffer = f"a buffer ({buffers.worst}) was written"
        causes.append(f"{twice if norm else other_buffer} in forward and again in recomputation")
    if loss.same and not gradients.same:
        generators = rng.own_generators(model)
        if generators:
            causes.append(
                f"random numbers of one's own: recomputation draws from {', '.join(generators)} once more, which no "
                "checkpointing sets back; draw from PyTorch's own generator, or outside of the blocks"
            )
        elif model.training and rng.has_dropout(model):
            causes.append(
                "dropout without RNG: the loss is right and gradients are not, so recomputation drew other "
                "random numbers than forward; preserve the random state"
            )
        else:
            causes.append(
                "the loss is right and gradients are not: a region's second run differs from its first; "
                "does it read state from outside?"
            )
    if not loss.same:
        causes.append("the loss itself differs: forward computes something else under this policy")
    if not random.same:
        causes.append(
            "the random state after the step differs: recomputation moved the generator, later steps draw others"
        )
    return causes


def _notes(model: nn.Module, plain: Outcome, noise: Outcome) -> list[str]:
    idle = [name for name, p in model.named_parameters() if p.requires_grad and name not in plain.gradients]
    notes = []
    if idle:
        notes.append(
            f"note: {len(idle)} trainable parameters ({idle[0]}, ...) receive no gradient in this step, with or "
            "without the policy"
        )
    if any(not torch.equal(plain.gradients[key], noise.gradients[key]) for key in plain.gradients):
        notes.append("note: two steps without any policy differ here; differences up to theirs count as none")
    return notes


def _relative(a: torch.Tensor, b: torch.Tensor, scale: float = 0.0) -> float:
    """Return the largest difference relative to the largest value or `scale`; inf if finite positions differ."""
    if torch.equal(a, b):
        return 0.0
    if not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    a, b = a.double().nan_to_num(), b.double().nan_to_num()
    return float((a - b).abs().max() / a.abs().max().clamp_min(max(scale, torch.finfo(torch.float64).tiny)))
