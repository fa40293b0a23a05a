"""Extrapolated traces: the search needs few replays and finds what replays of every batch size would find."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small_models import MODELS, Small
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from ckpt_ft.memory.gpus import find_gpu
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.planning.budget import memory_budget
from ckpt_ft.planning.scaled_traces import LOW, Estimates
from ckpt_ft.planning.tracing import Tracer, trace_policies

POLICIES = ["none", "pointwise", "full", "save:attention", "modules:mlp", "full,offload"]


@pytest.fixture(scope="module")
def tracer() -> Iterator[Tracer]:
    """Traces a Llama on a T4, large enough that the allocator's 20 MiB segments do not decide."""
    config = LlamaConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=8,
        max_position_embeddings=256,
    )  # fmt: skip

    def loss(model: nn.Module, size: int) -> torch.Tensor:
        ids = torch.zeros(size, 256, dtype=torch.long)
        found: torch.Tensor = model(input_ids=ids, labels=ids).loss
        return found

    with torch.device("meta"):
        model = LlamaForCausalLM(config).train()
    with Tracer(Small(model, loss).workload(find_gpu("t4"))) as made:
        yield made


def estimates(tracer: Tracer, budget: str) -> Estimates:
    made = Estimates(tracer, memory_budget(budget, find_gpu("t4"), "0"))
    made.trace_candidates(POLICIES)
    return made


@pytest.mark.parametrize(("budget", "largest"), [("2GiB", 48), ("6GiB", 170), ("14GiB", 417)])
def test_search_takes_few_replays(tracer: Tracer, budget: str, largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most four replays per policy, where bisection takes five or more; and each batch is the largest that fits."""
    asked = estimates(tracer, budget)
    replays, replay_with = [], StepTrace.replay_with

    def counted(*args: Any) -> Any:
        replays.append(args)
        return replay_with(*args)

    with monkeypatch.context() as patched:
        patched.setattr(StepTrace, "replay_with", counted)
        batches = [found.batch if (found := asked.best(policy)) else 0 for policy in POLICIES]
    assert max(batches) == largest
    assert len(replays) <= 4 * len(POLICIES)
    for policy, batch in zip(POLICIES, batches, strict=True):
        assert asked.reserved(policy, batch) <= asked.room.limit < asked.reserved(policy, batch + 1)


def test_floor_is_a_lower_bound_of_reserved_bytes(tracer: Tracer) -> None:
    asked = estimates(tracer, "500MiB")
    for policy in POLICIES:
        for batch in (1, LOW, 40, 400):
            assert 0.5 * asked.scaled_reserved(policy, batch) < asked.floor(policy, batch)
            assert asked.floor(policy, batch) <= asked.scaled_reserved(policy, batch)


def test_smallest_estimate_is_the_minimum_over_policies(tracer: Tracer) -> None:
    asked = estimates(tracer, "500MiB")
    first = min(POLICIES, key=lambda policy: asked.reserved(policy, 1))
    assert asked.smallest() == asked.estimate(first, 1)


def test_refused_policy_does_not_change_other_traces() -> None:
    workload = MODELS["vit"]().workload(find_gpu("t4"))
    step = workload.step(3)
    plain = trace_policies(workload, ["none", "full"], step)
    for others in (["head", "none", "full"], ["none", "head", "full"], ["none", "full", "head"]):
        found = dict(zip(others, trace_policies(workload, others, step), strict=True))
        assert "no output layer over a vocabulary" in str(found["head"])
        for trace, like in zip((found["none"], found["full"]), plain, strict=True):
            assert isinstance(trace, StepTrace)
            assert isinstance(like, StepTrace)
            assert (trace.events, trace.storages, trace.ops) == (like.events, like.storages, like.ops)
    assert all(isinstance(trace, str) for trace in trace_policies(workload, ["head", "save:conv"], step))
