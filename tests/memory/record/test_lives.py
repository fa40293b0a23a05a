"""What a trace's views are made from: the life of each allocation, who owns it, and when the device gets there."""

from __future__ import annotations

from made_traces import traced
from test_trace import record

from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.memory.record.views.lives import lives, ticks


def test_lives_of_a_step() -> None:
    trace = record()
    found = [(life.nbytes, life.made, life.freed) for life in lives(trace)]
    assert found == [(100, 0, None), (200, 1, 5), (1000, 2, 4), (50, 3, 6)]  # the warm-up's 1800 are not among them


def test_a_storage_may_live_twice() -> None:
    trace = record()
    trace.events += [2, ~2]
    again = [(life.made, life.freed) for life in lives(trace) if life.storage is trace.storages[2]]
    assert again == [(1, 5), (7, 8)]


def test_every_moment_adds_up() -> None:
    trace = traced()
    found = lives(trace)
    for moment in range(len(trace.events) - trace.start + 1):
        held = sum(life.nbytes for life in found if life.made <= moment < (life.freed or 1 << 60))
        assert held == trace.replay.allocated[trace.start + moment - 1]


def test_the_clock_only_goes_on_and_ends_with_the_step() -> None:
    trace = traced()
    clock = ticks(trace, trace.schedule())
    assert clock == sorted(clock)
    assert len(clock) == len(trace.events) - trace.start + 1
    assert 0.5 * trace.seconds < clock[-1] <= trace.seconds


def test_parameters_gradients_and_states_have_owners() -> None:
    trace = traced()
    owners = {(life.storage.category, life.storage.place) for life in lives(trace)}
    for category in ("parameters", "gradients", "optimizer"):
        assert {(category, "0"), (category, "2")} <= owners
    assert StepTrace.from_json(trace.to_json()).storages == trace.storages
