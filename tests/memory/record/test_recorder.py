"""The parts of a tracker: the recorder, the step context, and the insertion of skipped units into a record."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ckpt_ft.memory.cost.op_work import Work
from ckpt_ft.memory.record.recorder import Recorder
from ckpt_ft.memory.record.splice import NotPeriodic, SkippedRun, Unit, splice
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


def recorded(units: int, sizes: dict[int, int] | None = None) -> Recorder:
    """Returns a record in which each unit allocates its output and frees its input."""
    recorder = Recorder(StepContext())
    recorder.mark("step")
    before = None
    for unit in range(units):
        at = len(recorder.events)
        recorder.add_op("aten.mm.default", Work(), f"layers.{unit}.mlp", at, "", 0, "")
        made = recorder.allocate((sizes or {}).get(unit, 64), "activations", "aten.mm.default")
        recorder.storages[made].module = f"layers.{unit}.mlp"
        if before is not None:
            recorder.free(before)
        before = made
    recorder.add_op("aten.sum.default", Work(), "", len(recorder.events), "", 0, "")
    assert before is not None
    recorder.free(before)
    return recorder


def rename_last_unit(recorder: Recorder, last: str) -> None:
    """Renames the fourth traced unit to the last unit of the model."""
    for one in (*recorder.ops, *recorder.storages):
        if one.module == "layers.3.mlp":
            one.module = last


def test_skipped_units_are_spliced_into_the_record() -> None:
    whole, short = recorded(7), recorded(4)
    rename_last_unit(short, "layers.6.mlp")
    start = short.position._replace(ops=0, storages=0, events=0, marks=1)
    splice(short, start, [SkippedRun([Unit([f"layers.{unit}"]) for unit in range(7)])])
    assert (short.ops, short.events, short.storages, short.marks) == (
        whole.ops, whole.events, whole.storages, whole.marks,
    )  # fmt: skip


def test_units_that_differ_are_not_spliced() -> None:
    short = recorded(4, {2: 128})
    rename_last_unit(short, "layers.6.mlp")
    before = list(short.events), list(short.storages), list(short.ops)
    start = short.position._replace(ops=0, storages=0, events=0, marks=1)
    with pytest.raises(NotPeriodic, match=r"layers\.0: .*do not do the same") as error:
        splice(short, start, [SkippedRun([Unit([f"layers.{unit}"]) for unit in range(7)])])
    assert error.value.names == {"layers.0"}
    assert (short.events, short.storages, short.ops) == before
