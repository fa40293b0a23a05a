"""Lifetimes and owners of allocations, and the predicted time of each event."""

from __future__ import annotations

from dataclasses import replace

from sample_traces import traced
from test_trace import record

from ckpt_ft.memory.record.trace import StepTrace


def test_lifetimes_of_a_step() -> None:
    trace = record()
    found = [(lifetime.nbytes, lifetime.made, lifetime.freed) for lifetime in trace.lifetimes()]
    assert found == [(100, 0, None), (200, 1, 5), (1000, 2, 4), (50, 3, 6)]  # without the warm-up's 1800 bytes


def test_storage_allocated_twice_has_two_lifetimes() -> None:
    trace = record()
    trace = replace(trace, events=[*trace.events, 2, ~2])
    reallocated = [(one.made, one.freed) for one in trace.lifetimes() if one.storage is trace.storages[2]]
    assert reallocated == [(1, 5), (7, 8)]


def test_lifetimes_add_up_to_the_allocated_bytes() -> None:
    trace = traced()
    found = trace.lifetimes()
    for moment in range(len(trace.events) - trace.start + 1):
        held = sum(lifetime.nbytes for lifetime in found if lifetime.made <= moment < (lifetime.freed or 1 << 60))
        assert held == trace.replay.allocated[trace.start + moment - 1]


def test_event_times_increase_up_to_the_end_of_the_step() -> None:
    trace = traced()
    times = trace.moment_times(trace.schedule())
    assert times == sorted(times)
    assert len(times) == len(trace.events) - trace.start + 1
    assert 0.5 * trace.seconds < times[-1] <= trace.seconds


def test_parameters_gradients_and_states_have_owners() -> None:
    trace = traced()
    owners = {(lifetime.storage.category, lifetime.storage.place) for lifetime in trace.lifetimes()}
    for category in ("parameters", "gradients", "optimizer"):
        assert {(category, "0"), (category, "2")} <= owners
    assert StepTrace.from_json(trace.to_json()).storages == trace.storages
