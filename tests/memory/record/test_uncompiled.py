"""The tracker measures a compiled model; dynamo does not compile the tracker."""

from __future__ import annotations

import warnings

import pytest
from torch import nn

from ckpt_ft.memory.record.tracker import Tracker


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own warning when its compiler is imported
def test_tracker_is_not_compiled() -> None:
    import torch._dynamo

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    compiled = torch.compile(model, backend="eager")
    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()
    with warnings.catch_warnings(record=True) as caught:
        for _ in range(2):
            with Tracker(model) as tracker:
                tracker.start_step()
                compiled(torch.ones(3, 4)).sum().backward()
    seen = [metrics.co_filename for metrics in torch._dynamo.utils.get_compilation_metrics()]
    assert [file for file in seen if "ckpt_ft/memory" in str(file)] == []
    assert [str(w.message) for w in caught if "global hooks" in str(w.message)] == []
    assert tracker.trace("cpu").peak_allocated > 0
