"""Lives: each allocation that the measured step sees, with the bytes it takes and the moments it lives through.

Moment 0 is what was resident when the step begins, moment k is after its k-th event. `ticks` says when the device gets
there. Both are what the page, PyTorch's memory_viz and Perfetto are given.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from ckpt_ft.memory.record.cost import Span
from ckpt_ft.memory.record.events import Storage
from ckpt_ft.memory.record.recorded import Recorded


@dataclass(frozen=True, slots=True)
class Life:
    """One allocation: alive at the moments `made` ... `freed - 1`; `freed` is None for one that outlives the step."""

    storage: Storage
    nbytes: int  # as the device counts it
    made: int
    freed: int | None


def lives(trace: Recorded) -> list[Life]:
    """Those of the measured step, in the order in which they were made."""
    start, before = trace.start, 0
    open_lives: dict[int, tuple[int, int]] = {}  # storage -> when it was made, its bytes
    found: list[Life] = []
    for at, (index, after) in enumerate(zip(trace.events, trace.replay.allocated, strict=False)):
        moment = max(at - start + 1, 0)
        if index >= 0:
            open_lives[index] = moment, after - before
        else:
            made, nbytes = open_lives.pop(~index)
            if moment:
                found.append(Life(trace.storages[~index], nbytes, made, moment))
        before = after
    found += [Life(trace.storages[index], nbytes, made, None) for index, (made, nbytes) in open_lives.items()]
    return sorted(found, key=lambda life: life.made)


def ticks(trace: Recorded, spans: Iterable[Span]) -> list[float]:
    """Seconds at each moment of the measured step: when the device begins the op that brought the step there.

    spans: the step's schedule.
    """
    begins, starts, latest = [0], [0.0], 0.0
    for span in spans:
        if span.op.stream == span.stream == "":
            latest = max(latest, span.start)
            begins.append(span.op.at)
            starts.append(latest)
    events = range(trace.start, len(trace.events))
    return [0.0] + [starts[bisect_right(begins, at) - 1] for at in events]
