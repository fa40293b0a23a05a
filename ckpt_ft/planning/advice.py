"""What lowers the peak beside another policy, each traced with the fix in place: often no checkpointing does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.workloads.lengths import Lengths
from ckpt_ft.workloads.workload import Workload

from .answer import Fix
from .candidate import Candidate, seconds
from .proposals import with_term
from .tracing import Traced, Tracer, trace_policies

_WORTH = 0.01  # of the bytes reserved: what saves less is not worth a line
_FASTER = 0.05  # or of the seconds
_NEARLY_ALL = 0.99  # of a dataset's rows: what is longer may be cut


def advise(tracer: Tracer, candidate: Candidate, trace: StepTrace, fixed_batch: bool) -> list[Fix]:
    """The fixes that save at least 1 % of `candidate`'s bytes or 5 % of its time, largest saving first.

    fixed_batch: the batch size was asked for, so that smaller micro-batches are a change worth naming.
    """
    per_sample = seconds(trace) / candidate.batch

    def fix(change: str, other: StepTrace | str | None, batch: int = candidate.batch) -> Iterator[Fix]:
        if isinstance(other, StepTrace):
            slower = seconds(other) / batch / per_sample - 1
            yield Fix(change, candidate.reserved - other.peak_reserved, round(slower, 4))

    found: list[Fix] = []
    if "head" not in candidate.policy.split(","):
        headed = with_term(candidate.policy, "head")
        found += fix(f"--ac_policy {headed}: the loss in chunks", tracer.trace(headed, candidate.batch))
    for change, make in _CHANGES.items():
        with make(tracer.workload, trace) as changed:
            if changed is not None:
                found += fix(change, _traced(changed, candidate))
    if fixed_batch and candidate.batch > 1:
        half = candidate.batch // 2
        change = f"micro-batches of {half} and twice the gradient accumulation"
        found += fix(change, tracer.trace(candidate.policy, half), half)
    found += fix("drop what the loop keeps alive through backward (outputs, say)", without_kept(trace))
    lengths = tracer.workload.lengths
    if lengths is not None and lengths.unit == "tokens":
        found += _padding(tracer.workload, lengths, candidate)
    worth = [fix for fix in found if fix.saves >= _WORTH * candidate.reserved or fix.slower <= -_FASTER]
    return sorted(worth, key=lambda fix: -fix.saves)


def _padding(workload: Workload, lengths: Lengths, candidate: Candidate) -> Iterator[Fix]:
    """Less of it: fewer bytes where few rows are the longest, less time where rows of like length go together."""
    batch = candidate.batch
    cut = lengths.quantile(_NEARLY_ALL)
    if cut < lengths.longest:
        worst, usual = (_at(workload, candidate, n) for n in (cut, lengths.cut(cut).padded(batch)))
        slower = round(seconds(usual) / candidate.seconds - 1, 4)
        change = f"--max_length {cut}, which cuts the longest 1 % of the rows"
        yield Fix(change, candidate.reserved - worst.peak_reserved, slower)
    if not lengths.by_length and lengths.mean < lengths.padded(batch):
        grouped = _at(workload, candidate, round(lengths.mean))
        faster = round(seconds(grouped) / candidate.seconds - 1, 4)
        share = 1 - lengths.mean / lengths.padded(batch)
        change = f"--train_sampling_strategy group_by_length (or --packing): {share:.0%} of the tokens are padding"
        yield Fix(change, 0, faster)


def _traced(workload: Workload, candidate: Candidate, length: int | None = None) -> Traced:
    return trace_policies(workload, [candidate.policy], workload.step(candidate.batch, length))[0]


def _at(workload: Workload, candidate: Candidate, length: int) -> StepTrace:
    trace = _traced(workload, candidate, length)
    assert isinstance(trace, StepTrace), "a candidate has a trace"
    return trace


@contextmanager
def _fused(workload: Workload, trace: StepTrace) -> Iterator[Workload | None]:
    """torch's fused optimizer in place of foreach's, where the temporaries of that are part of the peak."""
    make = workload.make_optimizer
    if make is None or not any("_foreach_" in storage.op for storage, _ in trace.live_at(trace.peak_at)):
        yield None
        return

    def fused(model: nn.Module) -> Any:
        optimizer = make(model)
        for group in optimizer.param_groups:
            group.update(fused=True, foreach=False)
        return optimizer

    can = isinstance(make(workload.model), (torch.optim.Adam, torch.optim.SGD))
    yield replace(workload, make_optimizer=fused) if can else None


@contextmanager
def _sdpa(workload: Workload, trace: StepTrace) -> Iterator[Workload | None]:
    """Scaled dot product attention in place of eager matmuls, whose weights grow with the square of the length."""
    able = [module for module in workload.model.modules() if getattr(module, "_supports_sdpa", False)]
    capable = [model for model in able if model.config._attn_implementation == "eager"]  # type: ignore[union-attr]
    if not capable:
        yield None
        return
    try:
        capable[0].set_attn_implementation("sdpa")  # type: ignore[operator]  # transformers' PreTrainedModel
        yield workload
    finally:
        capable[0].set_attn_implementation("eager")  # type: ignore[operator]


@contextmanager
def _no_cache(workload: Workload, trace: StepTrace) -> Iterator[Workload | None]:
    """No KV cache in training: it keeps every key and value alive through backward."""
    configs = [m.config for m in workload.model.modules() if getattr(getattr(m, "config", None), "use_cache", False)]
    if not configs:
        yield None
        return
    try:
        configs[0].use_cache = False  # type: ignore[union-attr]
        yield workload
    finally:
        configs[0].use_cache = True  # type: ignore[union-attr]


_CHANGES: dict[str, Callable[[Workload, StepTrace], Any]] = {
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
