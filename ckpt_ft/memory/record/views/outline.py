"""Outline: a step in short, to be laid over another: memory over time, what held the peak, what ran in backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from ckpt_ft.memory.record.cost import Span
from ckpt_ft.memory.record.holders import short_op, together
from ckpt_ft.memory.record.recorded import Recorded
from ckpt_ft.memory.record.timeline import Timeline

from .lives import ticks

MOMENTS = 400


@dataclass
class Outline:
    """A measured step; a model's repeated layers are taken together.

    microseconds: of each moment that is kept; of each stretch of the step the fullest. series: category -> its bytes.
    phases: (microseconds, phase that begins there). peak: bytes.
    held: (module, op, category, bytes, count) at the peak.
    backward: (module, op, kernels, microseconds) of what ran in backward; a policy re-runs what another has fewer of.
    """

    microseconds: list[int]
    series: dict[str, list[int]]
    phases: list[tuple[int, str]]
    peak: int
    held: list[tuple[str, str, str, int, int]]
    backward: list[tuple[str, str, int, int]]

    @classmethod
    def of(cls, trace: Recorded, spans: Iterable[Span]) -> Outline:
        """The measured step of `trace`, whose schedule is `spans`."""
        spans = list(spans)
        clock, timeline = ticks(trace, spans), Timeline.from_trace(trace, MOMENTS)
        ran: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
        for span in spans:
            if span.op.phase == "backward" and span.end > span.start:
                entry = ran[together(span.op.module), short_op(span.op.name)]
                entry[0] += span.op.kernels or 1
                entry[1] += span.end - span.start
        return cls(
            microseconds=[round(1e6 * clock[moment]) for moment in timeline.moments],
            series=timeline.series,
            phases=[(round(1e6 * clock[at]), phase) for at, phase in timeline.marks],
            peak=trace.replay.peak_allocated(trace.start),
            held=[
                (held.module, short_op(held.op), held.category, held.nbytes, held.count)
                for held in trace.grouped_holders(len(trace.storages))
            ],
            backward=[(*key, int(kernels), round(1e6 * time)) for key, (kernels, time) in ran.items()],
        )
