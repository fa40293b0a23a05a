"""A trace as Chrome trace events (JSON), for ui.perfetto.dev and chrome://tracing.

The host process shows each op while it is issued, with the phases and modules around it. The device process has one
track per CUDA stream, one for copies, and the counters of allocated and reserved bytes. The counters use the host's
clock, because the host allocates memory.
Format: "Trace Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt_ft.memory.cost.schedule import Span
    from ckpt_ft.memory.record.trace import StepTrace

Event = dict[str, Any]
HOST, DEVICE = 1, 2  # processes
_ISSUE, _MODULES = 1, 2  # the host's threads


def trace_events(trace: StepTrace) -> dict[str, Any]:
    """The measured step of `trace` as a document of trace events; times are microseconds.

    Raises:
        UserError: the trace is for a CPU, whose speed is not modelled.
    """
    spans = list(trace.schedule())
    threads = {"": 1}  # stream -> thread
    events: list[Event] = []
    begin = 0.0
    for span in spans:
        labels = {"module": span.op.module, "phase": span.op.phase, "dtype": span.op.dtype}
        events.append(_slice(span.op.name, HOST, _ISSUE, begin, span.issued, labels))
        if span.end > span.start:
            thread = threads.setdefault(span.stream, len(threads) + 1)
            work = {**labels, "flops": span.op.flops, "bytes": span.op.nbytes, "kernels": span.op.kernels}
            events.append(_slice(span.op.name, DEVICE, thread, span.start, span.end, work))
        begin = span.issued
    events += _modules(spans)
    events += _counters(trace, spans)
    return {
        "traceEvents": [*_names(trace, threads), *events],
        "displayTimeUnit": "ms",
        "otherData": {"source": trace.source, "device": trace.device},
    }


def _modules(spans: Iterable[Span]) -> Iterator[Event]:
    """Phases, and modules inside of them, as slices that are nested like the modules."""
    open_slices: list[tuple[str, float]] = []  # name, begin
    end = 0.0
    for span in spans:
        path = [span.op.phase, *(span.op.module.split(".") if span.op.module else [])]
        same = 0
        while same < min(len(path), len(open_slices)) and path[same] == open_slices[same][0]:
            same += 1
        yield from _close(open_slices, same, end)
        open_slices += [(name, end) for name in path[same:]]
        end = span.issued
    yield from _close(open_slices, 0, end)


def _close(open_slices: list[tuple[str, float]], keep: int, end: float) -> Iterator[Event]:
    """Close the innermost slices until `keep` are open."""
    while len(open_slices) > keep:
        path = ".".join(name for name, _ in open_slices[1:])
        name, begin = open_slices.pop()
        yield _slice(name, HOST, _MODULES, begin, end, {"module": path})


def _counters(trace: StepTrace, spans: list[Span]) -> Iterator[Event]:
    """Allocated and reserved bytes, one event for each change."""
    issued = [span.op.at for span in spans]
    replay = trace.replay
    last: dict[str, int] = {}
    for at in range(max(trace.start - 1, 0), len(trace.events)):
        index = bisect_right(issued, at) - 1  # the op that is being issued
        time = spans[index - 1].issued if index > 0 else 0.0
        for name, nbytes in (("allocated", replay.allocated[at]), ("reserved", replay.reserved[at])):
            if last.get(name) != nbytes:
                last[name] = nbytes
                yield {"ph": "C", "name": name, "pid": DEVICE, "ts": 1e6 * time, "args": {"bytes": nbytes}}


def _slice(name: str, process: int, thread: int, begin: float, end: float, args: dict[str, Any]) -> Event:
    times = {"ts": round(1e6 * begin, 3), "dur": round(1e6 * (end - begin), 3)}
    return {"ph": "X", "name": name, "pid": process, "tid": thread, **times, "args": args}


def _names(trace: StepTrace, threads: dict[str, int]) -> Iterator[Event]:
    for process, name in {HOST: f"host ({trace.source})", DEVICE: f"{trace.device} ({trace.source})"}.items():
        yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    tracks = {(HOST, _ISSUE): "ops issued", (HOST, _MODULES): "phases and modules"}
    for stream, thread in threads.items():
        tracks[DEVICE, thread] = stream if stream == "copies" else f"stream: {stream or 'computation'}"
    for (process, thread), name in tracks.items():
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}}
