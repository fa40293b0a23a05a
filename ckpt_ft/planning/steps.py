"""One trace of several steps as a trace of each."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from ckpt_ft.memory.record.trace import StepTrace


def split_steps(trace: StepTrace) -> list[StepTrace]:
    """Each step of `trace` as a trace of its own: what was resident, then the step twice, the first as a warm-up.

    What the step leaves alive is taken to be dropped before the second time.
    """
    starts = [at for at, name in trace.marks if name == "step"] + [len(trace.events)]
    alive: dict[int, None] = {}
    traces, at = [], 0
    for start, stop in pairwise(starts):
        for event in trace.events[at:start]:
            if event >= 0:
                alive[event] = None
            else:
                del alive[~event]
        at = start
        traces.append(_twice(trace, list(alive), start, stop))
    return traces


def _twice(trace: StepTrace, resident: list[int], start: int, stop: int) -> StepTrace:
    window = trace.events[start:stop]
    freed = {~event for event in window if event < 0}
    left = [event for event in window if event >= 0 and event not in freed]
    gone = [index for index in resident if index in freed]
    first = [event for event in window if event >= 0 or ~event not in gone]  # lives on: the second step frees it
    warm = [*resident, *first, *(~index for index in reversed(left))]
    number = {index: place for place, index in enumerate(dict.fromkeys(e if e >= 0 else ~e for e in [*warm, *window]))}
    events = [number[event] if event >= 0 else ~number[~event] for event in [*warm, *window]]
    shift = len(warm) - start
    return replace(
        trace,
        storages=[trace.storages[index] for index in number],
        events=events,
        ops=[op.later(shift) for op in trace.ops if start <= op.at < stop],
        marks=[(mark + shift, name) for mark, name in trace.marks if start <= mark < stop],
    )
