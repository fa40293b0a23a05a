"""Plans over several launches: each row equals its trace, and the pick is as good as the best plan of one launch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from versions import is_older

from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.errors import UserError
from ckpt_ft.memory.gpus import find_gpu
from ckpt_ft.planning.budget import Candidate
from ckpt_ft.planning.launches import with_experts
from ckpt_ft.planning.plan import plan
from ckpt_ft.planning.results import Plan
from ckpt_ft.planning.scaled_traces import HIGH, LOW, Growth
from ckpt_ft.planning.tracing import Tracer
from ckpt_ft.spec.launch import Launch, launches_on
from ckpt_ft.workloads.from_trainer import own_loss
from ckpt_ft.workloads.workload import Batch, Workload

POLICIES = ["none", "pointwise", "full"]
LAUNCHES = launches_on(4, link=2e8)  # so slow that communication decides


BUDGET = "1100MiB"


def workload() -> Workload:
    """A model of 17 million parameters, whose states take most of the memory."""
    config = LlamaConfig(
        vocab_size=4096, hidden_size=512, intermediate_size=1376, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)

    def make_batch(samples: int, length: int | None) -> Batch:
        ids = torch.zeros(samples, 64, dtype=torch.long)
        return {"input_ids": ids, "labels": ids.clone()}

    return Workload(
        model, make_batch, own_loss, lambda model: torch.optim.AdamW(model.parameters(), fused=True), find_gpu("t4")
    )


@pytest.fixture(scope="module")
def found() -> Plan:
    return plan(workload(), BUDGET, launches=LAUNCHES, policies=POLICIES, max_batch_size=64, margin=0.0)


def test_every_row_equals_the_trace_of_its_launch(found: Plan) -> None:
    assert {candidate.launch for candidate in found.candidates} == set(LAUNCHES)
    for candidate in found.candidates:
        asked = replace(workload(), launch=candidate.launch)
        apply_policy(asked.model, candidate.policy)
        trace = asked.trace(candidate.batch)
        assert Candidate.of(candidate.policy, candidate.batch, trace) == candidate
        assert candidate.reserved <= found.room.limit
    assert Plan.from_json(found.to_json()) == found


@pytest.mark.slow
def test_pick_is_as_fast_as_the_best_plan_of_one_launch(found: Plan) -> None:
    more = {"policies": POLICIES, "max_batch_size": 64, "margin": 0.0}
    alone = [plan(replace(workload(), launch=launch), BUDGET, **more).best for launch in LAUNCHES]  # type: ignore[arg-type]
    fastest = max(candidate.samples_per_second for candidate in alone)
    assert found.best.samples_per_second >= 0.98 * fastest


def test_scaled_trace_has_the_collectives_of_a_trace() -> None:
    """Their bytes and their own stream are kept, so that they are priced as collectives."""
    asked = replace(workload(), launch=Launch("fsdp2", 4))
    with Tracer(asked) as tracer:
        growth = Growth(LOW, HIGH)
        low, high, between = (tracer.trace("none", at) for at in (LOW, HIGH, 24))
        growth.learn(low, high)  # type: ignore[arg-type]
        scaled = growth.scale(low, 24)  # type: ignore[arg-type]
    assert not isinstance(between, str)
    assert [(op.wire, op.stream) for op in scaled.ops] == [(op.wire, op.stream) for op in between.ops]
    assert [s.stream for s in scaled.storages] == [s.stream for s in between.storages]
    assert scaled.seconds == pytest.approx(between.seconds, rel=1e-3)
    assert scaled.peak_reserved == pytest.approx(between.peak_reserved, rel=1e-3)


def test_zero_is_tried_when_named() -> None:
    launches = launches_on(2, strategies=["zero2", "zero3"])
    found = plan(workload(), launches=launches, policies=["none"], batch_size=2)
    assert {candidate.launch for candidate in found.candidates} == set(launches)
    with pytest.raises(UserError, match=r"the smallest budget that works is .* under 'none' with zero[23], on 2 GPUs"):
        plan(workload(), "1GiB", launches=launches, policies=["none"], batch_size=2)


def test_launch_that_cannot_wrap_the_model_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = workload()
    refuses = Launch("fsdp2", 2, wrap=("NoSuchBlock",))
    found = plan(asked, BUDGET, launches=[Launch("ddp", 2), refuses], policies=["none"], batch_size=2)
    assert {candidate.launch for candidate in found.candidates} == {Launch("ddp", 2)}
    assert "FSDP2 cannot wrap" in found.rejected[str(refuses)]
    with pytest.raises(UserError, match="FSDP2 cannot wrap"):
        plan(asked, BUDGET, launches=[refuses], policies=["none"], batch_size=2)


def test_expert_parallel_degree_divides_the_number_of_experts() -> None:
    def mixture(experts: int, kind: str = "qwen3_moe") -> nn.Module:
        sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 300}
        config = AutoConfig.for_model(kind, **sizes, num_experts=experts, moe_intermediate_size=32)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)

    launches = launches_on(8)
    if is_older("transformers", "5.23"):  # which divides no experts of a model that is loaded already
        assert with_experts(launches, mixture(128)) == launches
        with pytest.raises(UserError, match="tensor and expert parallelism need transformers 5.23 or newer"):
            plan(workload(), launches=[Launch("fsdp2", 8, ep=8)], policies=["none"], batch_size=2)
        return
    tried = {experts: with_experts(launches, mixture(experts)) for experts in (128, 60, 7)}
    assert tried[128] == [*launches, Launch("fsdp2", 8, ep=8)]
    assert tried[60] == [*launches, Launch("fsdp2", 8, ep=4)]
    assert tried[7] == with_experts(launches, workload().model) == launches
    assert with_experts(launches_on(16), mixture(128))[-1] == Launch("fsdp2", 16, ep=8)  # within a machine
    assert with_experts(launches_on(8, strategies=["ddp"]), mixture(128)) == [Launch("ddp", 8)]
    for targets, found in (
        ({"target_modules": ["q_proj"]}, [*launches, Launch("fsdp2", 8, ep=8)]),
        ({"target_parameters": ["mlp.experts.down_proj"]}, launches),
    ):
        adapted = get_peft_model(mixture(8), LoraConfig(**targets))  # type: ignore[arg-type]
        assert with_experts(launches, adapted) == found


def test_invalid_choice_of_launches_is_refused() -> None:
    with pytest.raises(UserError, match="1 GPUs: a launch is for at least 2"):
        launches_on(1)
    with pytest.raises(UserError, match="no strategy 'zero4'; did you mean 'zero"):
        launches_on(2, strategies=["zero4"])
    with pytest.raises(UserError, match="9 processes on 2 machines"):
        launches_on(9, 2)
