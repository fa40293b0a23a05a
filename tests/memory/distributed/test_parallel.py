"""Context, tensor, sequence and expert parallelism: files, refusals, bytes sent; two_ranks.py compares real ranks."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from two_ranks import workload
from versions import is_older

from ckpt_ft.errors import UserError
from ckpt_ft.memory.cost.collectives import bus_bandwidth
from ckpt_ft.memory.gpus import find_gpu
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.planning.max_length import predict_max_length
from ckpt_ft.planning.plan import plan
from ckpt_ft.spec.command import training_command
from ckpt_ft.spec.flags import fields_of
from ckpt_ft.spec.launch import Launch, ZeroOptions, read_launch
from ckpt_ft.spec.training_file import read_training_file
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.workloads.workload import Workload

CONFIGS = Path(__file__).parents[3] / "accelerate_configs"
OLD = is_older("transformers", "5.23")  # which divides no model that is loaded already
BY_TRANSFORMERS = pytest.mark.skipif(OLD, reason="needs transformers 5.23")
LAYERS, HIDDEN, TOKENS, FLOAT = 3, 64, 64, 4  # the model of two_ranks.py, with 4 heads of 16 and 2 key heads


def test_parallel_configurations_are_read_and_written() -> None:
    assert read_launch(CONFIGS / "context_parallel.yaml")[0] == Launch("fsdp2", 8, mixed_precision="bf16", cp=8)
    assert read_launch(CONFIGS / "tensor_parallel.yaml")[0] == Launch("ddp", 2, mixed_precision="bf16", tp=2)
    assert read_launch(CONFIGS / "ulysses.yaml")[0] == Launch("zero3", 8, mixed_precision="bf16", sp=8)
    for launch in (Launch("fsdp2", 8, cp=4, rotation="alltoall"), Launch("fsdp2", 8, dp_replicate=2)):
        read = json.loads(json.dumps(asdict(launch)))
        assert TypeAdapter(Launch).validate_python(read) == launch


def test_expert_parallelism_by_flags_files_and_commands(tmp_path: Path) -> None:
    """accelerate starts the processes, and transformers shards the model."""
    file, started = tmp_path / "run.yaml", tmp_path / "started.yaml"
    file.write_text("model_name_or_path: m\nac_policy: full\nep_size: 4\nbf16: true\n")
    asked = Launch("fsdp2", 8, mixed_precision="bf16", ep=4)
    started.write_text("distributed_type: MULTI_GPU\nnum_processes: 8\nmixed_precision: bf16\n")
    flags = read_training_file(str(file)).flags
    for launch in ({"launch": str(started)}, {"launch": "fsdp2", "processes": 8}):
        assert fields_of({**flags, **launch})["launch"] == asked
    assert fields_of(flags)["launch"] == replace(asked, processes=4, machines=1)
    with pytest.raises(UserError, match="ep 4: accelerate would shard again what transformers has sharded"):
        fields_of({**flags, "launch": str(CONFIGS / "fsdp2.yaml")})
    spec = TrainingSpec.of("m", **fields_of({**flags, "launch": "fsdp2", "processes": 8}))
    command = training_command(spec, "llm")
    assert "launch -q --multi_gpu --num_processes 8 --num_machines 1 --mixed_precision bf16 " in command
    assert "--ep_size 4 --save_only_model" in command
    assert "fsdp" not in command
    assert "YOUR_SCRIPT.py" in training_command(spec.edit(lora_r=4), "llm")


def test_parallel_flags_become_launches() -> None:
    asked = {given: fields_of({given: 4})["launch"] for given in ("cp", "tp", "sp")}
    assert asked == {"cp": Launch("fsdp2", 4, cp=4), "tp": Launch("ddp", 4, tp=4), "sp": Launch("zero3", 4, sp=4)}
    both = fields_of({"cp": 4, "tp": 2, "launch": "fsdp2", "processes": 16})["launch"]
    assert both.mesh == {"dp_shard": 2, "cp": 4, "tp": 2}
    assert both.ranks_of_a_sample == 8
    assert fields_of({"ep": 4})["launch"] == Launch("fsdp2", 4, ep=4)
    assert fields_of({"ep": 4, "tp": 2, "launch": "fsdp2", "processes": 8})["launch"].mesh == {"dp_shard": 4, "tp": 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "fsdp2", "cp": 2, "sp": 2}, "context or sequence parallelism, not both"),
        ({"strategy": "fsdp2", "sp": 4}, "Ulysses is DeepSpeed's: give --launch zero1, zero2 or zero3"),
        ({"strategy": "ddp", "cp": 4}, "accelerate combines context parallelism with FSDP2"),
        ({"strategy": "ddp", "tp": 2}, "does not combine tensor parallelism with DDP"),
        ({"strategy": "zero3", "tp": 2}, "with DeepSpeed, only sp is predicted"),
        ({"strategy": "fsdp2", "cp": 3}, "4 processes are not a multiple of 3"),
        ({"strategy": "fsdp2", "cp": 0}, "sizes are at least 1"),
        ({"strategy": "ddp", "ep": 2}, "transformers combines expert parallelism with FSDP2"),
        ({"strategy": "fsdp2", "ep": 3}, "ep 3: give a multiple of tp that divides"),
        ({"strategy": "fsdp2", "cp": 2, "dp_replicate": 2}, "more processes than copies"),
        ({"strategy": "fsdp2", "cp": 2, "rotation": "ring"}, "rotation 'ring' is not one of allgather, alltoall"),
    ],
)
def test_combinations_that_the_libraries_refuse(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Launch(**options, processes=4)


def test_files_that_the_libraries_refuse() -> None:
    fsdp = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}, "num_processes": 8}
    with pytest.raises(UserError, match="8 processes, and the sizes of parallelism_config make 4"):
        read_launch({**fsdp, "parallelism_config": {"cp_size": 2, "dp_shard_size": 2}})
    with pytest.raises(UserError, match="accelerate 1.15 imports ReplicateParallel for it"):
        read_launch({**fsdp, "parallelism_config": {"tp_size": 2}})


def test_models_and_batches_that_the_libraries_refuse() -> None:
    asked = workload(None, "none", "llama", 1)
    for launch, attention, message in (
        (Launch("fsdp2", 2, cp=2), "eager", "Trainer takes context parallelism with sdpa attention only; set attn_"),
        (Launch("zero3", 8, sp=8), "sdpa", "4 heads and 2 key-value heads: DeepSpeed needs multiples of 8"),
        (Launch("ddp", 4, tp=4), "sdpa", "4 heads and 2 key-value heads are no multiples of 4"),
        *([(Launch("ddp", 2, tp=2), "sdpa", "expert parallelism need transformers 5.23")] if OLD else []),
        (Launch("fsdp2", 3, cp=3), "sdpa", "sequences of 64 tokens; give a multiple of 6"),
    ):
        asked.model.set_attn_implementation(attention)
        with pytest.raises(UserError, match=message):
            replace(asked, launch=launch).trace(1)
    asked.model.set_attn_implementation("sdpa")
    ids = torch.zeros(1, TOKENS, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(TOKENS)[None] % 32}
    for launch in (Launch("fsdp2", 2, cp=2), Launch("zero3", 2, sp=2)):
        with pytest.raises(UserError, match="packed rows need a mask, and masks are dropped where ranks share"):
            replace(asked, launch=launch, make_batch=lambda *_: batch).trace(1)
    asked.model.config.layer_types = ["full_attention", "sliding_attention", "full_attention"]
    with pytest.raises(UserError, match="does not support attention layers of type"):
        replace(asked, launch=Launch("fsdp2", 2, cp=2)).trace(1)


@BY_TRANSFORMERS
def test_models_that_transformers_does_not_divide() -> None:
    for kind, ranks, message in (
        ("llama", 2, "transformers has no expert-parallel plan for LlamaForCausalLM"),
        ("experts", 3, "4 experts are no multiple of 3"),
        ("lora", 2, "transformers has no expert-parallel plan for PeftModel"),
    ):
        with pytest.raises(UserError, match=message):
            workload(Launch("fsdp2", ranks, ep=ranks), "none", kind, 1).trace(1)
    adapted = workload(Launch("ddp", 2, tp=2), "none", "lora", 1)
    with pytest.raises(UserError, match="tensor parallelism of adapters is not predicted"):
        adapted.trace(1)
    plain = torch.ones(8, requires_grad=True)
    divided = replace(
        workload(Launch("ddp", 2, tp=2), "none", "llama", 1),
        compute_loss=lambda model, batch: model(**batch).loss + (model.lm_head.weight.sum() * plain).sum(),
    )
    with pytest.raises(UserError, match="does not take weights that are divided over GPUs, so it is not predicted"):
        divided.trace(1)


def sent(trace: StepTrace, phase: str, group: tuple[int, int], *names: str) -> int:
    """Returns the bytes sent in operators whose name contains one of `names`, in groups like `group`."""
    ops = [op for op in trace.ops if op.at >= trace.start and op.phase == phase and op.group == group]
    return sum(op.wire for op in ops if any(name in op.name for name in names))


@pytest.mark.parametrize(
    ("launch", "kind"),
    [
        pytest.param(Launch("ddp", 2, tp=2), "llama", marks=BY_TRANSFORMERS),
        pytest.param(Launch("fsdp2", 4, cp=2, tp=2), "llama", marks=BY_TRANSFORMERS),
        (Launch("zero1", 2, sp=2), "llama"),
        pytest.param(Launch("fsdp2", 2, ep=2), "experts", marks=BY_TRANSFORMERS),
    ],
    ids=str,
)
def test_trace_restores_the_model(launch: Launch, kind: str) -> None:
    asked = workload(launch, "none", kind, 1)

    def state_of_modules() -> list[tuple[type, bool, int]]:
        return [(type(m), "forward" in vars(m), len(m._forward_hooks)) for m in asked.model.modules()]

    before, first = state_of_modules(), asked.trace(1)
    assert state_of_modules() == before
    assert asked.trace(1).peaks == first.peaks


def test_bytes_sent_per_layer() -> None:
    """Computed by hand for one sequence of 64 tokens in fp32."""
    ring = workload(Launch("fsdp2", 4, cp=4), "none", "llama", 1).trace(1)
    keys = 2 * (TOKENS // 4) * 32 * FLOAT  # keys and values
    assert sent(ring, "forward", (4, 1), "_c10d_functional.all_gather") == LAYERS * 3 * keys
    # Gradients pass the ring in fp32, once per rank.
    assert sent(ring, "backward", (4, 1), "_c10d_functional.all_to_all") == LAYERS * 4 * keys

    heads = workload(Launch("zero3", 2, sp=2), "none", "llama", 1).trace(1)
    exchanged = (TOKENS // 2) * (HIDDEN + 32 + 32 + HIDDEN) * FLOAT // 2  # half of it is sent to the other rank
    for phase in ("forward", "backward"):
        assert sent(heads, phase, (2, 1), "alltoall") == LAYERS * exchanged


@BY_TRANSFORMERS
def test_bytes_sent_per_layer_that_transformers_divides() -> None:
    apart = workload(Launch("fsdp2", 4, ep=2), "none", "experts", 1).trace(1)
    routed = TOKENS * 2 * HIDDEN * FLOAT // 2  # two experts per token, half of them on the other rank
    for phase in ("forward", "backward"):  # to the experts and back
        assert sent(apart, phase, (2, 1), "all_to_all_single") == LAYERS * 2 * routed

    both = workload(Launch("fsdp2", 4, tp=2), "none", "llama", 1).trace(1)
    states = TOKENS * HIDDEN * FLOAT  # an all-reduce in a group of 2 sends all of it
    assert sent(both, "forward", (2, 1), "all_reduce") == (2 * LAYERS + 1) * states  # and the embedding's
    blocks = [op for op in both.ops if op.at >= both.start and "_allgather_base" in op.name]
    assert {op.group for op in blocks} == {(2, 2)}  # FSDP2 gathers over every second rank

    three = workload(Launch("fsdp2", 8, cp=2, tp=2), "none", "llama", 1).trace(1)
    gathered = {op.group for op in three.ops if op.at >= three.start and "_allgather_base" in op.name}
    assert gathered == {(4, 2)}  # it shards over both ranks of the ring and both copies of a sample's


@pytest.mark.parametrize(("strategy", "collective"), [("zero2", "allreduce"), ("zero3", "_reduce_scatter_base")])
def test_ulysses_reduces_gradients_in_float32(strategy: str, collective: str) -> None:
    """This is DeepSpeed's default, with twice the bytes of bf16."""
    wire, peak = {}, {}
    for precision in ("fp32", "bf16"):
        zero = ZeroOptions.read({"reduce_bucket_size": 10**5}, "file", precision)
        trace = workload(Launch(strategy, 2, sp=2, mixed_precision="bf16", zero=zero), "none", "llama", 1).trace(1)
        reduced = [op.wire for op in trace.ops if op.phase == "backward" and collective in op.name]
        wire[precision], peak[precision] = sum(reduced), trace.peaks["backward"]
    assert wire["fp32"] == 2 * wire["bf16"] > 0
    assert peak["fp32"] >= peak["bf16"]
    with pytest.raises(UserError, match=r"seq_parallel_communication_data_type int8: give fp32, bf16 or fp16"):
        ZeroOptions.read({}, "file", "int8")


def test_group_across_machines_has_its_share_of_the_network() -> None:
    h100, launch = find_gpu("h100"), Launch("fsdp2", 16, machines=2, tp=8)
    assert bus_bandwidth(launch, h100, (8, 1)) == 0.8 * 450e9  # within a machine
    assert bus_bandwidth(launch, h100, (2, 8)) == 0.9 * 50e9  # each of eight such groups has one network card


def of_any_length(launch: Launch | None, policy: str) -> Workload:
    def make_batch(samples: int, length: int | None) -> dict[str, Any]:
        ids = torch.zeros(samples, length or 1024, dtype=torch.long)
        return {"input_ids": ids, "labels": ids}

    return replace(workload(launch, policy, "llama", 1), make_batch=make_batch)


def test_plan_uses_context_parallelism_if_nothing_else_fits() -> None:
    ours, ring = of_any_length(Launch("fsdp2", 4), "full,head"), Launch("fsdp2", 4, cp=4)
    whole, shared = (replace(ours, launch=launch).trace(1) for launch in (ours.launch, ring))
    assert shared.peak_allocated < 0.7 * whole.peak_allocated
    found = plan(
        of_any_length(None, "none"), (shared.peak_allocated + whole.peak_allocated) // 2, batch_size=1, jobs=1,
        launches=[Launch("fsdp2", 4), ring], policies=["full,head"],
    ).candidates[0]  # fmt: skip
    assert (found.launch, found.peak) == (ring, shared.peak_allocated)
    assert found.samples_per_second == pytest.approx(1 / found.seconds / 4)


@pytest.mark.slow
def test_longest_sequence_uses_context_parallelism() -> None:
    budget = of_any_length(Launch("fsdp2", 4), "full,head").trace(1).peak_allocated
    own, ring = Launch("fsdp2", 4), Launch("fsdp2", 4, cp=4)
    alone, shared = (
        predict_max_length(of_any_length(None, "none"), ["full,head"], budget, launches=launches)
        for launches in ([own], [own, ring])
    )
    assert [one.launch for one in shared.ladder] == [ring]
    assert shared.length > 1.5 * alone.length > 0
