"""The parts of a tracker: the recorder and the step context."""

from __future__ import annotations

import torch
from torch import nn

from ckpt_ft.memory.record.recorder import Recorder
from ckpt_ft.memory.record.step_context import StepContext


def test_recorder_follows_a_storage_until_it_is_freed() -> None:
    recorder = Recorder(StepContext())
    made, view = torch.zeros(10), None
    recorder.follow(made, "activations", "aten.zeros.default", "block")
    view = made[2:]
    recorder.follow(view, "activations", "aten.slice.Tensor", "block")  # the same storage
    assert (recorder.allocated, recorder.events, recorder.made_by(view)) == (40, [0], "aten.zeros.default")
    del made
    assert recorder.events == [0]
    del view
    assert (recorder.allocated, recorder.peak, recorder.events) == (0, 40, [0, ~0])
    assert recorder.storages[0].category == "temporary"  # allocated and freed in one phase


def test_context_names_the_module_that_runs_forward_or_backward() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    context = StepContext()
    context.name_modules(model)
    seen: list[tuple[str, str]] = []
    phases: list[str] = []
    context.phase_listeners.append(phases.append)

    def note(*args: object) -> None:
        context.locate()
        seen.append((context.phase, context.module()))

    model[1].register_forward_pre_hook(note)
    with context:
        out = model(torch.ones(1, 2, requires_grad=True))
        out.register_hook(note)
        out.sum().backward()
        context.locate(dispatching=False)
    assert seen == [("forward", "1"), ("backward", "1")]
    assert phases == ["backward"]
