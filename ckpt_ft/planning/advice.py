"""What lowers the peak beside another policy, each traced with the fix in place: often no checkpointing does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..memory.trace import StepTrace
from .candidates import with_term
from .rows import Row, seconds
from .tracing import Subject, Tracer

_WORTH = 0.01  # of the bytes reserved: what saves less is not worth a line


@dataclass(frozen=True)
class Fix:
    """One change and what it is predicted to save.

    Attributes:
        change: what to do, as a person would.
        saves: bytes reserved, of the plan's best row at its batch size.
        slower: seconds per sample over those of the best row, less 1; below 0 is faster.
    """

    change: str
    saves: int
    slower: float


def advise(tracer: Tracer, row: Row, trace: StepTrace, fixed_batch: bool) -> list[Fix]:
    """The fixes that save at least 1 % of `row`'s bytes, largest saving first.

    fixed_batch: the batch size was asked for, so that smaller micro-batches are a change worth naming.
    """
    found = []
    if "head" not in row.policy.split(","):
        headed = tracer.trace(with_term(row.policy, "head"), row.batch)
        found.append(_fix(f"--ac_policy {with_term(row.policy, 'head')}: the loss in chunks", row, headed))
    for change, make in _CHANGES.items():
        with make(tracer.subject, trace) as changed:
            if changed is not None:
                found.append(_fix(change, row, changed.trace([row.policy], row.batch)[0]))
    if fixed_batch and row.batch > 1:
        half = tracer.trace(row.policy, row.batch // 2)
        change = f"micro-batches of {row.batch // 2} and twice the gradient accumulation"
        found.append(_fix(change, row, half, row.batch // 2))
    found.append(_fix("drop what the loop keeps alive through backward (outputs, say)", row, without_kept(trace)))
    worth = [fix for fix in found if fix is not None and fix.saves >= _WORTH * row.reserved]
    return sorted(worth, key=lambda fix: -fix.saves)


def _fix(change: str, row: Row, trace: StepTrace | str | None, batch: int | None = None) -> Fix | None:
    if trace is None or isinstance(trace, str):
        return None
    slower = seconds(trace, row.policy) / (batch or row.batch) / (row.seconds / row.batch) - 1
    return Fix(change, row.reserved - trace.peak_reserved, round(slower, 4))


@contextmanager
def _fused(subject: Subject, trace: StepTrace) -> Iterator[Subject | None]:
    """torch's fused optimizer in place of foreach's, where the temporaries of that are part of the peak."""
    make = subject.make_optimizer
    if make is None or not any("_foreach_" in storage.op for storage, _ in trace.live_at(trace.peak_at)):
        yield None
        return

    def fused(model: nn.Module) -> Any:
        optimizer = make(model)
        for group in optimizer.param_groups:
            group.update(fused=True, foreach=False)
        return optimizer

    can = isinstance(make(subject.model), (torch.optim.Adam, torch.optim.SGD))
    yield replace(subject, make_optimizer=fused) if can else None


@contextmanager
def _sdpa(subject: Subject, trace: StepTrace) -> Iterator[Subject | None]:
    """Scaled dot product attention in place of eager matmuls, whose weights grow with the square of the length."""
    able = [module for module in subject.model.modules() if getattr(module, "_supports_sdpa", False)]
    capable = [model for model in able if model.config._attn_implementation == "eager"]  # type: ignore[union-attr]
    if not capable:
        yield None
        return
    try:
        capable[0].set_attn_implementation("sdpa")  # type: ignore[operator]  # transformers' PreTrainedModel
        yield subject
    finally:
        capable[0].set_attn_implementation("eager")  # type: ignore[operator]


@contextmanager
def _no_cache(subject: Subject, trace: StepTrace) -> Iterator[Subject | None]:
    """No KV cache in training: it keeps every key and value alive through backward."""
    configs = [m.config for m in subject.model.modules() if getattr(getattr(m, "config", None), "use_cache", False)]
    if not configs:
        yield None
        return
    try:
        configs[0].use_cache = False  # type: ignore[union-attr]
        yield subject
    finally:
        configs[0].use_cache = True  # type: ignore[union-attr]


_CHANGES: dict[str, Callable[[Subject, StepTrace], Any]] = {
    "a fused optimizer (--optim adamw_torch_fused)": _fused,
    "attn_implementation sdpa in place of eager": _sdpa,
    "model.config.use_cache = False": _no_cache,
}


def without_kept(trace: StepTrace) -> StepTrace | None:
    """`trace` had the loop dropped, when forward ended, what it keeps of forward beyond the end of backward.

    None where it keeps nothing of size.
    """
    begins = next((at for at, name in trace.marks if name == "backward" and at >= trace.start), None)
    if begins is None:
        return None
    ends = max((op.at for op in trace.ops if op.phase == "backward" and op.at >= begins), default=begins)
    gone = {~event for event in trace.events[trace.start : ends] if event < 0}
    made = [event for event in trace.events[trace.start : begins] if event >= 0 and event not in gone]
    kept = [event for event in made if trace.storages[event].category == "activations"]
    if not kept:
        return None
    moved = {~event for event in kept}
    earlier = [*trace.events[:begins], *(~event for event in kept)]
    return replace(trace, events=earlier + [event for event in trace.events[begins:] if event not in moved])
