"""A trace as Chrome's trace events (JSON), for ui.perfetto.dev and chrome://tracing.

The host issues one op after another; phases and modules are slices around its ops. The device has a track for each
stream and one for copies. Allocated and reserved bytes are counters on the host's clock, where memory is allocated.
Format: "Trace Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any

from ckpt_ft.memory.record.cost import COPIES, Span
from ckpt_ft.memory.record.recorded import Recorded

Event = dict[str, Any]
HOST, DEVICE = 1, 2  # processes
_ISSUE, _MODULES = 1, 2  # the host's threads


def trace_events(trace: Recorded) -> dict[str, Any]:
    """The measured step of `trace` as a document of trace events; times are microseconds.

    Raises:
        UserError: the trace is of a CPU, whose speed is not modelled.
    """
    spans = list(trace.schedule())
    streams = {"": 1}
    events: list[Event] = []
    begin = 0.0
    for span in spans:
        said = {"module": span.op.module, "phase": span.op.phase, "dtype": span.op.dtype}
        events.append(_slice(span.op.name, HOST, _ISSUE, begin, span.issued, said))
        if span.end > span.start:
            thread = streams.setdefault(span.stream, len(streams) + 1)
            cost = {**said, "flops": span.op.flops, "bytes": span.op.nbytes, "kernels": span.op.kernels}
            events.append(_slice(span.op.name, DEVICE, thread, span.start, span.end, cost))
        begin = span.issued
    events += _modules(spans)
    events += _counters(trace, spans)
    names = {thread: stream or "computation" for stream, thread in streams.items()}
    return {
        "traceEvents": [*_names(trace, names), *events],
        "displayTimeUnit": "ms",
        "otherData": {"source": trace.source, "device": trace.device},
    }


def _modules(spans: Iterable[Span]) -> Iterator[Event]:
    """Phases, and inside of them modules, as slices that hold one another as the modules do."""
    standing: list[tuple[str, float]] = []  # name, begin
    end = 0.0
    for span in spans:
        path = [span.op.phase, *(span.op.module.split(".") if span.op.module else [])]
        same = 0
        while same < min(len(path), len(standing)) and path[same] == standing[same][0]:
            same += 1
        yield from _closed(standing, same, end)
        standing += [(name, end) for name in path[same:]]
        end = span.issued
    yield from _closed(standing, 0, end)


def _closed(standing: list[tuple[str, float]], kept: int, end: float) -> Iterator[Event]:
    while len(standing) > kept:
        path = ".".join(name for name, _ in standing[1:])
        name, begin = standing.pop()
        yield _slice(name, HOST, _MODULES, begin, end, {"module": path})


def _counters(trace: Recorded, spans: list[Span]) -> Iterator[Event]:
    issued = [span.op.at for span in spans]
    first, replay = trace.start, trace.replay
    known: dict[str, int] = {}
    for at in range(max(first - 1, 0), len(trace.events)):
        before = bisect_right(issued, at) - 1  # the op that is being issued
        time = spans[before - 1].issued if before > 0 else 0.0
        for name, nbytes in (("allocated", replay.allocated[at]), ("reserved", replay.reserved[at])):
            if known.get(name) != nbytes:
                known[name] = nbytes
                yield {"ph": "C", "name": name, "pid": DEVICE, "ts": 1e6 * time, "args": {"bytes": nbytes}}


def _slice(name: str, process: int, thread: int, begin: float, end: float, said: dict[str, Any]) -> Event:
    times = {"ts": round(1e6 * begin, 3), "dur": round(1e6 * (end - begin), 3)}
    return {"ph": "X", "name": name, "pid": process, "tid": thread, **times, "args": said}


def _names(trace: Recorded, streams: dict[int, str]) -> Iterator[Event]:
    processes = {HOST: f"host ({trace.source})", DEVICE: f"{trace.device} ({trace.source})"}
    for process, name in processes.items():
        yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    threads = {(HOST, _ISSUE): "ops issued", (HOST, _MODULES): "phases and modules"}
    threads |= {(DEVICE, thread): f"stream: {name}" if name != COPIES else name for thread, name in streams.items()}
    for (process, thread), name in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}}
