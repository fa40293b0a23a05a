"""StepTrace.plot: the picture of a trace (see timeline.py)."""

from __future__ import annotations

from pathlib import Path

from .timeline import Timeline
from .trace import StepTrace


def plot_timeline(trace: StepTrace, path: Path) -> Path:
    """Draw the measured step of `trace` to `path`; raises UserError without matplotlib."""
    source = "measured" if trace.device == "cpu" else "predicted"
    return Timeline.from_trace(trace, source).draw(path, f"one training step on {trace.device}")
