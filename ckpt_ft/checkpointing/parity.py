"""Checks that a policy changes no result of a step: loss, gradients, buffers and random state.

Policies that re-run the same operations must match bit for bit. `pointwise` and `head` sum in a different order, so
they must match to a relative 1e-6 in fp32, or 2**-7 in half precision. For each difference, the report names the
likely cause.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ckpt_ft.compat.autograd import input_metadata
from ckpt_ft.compat.modules import buffers_of
from ckpt_ft.compat.tensors import tree_leaves
from ckpt_ft.errors import UserError
from ckpt_ft.policy import Policy
from ckpt_ft.tables import DASH, Table, as_text

from . import rng
from .applied_policy import suspended
from .apply import apply_policy

REORDERED_TOLERANCE = 1e-6  # relative, in fp32, for the rounding of reordered sums
REORDERED_TOLERANCE_HALF = 2**-7  # one bf16 rounding in each of the two steps
# With reordered sums, differences of small gradients are relative to this fraction of the model's largest gradient.
# Their terms may cancel, as for an attention's key bias, whose gradient is zero except for rounding.
CANCELLED = 1e-2
Install = Callable[[nn.Module], Any]
Loss = Callable[[nn.Module, Any], torch.Tensor]  # (model, batch) -> scalar


@dataclass(frozen=True)
class Row:
    """A quantity without and with the policy, their relative difference, and the tensor that differs the most."""

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
    loss: Loss | None = None,
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
                reordered = REORDERED_TOLERANCE_HALF if plain.half else REORDERED_TOLERANCE
                name, tolerance = str(parsed), reordered if parsed.reorders else 0.0
                other = model
                apply_policy(model, parsed, verify="never")  # a difference is measured here, not raised
            with_policy = outcome_of(other, batch, loss, seed)
    finally:
        started.restore()
    return _compare(model, name, plain, noise, with_policy, tolerance)


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
    loss, _, gradients, buffers, random = rows
    causes = []
    missing = [name for name in plain.gradients if name not in other.gradients]
    if missing:
        causes.append(
            f"gradients are cut off: {len(missing)} parameters ({missing[0]}, ...) receive a gradient without the "
            "policy and none with it. Possible causes: a reentrant checkpoint whose inputs need no gradient (use "
            "use_reentrant=False), no_grad inside a region, or a KV cache that is switched off"
        )
    gained = [name for name in other.gradients if name not in plain.gradients]
    if gained:
        causes.append(
            f"{len(gained)} parameters ({gained[0]}, ...) receive a gradient with the policy and none without it: "
            "backward reaches parts of the model that the plain step does not train"
        )
    if not buffers.same:
        norm = buffers.worst.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked")
        twice = f"BatchNorm twice: its running statistics ({buffers.worst}) were updated"
        other_buffer = f"a buffer ({buffers.worst}) was written"
        causes.append(f"{twice if norm else other_buffer} in forward and again in recomputation")
    if loss.same and not gradients.same:
        if model.training and rng.has_dropout(model):
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


def default_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the output's `loss`, or else the mean square of its first float tensor; UserError if it has neither."""
    if isinstance(batch, Mapping):
        out = model(**batch)
    else:
        out = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    given = getattr(out, "loss", None)
    if isinstance(given, torch.Tensor):
        return given
    leaves = tree_leaves(dict(out) if isinstance(out, Mapping) else out)
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


def outcome_of(model: nn.Module, batch: Any, loss: Loss, seed: int) -> Outcome:
    """Run one forward and backward pass from `seed`, then restore the model's previous gradients and buffers.

    A buffer that the step registers is removed afterwards, so that the next step registers it again.
    """
    own = {name: p.grad for name, p in model.named_parameters()}
    registered = [(m, dict(buffers_of(m))) for m in model.modules()]
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
        for module, buffers in registered:
            for name in buffers_of(module).keys() - buffers:
                delattr(module, name)
            buffers_of(module).update(buffers)
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
        if any(metadata.dtype in (torch.bfloat16, torch.float16) for metadata in input_metadata(node)):
            return True
        nodes += [following for following, _ in node.next_functions]
    return False


def device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))
