"""A step in outline, to be laid over another one: memory over time, holders of the peak, ops of backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .holders import merge_layer_numbers, short_op
from .timeline import Timeline

if TYPE_CHECKING:
    from ckpt_ft.memory.cost.schedule import Span
    from ckpt_ft.memory.record.trace import StepTrace

MOMENTS = 400


@dataclass
class StepOutline:
    """A measured step with a model's repeated layers merged.

    microseconds: of each moment that is kept (see Timeline). series: category -> bytes at these moments.
    phases: (microseconds, phase that begins there). peak: bytes.
    held: (module, op, category, bytes, count) at the peak.
    backward: (module, op, kernels, microseconds) of each op that ran in backward, recomputed ones included.
    """

    microseconds: list[int]
    series: dict[str, list[int]]
    phases: list[tuple[int, str]]
    peak: int
    held: list[tuple[str, str, str, int, int]]
    backward: list[tuple[str, str, int, int]]

    @classmethod
    def from_trace(cls, trace: StepTrace, spans: Iterable[Span]) -> StepOutline:
        """The measured step of `trace`; `spans` is its schedule."""
        spans = list(spans)
        times, timeline = trace.moment_times(spans), Timeline.from_trace(trace, MOMENTS)
        ran: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
        for span in spans:
            if span.op.phase == "backward" and span.end > span.start:
                entry = ran[merge_layer_numbers(span.op.module), short_op(span.op.name)]
                entry[0] += span.op.kernels or 1
                entry[1] += span.end - span.start
        return cls(
            microseconds=[round(1e6 * times[moment]) for moment in timeline.moments],
            series=timeline.series,
            phases=[(round(1e6 * times[at]), phase) for at, phase in timeline.marks],
            peak=trace.replay.peak_allocated(trace.start),
            held=[
                (held.module, short_op(held.op), held.category, held.nbytes, held.count)
                for held in trace.grouped_holders(len(trace.storages))
            ],
            backward=[(*key, int(kernels), round(1e6 * time)) for key, (kernels, time) in ran.items()],
        )
