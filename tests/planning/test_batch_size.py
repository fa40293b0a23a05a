"""The largest batch size: compared with real steps, after out-of-memory errors, and on two ranks."""

from __future__ import annotations

import gc
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from small_models import MODELS, Small
from torch import nn

from ckpt_ft.checkpointing import rng
from ckpt_ft.checkpointing.apply import applied_policy, apply_policy
from ckpt_ft.errors import UserError
from ckpt_ft.memory.gpus import find_gpu
from ckpt_ft.memory.record.tracker import Tracker
from ckpt_ft.planning import batch_size, tracing
from ckpt_ft.planning.batch_size import find_max_batch_size, keep_effective, predict_max_batch_size
from ckpt_ft.planning.budget import limited_by_phases, memory_budget
from ckpt_ft.planning.plan import plan
from ckpt_ft.planning.tracing import Traced
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.workload import Step, Workload

POLICIES = {
    "llama": ("none", "full", "pointwise", "head", "save:attention+matmul", "segments:2", "modules:mlp"),
    "unet": ("none", "full", "pointwise", "stages", "save:conv"),
    "resnet": ("none", "full", "pointwise", "stages"),
    "vit": ("none", "full", "pointwise", "first:2,pointwise", "modules:attention"),
}


def measured(small: Small, sizes: range) -> dict[int, int]:
    """Returns the peak bytes of a real steady-state step for each batch size."""
    optimizer = small.make_optimizer(small.model)
    small.step_for_batch(1)(small.model, optimizer)
    peaks = {}
    for size in sizes:
        gc.collect()
        tracker = Tracker(small.model, optimizer, ops=False)
        with tracker:
            tracker.start_step()
            small.step_for_batch(size)(small.model, optimizer)
        peaks[size] = tracker.recorder.peak
    return peaks


@pytest.mark.slow
def test_largest_batch_equals_brute_force() -> None:
    small = MODELS["llama"]()
    apply_policy(small.model, "full")
    peaks = measured(small, range(1, 10))
    found = find_max_batch_size(small.model, small.step_for_batch, peaks[8] + 1, make_optimizer=small.make_optimizer)
    assert (found.batch, found.predicted, found.trials[-1].peak) == (8, 8, peaks[8])
    assert [trial.batch for trial in found.trials] == [8, 8]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_largest_batch_takes_three_steps_and_rarely_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    small = MODELS[name]()
    traced: dict[tuple[str, int], Traced] = {}  # five budgets ask for the same traces
    plain = tracing._session

    def trace_each_once(workload: Workload, keys: list[tuple[str, int]], usual: bool) -> list[Traced]:
        for key in keys:
            if key not in traced:
                (traced[key],) = plain(workload, [key], usual)
        return [traced[key] for key in keys]

    monkeypatch.setattr(tracing, "_session", trace_each_once)
    outcomes: Counter[str] = Counter()
    for policy in POLICIES[name]:
        apply_policy(small.model, policy)
        peaks = measured(small, range(1, 13))
        for share in (0.05, 0.27, 0.5, 0.73, 0.95):
            budget = round(peaks[1] + share * (peaks[12] - peaks[1]))
            found = find_max_batch_size(
                small.model, small.step_for_batch, budget, make_optimizer=small.make_optimizer, max_batch_size=12
            )
            assert found.batch == max(size for size, peak in peaks.items() if peak <= budget), (policy, budget, found)
            outcomes["runs"] += 1
            outcomes["more than three steps"] += len(found.trials) > 3
            outcomes["out of memory"] += any(not trial.fits for trial in found.trials)
    assert outcomes["more than three steps"] <= outcomes["runs"] // 10, outcomes
    assert outcomes["out of memory"] <= outcomes["runs"] // 10, outcomes


def test_search_leaves_weights_random_state_and_gradients_unchanged() -> None:
    small = MODELS["resnet"]()
    before = {key: value.clone() for key, value in small.model.state_dict().items()}

    def drawing(samples: int) -> Step:
        def step(model: nn.Module, optimizer: Any) -> None:
            random.random(), numpy.random.rand(), torch.rand(1)
            small.step_for_batch(samples)(model, optimizer)

        return step

    drawn = rng.snapshot(host=True)
    find_max_batch_size(small.model, drawing, "8MiB", make_optimizer=small.make_optimizer)
    assert all(torch.equal(value, before[key]) for key, value in small.model.state_dict().items())
    assert rng.snapshot(host=True) == drawn
    assert all(parameter.grad is None for parameter in small.model.parameters())


def test_search_keeps_the_users_gradients_and_policy() -> None:
    small = MODELS["llama"]()
    applied = apply_policy(small.model, "full")

    def step_without_zero_grad(size: int) -> Step:  # adds to existing gradients and leaves its own
        def step(model: nn.Module, optimizer: Any) -> None:
            small.loss(model, size).backward()
            optimizer.step()

        return step

    optimizer: dict[str, Any] = {"make_optimizer": small.make_optimizer}
    small.loss(small.model, 2).backward()
    given = {name: parameter.grad for name, parameter in small.model.named_parameters()}
    bits = {name: gradient.clone() for name, gradient in given.items()}
    found = find_max_batch_size(small.model, step_without_zero_grad, "1GiB", max_batch_size=2, **optimizer)
    assert found.trials
    for name, parameter in small.model.named_parameters():
        assert parameter.grad is given[name]
        assert torch.equal(parameter.grad, bits[name])
    small.model.zero_grad()
    without = find_max_batch_size(small.model, step_without_zero_grad, "1GiB", max_batch_size=2, **optimizer)
    assert without.trials == found.trials  # they are not counted either
    assert applied_policy(small.model) is applied
    applied.remove()
    assert not any("forward" in vars(module) for module in small.model.modules())


@pytest.mark.parametrize(("users", "during"), [(1.0, 0.25), (0.5, 0.25), (0.125, 0.125)])
def test_memory_fraction_of_the_user_is_restored(users: float, during: float, monkeypatch: pytest.MonkeyPatch) -> None:
    fractions = [users]
    total = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: total)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: fractions[-1])
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda value, device: fractions.append(value))

    def run_out() -> None:
        with batch_size._limited(torch.device("cuda", 0), 20 * 2**30):
            assert fractions[-1] == during
            raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        run_out()
    assert fractions == [users, during, users]


@pytest.mark.parametrize("factor", [0.5, 1.7])
def test_wrong_prediction_is_corrected_by_real_steps(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    small = MODELS["llama"]()
    peaks = measured(small, range(1, 9))
    right = batch_size.largest_in_room

    def wrong(*args: object) -> tuple[object, int, int]:
        estimates, size, needed = right(*args)
        return estimates, max(1, round(size * factor)), needed

    monkeypatch.setattr(batch_size, "largest_in_room", wrong)
    budget = peaks[8]
    found = find_max_batch_size(small.model, small.step_for_batch, budget, make_optimizer=small.make_optimizer)
    assert found.batch == 8
    assert found.predicted != 8
    assert any(not trial.fits for trial in found.trials) == (factor > 1)


def test_memory_is_freed_after_out_of_memory() -> None:
    small = MODELS["llama"]()
    room = memory_budget("4MiB", None)
    runner = batch_size.Runner(small.workload(), room, torch.device("cpu"))

    def alive() -> int:
        gc.collect()
        return sum(tensor.nbytes for tensor in gc.get_objects() if type(tensor) is torch.Tensor)

    before = alive()
    assert runner.attempt(500) is None
    assert alive() == before
    assert runner.attempt(1) is not None  # a smaller batch still runs


def test_budget_for_no_sample_gives_batch_zero() -> None:
    small = MODELS["vit"]()
    found = find_max_batch_size(small.model, small.step_for_batch, "100KiB", make_optimizer=small.make_optimizer)
    assert (found.batch, found.predicted) == (0, 0)
    with pytest.raises(UserError, match="needs a budget"):
        find_max_batch_size(small.model, small.step_for_batch)


@pytest.mark.parametrize(
    ("given", "largest", "micro", "steps"),
    [((8, 4), 13, 8, 4), ((64, 1), 13, 8, 8), ((4, 4), 100, 16, 1), ((7, 1), 6, 4, 2), ((1, 1), 9, 1, 1)],
)
def test_effective_batch_is_kept(given: tuple[int, int], largest: int, micro: int, steps: int) -> None:
    assert keep_effective(*given, largest)[:2] == (micro, steps)


def test_change_of_the_effective_batch_is_reported() -> None:
    assert "the effective batch stays 64 per device" in keep_effective(64, 1, 13)[2]
    assert "the effective batch becomes 8, was 7 per device" in keep_effective(7, 1, 6)[2]
    with pytest.raises(UserError, match="not even one sample"):
        keep_effective(8, 1, 0)


def _on_a_rank(rank: int, results: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    small = MODELS["llama"]()
    budget = f"{4 + 2 * rank}MiB"  # the second rank has the larger budget
    found = find_max_batch_size(small.model, small.step_for_batch, budget, make_optimizer=small.make_optimizer)
    Path(results, str(rank)).write_text(str(found.batch))


@pytest.mark.slow
def test_ranks_agree_on_the_smallest_batch(tmp_path: Path) -> None:
    # spawned processes would import torch first
    mp.start_processes(_rank_main, (str(tmp_path),), nprocs=2, start_method="fork")
    sizes = [int((tmp_path / str(rank)).read_text()) for rank in (0, 1)]
    alone = MODELS["llama"]()
    found = find_max_batch_size(alone.model, alone.step_for_batch, "4MiB", make_optimizer=alone.make_optimizer)
    assert sizes == [found.batch, found.batch]


def _rank_main(rank: int, results: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{results}/store", rank=rank, world_size=2)
    try:
        _on_a_rank(rank, results)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "found_by_trying"), [("none", 177), ("stages:3+4", 205)])
def test_largest_batch_on_a_t4_equals_the_measured_one(policy, found_by_trying):
    resnet = load(TrainingSpec.of("microsoft/resnet-50", optimizer="none", max_grad_norm=0.0), find_gpu("t4"))
    found = predict_max_batch_size(resnet, policy, margin=0)
    assert found.last == pytest.approx(found_by_trying, abs=2)
    assert found.batch < found.last
    assert f"up to {found.last} runs, but waits for the device" in str(found)


def test_smallest_batch_with_batch_norm_is_two() -> None:
    """BatchNorm refuses a batch of 1, so the search starts at 2; if 2 does not fit either, the error is one line."""

    def step_for_batch(samples: int) -> Step:
        def step(model: nn.Module, optimizer: Any) -> None:
            model(torch.ones(samples, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    asked = Workload.of_loop(model, step_for_batch, lambda m: torch.optim.SGD(m.parameters(), 0.1), "cpu")
    needs = {n: asked.trace(n).peak_allocated for n in (2, 3)}
    assert predict_max_batch_size(asked, "none", needs[3] - 1).batch == 2
    with pytest.raises(UserError, match="a batch of 1: Expected more than 1 value .*; give at least 2, or"):
        predict_max_batch_size(asked, "none", needs[2] - 1)


def test_phases_between_steps_limit_the_batch(tmp_path: Path) -> None:
    """A phase takes 3 MiB and 1 MiB per sample, so 8 MiB hold a batch of at most 5, whatever the step takes."""

    def between(workload: Workload, samples: int) -> Any:
        return lambda model, optimizer: torch.empty((3 + samples) * 2**20, dtype=torch.uint8)

    model = torch.nn.Linear(4, 4, bias=False)
    workload = Workload.of_loop(model, lambda samples: lambda model, _: model(torch.ones(samples, 4)).sum().backward(),
                                device="cpu")  # fmt: skip
    workload = replace(workload, phases={"evaluation": between})
    room = memory_budget("8.5MiB", None)
    assert limited_by_phases(workload, room, 64) == 5
    assert limited_by_phases(workload, room, 4) == 4
    assert predict_max_batch_size(workload, budget="8.5MiB", max_batch_size=64).batch == 5
    assert plan(workload, "8.5MiB", max_batch_size=64, target="effective_batch", policies=["none"]).best.batch == 5
    with pytest.raises(UserError, match=r"the evaluation beside a batch of 6 takes 9.0 MiB.*--eval-batch-size"):
        plan(workload, "8.5MiB", batch_size=6, policies=["none"])
