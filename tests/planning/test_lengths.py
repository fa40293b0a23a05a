"""Row lengths: the longest of a batch, and plans that take bytes from the longest and seconds from the usual batch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from small_models import llama
from torch import nn

from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.planning.budget import seconds
from ckpt_ft.planning.plan import plan
from ckpt_ft.planning.results import Plan
from ckpt_ft.planning.tracing import trace_policies
from ckpt_ft.workloads.sample_sizes import Lengths
from ckpt_ft.workloads.workload import Workload

ROWS = [6, 6, 6, 10, 12, 40]


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_padded_length_is_the_expected_maximum(batch: int) -> None:
    every = [max(lengths) for lengths in itertools.product(ROWS, repeat=batch)]
    assert Lengths.of(ROWS).padded(batch) == round(sum(every) / len(every))


def test_statistics_of_lengths() -> None:
    lengths = Lengths.of(ROWS)
    assert (lengths.longest, round(lengths.mean, 2)) == (40, 13.33)
    assert [lengths.quantile(share) for share in (0.5, 0.51, 0.9, 1)] == [6, 10, 40, 40]
    assert str(lengths) == "6 rows of 6 to 40 tokens, 13 on average"
    assert Lengths.of(ROWS, by_length=True).padded(5) == 13
    assert lengths.padded(1000) == 40
    assert lengths.cut(11) == Lengths.of([6, 6, 6, 10, 11, 11])
    assert lengths.cut(10) == Lengths.of([6, 6, 6, 10, 10, 10])


def padded_step(size: int, length: int) -> Any:
    ids = torch.arange(size * length).reshape(size, length) % 256

    def step(model: nn.Module, optimizer: Any) -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        model.zero_grad()

    return step


def plan_for(lengths: Lengths | None, budget: str = "6MiB", **more: Any) -> Plan:
    small = llama()
    step = padded_step if lengths else lambda size: padded_step(size, 40)
    return plan(Workload.of_loop(small.model, step, small.make_optimizer, "cpu", lengths=lengths), budget, **more)


def test_bytes_are_of_the_longest_and_seconds_of_the_usual_batch() -> None:
    lengths = Lengths.of([6] * 400 + [8] * 4600 + [40] * 5)
    assert lengths.padded(256) == 15
    small = llama()
    found = plan_for(lengths, batch_size=256, policies=["none", "full"], budget="200MiB")
    at_fixed_length = plan_for(None, batch_size=256, policies=["none", "full"], budget="200MiB")
    workload = Workload.of_loop(small.model, padded_step, small.make_optimizer, "cpu", lengths=lengths)
    for row, same in zip(found.candidates, at_fixed_length.candidates, strict=True):
        assert (same.policy, same.peak, same.reserved) == (row.policy, row.peak, row.reserved)
        (trace,) = trace_policies(workload, [row.policy], workload.typical_step(256))
        assert row.seconds == seconds(trace)  # type: ignore[arg-type]
        assert row.seconds < 0.6 * same.seconds
    assert "padded to 15 at batch 256" in found.data
    fix = next(fix for fix in found.fixes if "group_by_length" in fix.change)
    assert fix.saves == 0
    assert fix.slower < -0.2
    assert "48% of the tokens are padding" in fix.change


@pytest.mark.slow
def test_cutting_few_long_rows_is_suggested() -> None:
    lengths = Lengths.of([10] * 400 + [40])
    assert (lengths.padded(256), lengths.cut(10).padded(256)) == (24, 10)
    fixes = plan_for(lengths, budget="200MiB", batch_size=256, policies=["none"]).fixes
    cut = next(fix for fix in fixes if fix.change.startswith("--max_length 10,"))
    small = llama()

    def trace(length: int) -> StepTrace:
        workload = Workload.of_loop(small.model, padded_step, small.make_optimizer, "cpu", lengths=lengths)
        return trace_policies(workload, ["none"], padded_step(256, length))[0]  # type: ignore[return-value]

    assert cut.saves == trace(40).peak_reserved - trace(10).peak_reserved
    assert cut.slower == round(seconds(trace(10)) / seconds(trace(24)) - 1, 4) < -0.2
