"""Plans: compared with an exhaustive grid, saved as files, under invalid budgets, and the parts of the search."""

from __future__ import annotations

import gc
import json
import re
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from small_models import MODELS

from ckpt_ft.checkpointing.apply import applied_policy, apply_policy
from ckpt_ft.errors import UserError
from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.memory.gpus import find_gpu
from ckpt_ft.planning.budget import Candidate, MemoryBudget, better, frontier, largest_fitting, memory_budget
from ckpt_ft.planning.estimate import no_policy_fits
from ckpt_ft.planning.plan import plan
from ckpt_ft.planning.results import Plan
from ckpt_ft.planning.scaled_traces import HIGH, LOW, Estimates, Growth
from ckpt_ft.planning.search import _swap, search
from ckpt_ft.planning.tracing import Tracer, trace_policies
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.units import GIB, MIB, format_bytes
from ckpt_ft.workloads.load import load


def small_plan(name: str, budget: str, **more: object) -> Plan:
    small = MODELS[name]()
    return plan(small.model, small.step_for_batch, budget, "cpu", make_optimizer=small.make_optimizer, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def llama_plan() -> Plan:
    return small_plan("llama", "6MiB", max_batch_size=64)


@pytest.mark.slow
def test_pick_is_within_3_percent_of_an_exhaustive_grid(llama_plan: Plan) -> None:
    small = MODELS["llama"]()
    workload = small.workload("cpu")
    policies = ["none", "full", "pointwise", "head", *(f"first:{k}" for k in (1, 2, 3))]
    policies += [f"first:{k},pointwise" for k in (1, 2, 3)] + [
        "save:attention+matmul",
        "modules:mlp",
        "sqrt",
        "full,head",
    ]
    with Tracer(workload) as tracer:
        batches = [*range(2, 33, 3), *(row.batch for row in llama_plan.candidates)]
        grid = [
            Candidate.of(policy, batch, trace)
            for batch in batches
            for policy, trace in zip(policies, tracer.all((p, batch) for p in policies), strict=True)
            if not isinstance(trace, str)
        ]
    fitting = [row for row in grid if llama_plan.room.fits(row)]
    assert llama_plan.best.samples_per_second >= 0.97 * max(row.samples_per_second for row in fitting)


def test_every_row_equals_its_trace_and_fits(llama_plan: Plan) -> None:
    small = MODELS["llama"]()
    for row in llama_plan.candidates:
        apply_policy(small.model, row.policy)
        step = small.step_for_batch(row.batch)
        trace = trace_step(small.model, step, make_optimizer=small.make_optimizer, device="cpu")
        assert (row.peak, row.reserved) == (trace.peak_allocated, trace.peak_allocated)
        assert row.reserved <= 6 * MIB


def test_plan_is_saved_and_printed(llama_plan: Plan) -> None:
    loaded = Plan.from_json(llama_plan.to_json())
    assert loaded == llama_plan
    assert json.loads(llama_plan.to_json())["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert llama_plan.table().count("\n") == len(llama_plan.candidates) + 1
    layers = [holder for holder in loaded.holders if holder.module.startswith("model.layers.")]
    assert layers
    assert all(holder.module.startswith("model.layers.*.") or holder.module == "model.layers.*" for holder in layers)


def test_plan_of_another_torch_or_model_is_refused(llama_plan: Plan) -> None:
    document = json.loads(llama_plan.to_json())
    document["versions"]["torch"] = "2.0.0"
    with pytest.raises(UserError, match=r"made with torch 2\.0\.0, here 2\."):
        Plan.from_json(json.dumps(document))
    llama_plan.check_model(get_peft_model(MODELS["llama"]().model, LoraConfig(target_modules=["q_proj"])))
    with pytest.raises(UserError, match="made for LlamaForCausalLM, a LlamaForCausalLM, and this is a ViTForImage"):
        llama_plan.check_model(MODELS["vit"]().model)
    with pytest.raises(UserError, match="not a plan"):
        Plan.from_json("[]")


def test_progress_names_what_is_traced_and_what_fits() -> None:
    said: list[str] = []
    with Tracer(MODELS["vit"]().workload("cpu"), report=said.append) as tracer:
        search(Estimates(tracer, MemoryBudget(3 * MIB), batch=6), ["pointwise", "full"])
        tracer.trace("none", 6)
    assert said[0] == "tracing batch 6 under pointwise; full"
    assert sorted(said[1:3]) == ["tracing batch 6 under full", "tracing batch 6 under pointwise"]
    assert re.fullmatch(r"batch 6 under (full|pointwise) fits; tracing batch 6 under none", said[3])

    def stop(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        small_plan("vit", "3MiB", report=stop, batch_size=6)


@pytest.mark.slow
def test_fixed_batch_and_other_targets() -> None:
    fixed = small_plan("vit", "3MiB", batch_size=6, policies=["none", "pointwise", "full"])
    assert {row.batch for row in fixed.candidates} == {6}
    leanest = small_plan("vit", "3MiB", target="memory", policies=["none", "pointwise", "full"])
    assert (leanest.best.policy, leanest.best.batch) == ("full", 1)
    largest = small_plan("vit", "3MiB", target="effective_batch", policies=["none", "full"])
    assert largest.best.policy == "full"
    assert largest.best.batch > 2 * largest.candidates[1].batch


def test_plan_keeps_the_policy_of_the_model() -> None:
    small = MODELS["llama"]()
    apply_policy(small.model, "every:2")
    plan(small.model, small.step_for_batch, "6MiB", "cpu", policies=["none"], batch_size=1)
    applied = applied_policy(small.model)
    assert applied is not None
    assert str(applied.policy) == "every:2"


def test_invalid_budget_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"the parameters alone take .* the smallest budget that works is .* under 'full'"
    ):
        small_plan("llama", "100KiB", policies=["none", "full"])
    with pytest.raises(UserError, match=r"t4 has 14\.56 GiB; give at most that"):
        memory_budget("24GiB", find_gpu("t4"))
    with pytest.raises(UserError, match="the CPU needs a budget"):
        memory_budget(None, None)
    with pytest.raises(UserError, match="target 'speed': choose one of throughput"):
        better("speed")
    for name in ("batch_size", "max_batch_size"):
        with pytest.raises(UserError, match=f"^{name} 0: a batch has at least 1 sample"):
            small_plan("llama", "1MiB", **{name: 0})


def test_named_smallest_budget_works() -> None:
    small = MODELS["llama"]()
    with pytest.raises(UserError) as refused:
        plan(small.model, small.step_for_batch, 400_000, "cpu", policies=["none", "full"])
    needed = float(str(refused.value).split("works is ")[1].split(" KiB")[0])
    budget = round((needed + 0.1) * 1024)
    assert plan(small.model, small.step_for_batch, budget, "cpu", policies=["none", "full"]).best.batch == 1


def test_named_smallest_budget_includes_a_relative_margin() -> None:
    small = MODELS["llama"]()
    with pytest.raises(UserError) as refused:
        plan(small.model, small.step_for_batch, 300_000, "cpu", margin=0.05, policies=["full"])
    said = str(refused.value).split("works is ")[1].split(", under")[0]
    assert plan(small.model, small.step_for_batch, said, "cpu", margin=0.05, policies=["full"]).best.batch == 1
    for reserved in range(10**6, 10**6 + 50):
        row = Candidate("none", 1, reserved, reserved, 1.0)
        needed = memory_budget(10**6, None, 0.05).needs(row)
        assert memory_budget(needed, None, 0.05).fits(row)
        assert not memory_budget(needed - 4, None, 0.05).fits(row)


def test_limit_is_the_budget_less_context_and_margin() -> None:
    gpu = find_gpu("a100-40gb")
    room = memory_budget("24GiB", gpu)
    assert room.limit == 24 * GIB - gpu.context - round(0.02 * 24 * GIB)
    assert memory_budget("24GiB", gpu, "1GiB").limit == 23 * GIB - gpu.context
    assert memory_budget("24GiB", gpu, "0").limit == 24 * GIB - gpu.context
    for share in (-0.1, 1.0, float("nan")):
        with pytest.raises(UserError, match="a share of the budget, from 0 up to, but not including, 1"):
            memory_budget("24GiB", gpu, share)


@pytest.mark.parametrize("policy", ["none", "full", "pointwise"])
def test_scaled_trace_equals_the_trace(policy: str) -> None:
    """Growth with the batch size, measured under `none` alone, extrapolates the trace of every policy."""
    small = MODELS["llama"]()
    workload = small.workload(find_gpu("t4"))
    with Tracer(workload) as tracer:
        growth = Growth(LOW, HIGH)
        low, high = (tracer.trace("none", at) for at in (LOW, HIGH))
        growth.learn(low, high)  # type: ignore[arg-type]
        anchor, exact = (tracer.trace(policy, at) for at in (LOW, 24))
        assert not isinstance(anchor, str)
        assert not isinstance(exact, str)
        scaled = growth.scale(anchor, 24)
    assert scaled.peak_allocated == pytest.approx(exact.peak_allocated, rel=1e-3)
    assert scaled.seconds == pytest.approx(exact.seconds, rel=1e-3)


def test_shared_trace_session_equals_single_traces() -> None:
    small = MODELS["llama"]()
    workload = small.workload("cpu")
    for policy, trace in zip(
        ("none", "full", "pointwise"),
        trace_policies(workload, ["none", "full", "pointwise"], workload.step(4)),
        strict=True,
    ):
        (alone,) = trace_policies(workload, [policy], workload.step(4))
        assert not isinstance(trace, str)
        assert not isinstance(alone, str)
        assert trace.peak_allocated == alone.peak_allocated
        assert len(trace.ops) == len(alone.ops)


@pytest.mark.slow
def test_fixed_batch_on_a_gpu_is_traced_exactly() -> None:
    small = MODELS["llama"]()
    gpu = find_gpu("t4")
    found = plan(
        small.model, small.step_for_batch, "1GiB", gpu, make_optimizer=small.make_optimizer, batch_size=6,
        policies=["none", "full", "pointwise"],
    )  # fmt: skip
    workload = small.workload(gpu)
    for row in found.candidates:
        assert Candidate.of(row.policy, 6, trace_policies(workload, [row.policy], workload.step(6))[0]) == row  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arch", "rate"),
    [
        ((6, 1), 15.75e9),
        pytest.param((7, 5), 15.75e9, marks=pytest.mark.slow),
        ((8, 9), 31.5e9),
        pytest.param((11, 0), 63e9, marks=pytest.mark.slow),
    ],
)
def test_plan_for_any_compute_capability(arch: tuple[int, int], rate: float) -> None:
    """The time of `offload` uses the PCIe generation of the compute capability; none of these GPUs is in the table."""
    gpu = replace(find_gpu("t4"), name="another", arch=arch)
    assert gpu.host_bandwidth == 0.8 * rate
    small = MODELS["llama"]()
    found = plan(
        small.model, small.step_for_batch, "1GiB", gpu, make_optimizer=small.make_optimizer, batch_size=64,
        policies=["none", "offload"],
    )  # fmt: skip
    assert {row.policy for row in found.candidates} == {"none", "offload"}
    assert found.device == "another"


def test_forked_processes_give_the_same_traces() -> None:
    small = MODELS["vit"]()
    workload = small.workload("cpu")
    with Tracer(workload) as one, Tracer(workload, jobs=2) as two:
        wanted = [("none", 3), ("full", 3), ("modules:mlp", 3)]
        peaks = [[t.peak_allocated for t in tracer.all(wanted) if not isinstance(t, str)] for tracer in (one, two)]
    assert peaks[0] == peaks[1]
    model = weakref.ref(small.model)
    del one, two, workload, small
    gc.collect()
    assert model() is None  # no global keeps the model alive


@pytest.mark.parametrize("bend", [5, 40, 1000])
@pytest.mark.parametrize("limit", [99, 100, 1234, 5000])
def test_largest_fitting_of_a_piecewise_linear_function(bend: int, limit: int) -> None:
    asked: list[int] = []

    def needs(n: int) -> int:
        asked.append(n)
        return 100 + 10 * (n - 1) + 25 * max(0, n - bend)

    answer = max((n for n in range(1, 301) if needs(n) <= limit), default=0)
    asked.clear()
    assert largest_fitting(needs, limit, 300) == answer
    assert len(asked) == len(set(asked)) <= 12


def test_largest_fitting_ignores_known_values_above_the_maximum() -> None:
    assert largest_fitting(lambda n: n, 100, 3, {5: 5, 7: 107}) == 3
    assert largest_fitting(lambda n: 40 * n, 100, 3, {5: 200}) == 2


def test_frontier_has_the_pareto_optimal_candidates() -> None:
    figures = [("a", 10, 1.0), ("b", 8, 1.0), ("c", 9, 2.0), ("d", 5, 2.0)]
    rows = [Candidate(policy, 1, 0, reserved, seconds) for policy, reserved, seconds in figures]
    assert [row.policy for row in frontier(rows)] == ["b", "d"]


def test_seconds_of_a_plan_equal_the_traces() -> None:
    """Also under `offload`, where copies to the host limit the step."""
    small = MODELS["llama"]()
    found = plan(
        small.model, small.step_for_batch, "2GiB", "t4", make_optimizer=small.make_optimizer, batch_size=512,
        policies=["full", "full,offload"],
    )  # fmt: skip
    workload = small.workload("t4")
    for row in found.candidates:
        trace = trace_policies(workload, [row.policy], workload.step(row.batch))[0]
        assert not isinstance(trace, str)
        assert (row.seconds, row.bound) == (trace.seconds, trace.seconds_parts.bound)
        assert trace.seconds == pytest.approx(sum(trace.seconds_parts.parts.values()), rel=1e-3)
        assert (trace.seconds_parts.copying > 0) == ("offload" in row.policy)
        assert trace.seconds >= trace.seconds_parts.copying


@pytest.mark.slow
def test_plan_of_compiled_blocks_has_no_pointwise() -> None:
    """Compiled, `pointwise` would save other tensors in its second run; Inductor recomputes these operators."""
    compiled = replace(MODELS["llama"]().workload("a100-40gb"), compile="regional")
    found = plan(compiled, "1GiB", batch_size=2, policies=["none", "full", "pointwise", "pointwise,head"])
    assert len(found.candidates) > 1
    assert not any("pointwise" in candidate.policy for candidate in found.candidates)
    assert any(note.startswith("compiled:") for note in found.notes)


def test_plan_swaps_as_few_blocks_as_needed(tmp_path: Path) -> None:
    """Candidates swap all blocks, the fewest that one sample needs, and half of the rest, within host memory."""
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "intermediate_size": 1024,
        "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 512,
        "max_position_embeddings": 512,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    workload = load(TrainingSpec.of(str(tmp_path), seq_length=64, lora_r=4, dtype="bfloat16"), "t4")
    block = 2 * (3 * 512 * 1024 + 2 * 512 * 512 + 2 * 512 * 256)
    with Tracer(workload) as tracer:
        room = MemoryBudget(2**40)
        estimates = Estimates(tracer, room, "memory", 1, 1)
        estimates.trace_candidates(["full", "full,swap:6"])
        more = estimates.reserved("full,swap:6", 1) + block  # memory for one of the six blocks
        for host, fitting in ((None, True), (4 * block, False)):
            tight = replace(estimates, room=MemoryBudget(more, host=host), anchors={}, bests={})
            tight.trace_candidates(["full"])
            assert tight.candidates() == []
            _swap(tight)
            assert set(tight.anchors) == {"full", "full,swap:5", "full,swap:6"}
            found = {candidate.policy: candidate.host for candidate in tight.candidates()}
            pinned = 5 * block + 2**19  # pinned buffers have 16, 4, 2 and 1 MiB
            assert found == ({"full,swap:5": pinned, "full,swap:6": 6 * block} if fitting else {})
        works = f"is .* and {format_bytes(6 * block)} of host memory, under 'full,swap:6'"
        refusal = no_policy_fits(tight, workload.model)
        assert re.search(f" and {format_bytes(4 * block)} of host memory: .* {works}", refusal)
    made = Plan(tight.candidates() or [estimates.estimate("full,swap:6", 1)], room, "llama", "t4", "memory", "")
    assert made.candidates_table.header[-2:] == ("host memory", "")
    assert made.candidates_table.rows[0][-2] == format_bytes(6 * block)
