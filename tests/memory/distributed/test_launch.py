"""Launches: reading of configuration files, refusals, and the effect of sharding on bytes and seconds."""

from __future__ import annotations

import json
import operator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from versions import is_older

from ckpt_ft.errors import UserError
from ckpt_ft.memory.cost.collectives import bus_bandwidth, collective_seconds
from ckpt_ft.memory.distributed.group import rank_of
from ckpt_ft.memory.distributed.wrap import share
from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.memory.gpus import find_gpu
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.spec.flags import fields_of
from ckpt_ft.spec.launch import Launch, read_launch
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.transformers_models import own_loss
from ckpt_ft.workloads.workload import Batch, Workload

CONFIGS = Path(__file__).parents[3] / "accelerate_configs"
MIB = 2**20


def test_our_accelerate_configs_are_read() -> None:
    assert read_launch(CONFIGS / "fsdp2.yaml")[0] == Launch("fsdp2", 8, mixed_precision="bf16")
    assert read_launch(CONFIGS / "fsdp2.yaml", processes=2)[0].processes == 2
    assert read_launch(CONFIGS / "multi_gpu.yaml")[0].strategy == "ddp"
    assert read_launch({"distributed_type": False, "num_processes": 1})[0] == Launch("ddp", 1)  # a bare NO


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_version: 1}",
            "fsdp_version 1: answered as FSDP2, whose shards",
        ),
        ("mixed_precision: fp4", "mixed precision 'fp4' is not modelled"),
        ("distributed_type: MEGATRON_LM", "distributed_type MEGATRON_LM is not modelled"),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: SIZE_BASED_WRAP}",
            "SIZE_BASED_WRAP: it is not predicted; set TRANSFORMER_BASED_WRAP",
        ),
        (
            "distributed_type: MULTI_GPU\nparallelism_config: {tp_size: 2}",
            "launch ddp, tp 2: 1 processes are not a multiple of 2",
        ),
        ("distributed_type: MULTI_GPU\nnum_gpus: 2", "num_gpus: 2: no such setting is known"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 0}", "ZeRO stage 0: answered as DDP"),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: none.json}",
            "deepspeed_config_file none.json: cannot be read",
        ),
        ("num_processes: many", "num_processes many: give a whole number of at least 1"),
        ("num_processes: 3\nnum_machines: 2", "3 processes on 2 machines"),
        ("distributed_type: FSDP\nfsdp_config: 7", "fsdp_config: 7: give 'key: value' lines"),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: [zero]",
            "deepspeed_config: .'zero'.: give 'key: value' lines",
        ),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: HALF}",
            "fsdp_reshard_after_forward half: accelerate takes true or false for FSDP2",
        ),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_ignored_modules: lm_head}",
            "fsdp_config.fsdp_ignored_modules: lm_head: every module is predicted to be sharded",
        ),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_mixed_precision_policy: bf16}",
            "fsdp_mixed_precision_policy: bf16: parameters and gradients are predicted in the launch's",
        ),
        ("distributed_type: MULTI_GPU\nuse_cpu: true", "use_cpu: True: the launch is answered as one of GPUs"),
        (
            "distributed_type: MULTI_GPU\ndynamo_config: {dynamo_backend: INDUCTOR}",
            "dynamo_config.dynamo_backend: INDUCTOR: a compiled step is predicted for one process",
        ),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3, zero_quantized_weights: true}",
            r"deepspeed_config.zero_quantized_weights: True: ZeRO\+\+ is not predicted",
        ),
        ("- a", "expected an accelerate configuration"),
        ("a: [", "is not valid YAML"),
    ],
)
def test_unsupported_launch_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "launch.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_launch(path)[0]


def test_launch_file_sets_accumulation_and_clipping(tmp_path: Path) -> None:
    path = tmp_path / "launch.yaml"
    path.write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 2\n"
        "deepspeed_config: {zero_stage: 2, gradient_accumulation_steps: 4, gradient_clipping: 0.5}"
    )
    found = fields_of({"launch": str(path)})
    assert (found["accumulation"], found["max_grad_norm"], found["launch"].strategy) == (4, 0.5, "zero2")
    with pytest.raises(UserError, match="accumulation 4, and 2 elsewhere; give one"):
        fields_of({"launch": str(path), "accumulation": 2})


@pytest.mark.parametrize(
    "more",
    [
        {"sequence_parallel_size": 2},
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
        {"optimizer": {"type": "OneBitAdam"}},
        {"compile": {"deepcompile": True}},
        {"amp": {"enabled": True}},
        {"data_types": {"grad_accum_dtype": "fp32"}},
    ],
)
def test_unsupported_deepspeed_setting_is_named(more: dict[str, object], tmp_path: Path) -> None:
    file, config = tmp_path / "zero.json", tmp_path / "launch.yaml"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}, **more}))
    config.write_text(
        f"distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config: {{deepspeed_config_file: {file}}}"
    )
    name = next(iter(more))
    with pytest.raises(UserError, match=name):
        read_launch(config)


@pytest.mark.parametrize(
    ("options", "launch", "named"),
    [
        ("fsdp_version: 1", Launch("fsdp2", 8), ["fsdp_version 1"]),
        (
            "fsdp_sharding_strategy: SHARD_GRAD_OP",
            Launch("fsdp2", 8, reshard_after_forward=False),
            ["fsdp_version 1"],
        ),
        ("fsdp_sharding_strategy: NO_SHARD", Launch("ddp", 8), ["fsdp_version 1"]),
        ("fsdp_sharding_strategy: HYBRID_SHARD", Launch("fsdp2", 8), ["fsdp_version 1", "sharding_strategy"]),
        ("fsdp_version: 2\n  fsdp_ignored_modules: lm_head", Launch("fsdp2", 8), ["fsdp_config.fsdp_ignored_modules"]),
    ],
)
def test_fsdp_of_version_1_is_answered_as_version_2(
    options: str, launch: Launch, named: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "launch.yaml"
    path.write_text(f"distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  {options}\n")
    left_out: dict[str, str] = {}
    assert read_launch(path, left_out=left_out)[0] == launch
    assert [*left_out] == named
    with pytest.raises(UserError, match="^launch "):
        read_launch(path)


def test_checkpointing_of_fsdp_is_the_policy_full(tmp_path: Path) -> None:
    path = tmp_path / "launch.yaml"
    path.write_text(
        "distributed_type: FSDP\nnum_processes: 2\n"
        "fsdp_config: {fsdp_version: 2, fsdp_activation_checkpointing: true}\n"
    )
    assert fields_of({"launch": str(path)})["policy"] == "full"
    assert fields_of({"launch": str(path), "policy": "every:2"})["policy"] == "every:2"


def test_file_without_a_number_of_gpus_is_for_several_numbers(tmp_path: Path) -> None:
    """DeepSpeed's own file names none, and neither does a path that says the stage of a file that is elsewhere."""
    path = tmp_path / "zero.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}))
    found = fields_of({"launch": str(path), "mixed_precision": "bf16"})
    assert [(one.strategy, one.processes) for one in found["launches"]] == [("zero3", n) for n in (1, 2, 4, 8)]
    assert fields_of({"launch": str(path), "processes": 4})["launch"].processes == 4
    named = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "x/ds_z2_offload.json"}}
    found = fields_of({"launch": named, "processes": 2})
    assert (found["launch"].strategy, found["launch"].zero.offload_optimizer) == ("zero2", True)
    assert found["left_out"] == (
        "deepspeed_config_file x/ds_z2_offload.json: no such file; by its name it is ZeRO-2: --launch takes the file, "
        "where it lies",
    )
    parts = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    path.write_text(json.dumps(parts))
    shared = fields_of({"launch": str(path), "processes": 2})["launch"].sharing
    assert shared == "zero3, parameters in host memory"
    pairs = fields_of({"launch": str(path), "sp": 2})["launches"]
    assert [one.processes for one in pairs] == [2, 4, 8]


def test_unknown_strategy_and_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no strategy 'fsdp'; did you mean 'fsdp2'"):
        Launch("fsdp", 2)
    with pytest.raises(UserError, match="missing.yaml: No such file"):
        read_launch(tmp_path / "missing.yaml")[0]


def llama(launch: Launch | None, accumulation: int = 1) -> Workload:
    config = LlamaConfig(
        vocab_size=2048, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)

    def make_batch(samples: int, length: int | None) -> Batch:
        ids = torch.zeros(samples, 256, dtype=torch.long)
        return {"input_ids": ids, "labels": ids.clone()}

    return Workload(
        model, make_batch, own_loss, lambda model: torch.optim.AdamW(model.parameters(), fused=True), "h100",
        accumulation=accumulation, launch=launch,
    )  # fmt: skip


def resident(trace: StepTrace) -> int:
    """Returns the bytes of parameters and optimizer states at the peak."""
    return trace.at_peak["parameters"] + trace.at_peak["optimizer"]


def test_sharding_divides_states_and_restores_the_model() -> None:
    asked = llama(None)
    parameters = dict(asked.model.named_parameters())
    kinds = [type(module) for module in asked.model.modules()]
    alone = asked.trace(2)
    for processes in (2, 4, 8):
        trace = replace(asked, launch=Launch("fsdp2", processes)).trace(2)
        assert resident(trace) == pytest.approx(resident(alone) / processes, rel=0.02)
    assert dict(asked.model.named_parameters()).keys() == parameters.keys()
    assert all(p is parameters[name] for name, p in asked.model.named_parameters())
    assert [type(module) for module in asked.model.modules()] == kinds
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in asked.model.modules())
    assert asked.trace(2).events == alone.events


@pytest.mark.parametrize("storage", ["uint8", "bfloat16"])
def test_4bit_weights_are_sharded_if_stored_as_floats(storage: str, tmp_path: Path) -> None:
    """accelerate does not shard bitsandbytes' uint8 weights; the rest is sharded."""
    if storage == "uint8" and is_older("accelerate", "1.14"):
        pytest.skip("an older accelerate, which stops at bytes")
    LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4
    ).save_pretrained(tmp_path)
    settings = TrainingSpec.of(
        dtype="bfloat16", mixed_precision="bf16", lora_r=8, load_in_4bit=True, seq_length=32, quant_storage=storage
    )
    alone = load(settings.edit(model=str(tmp_path)), "cpu")
    whole = sum(p.nbytes for p in alone.model.parameters())
    packed = 2 * (4 * 64 * 64 + 3 * 64 * 192) // 2
    shared = replace(alone, launch=Launch("fsdp2", 8, mixed_precision="bf16")).trace(1)
    kept = packed if storage == "uint8" else 0
    assert shared.at_peak["parameters"] == pytest.approx(kept + (whole - kept) / 8, rel=0.01)


def test_machines_have_eight_gpus_by_default() -> None:
    assert [Launch("fsdp2", processes).machines for processes in (2, 8, 12, 128)] == [1, 1, 1, 16]
    assert Launch("fsdp2", 128, machines=1).machines == 1


def test_ddp_buckets_have_the_size_of_all_gradients() -> None:
    alone, shared = llama(None).trace(2), llama(Launch("ddp", 4)).trace(2)
    gradients = sum(p.nbytes for p in llama(None).model.parameters())
    assert shared.at_peak["communication"] == pytest.approx(gradients, rel=0.01)
    viewed = llama(Launch("ddp", 4, gradient_as_bucket_view=True)).trace(2)
    assert shared.peaks["optimizer"] - viewed.peaks["optimizer"] == pytest.approx(gradients, rel=0.05)
    assert resident(shared) == resident(alone)


def test_keeping_gathered_parameters_costs_memory_and_saves_communication() -> None:
    dropped, kept = (llama(Launch("fsdp2", 8, reshard_after_forward=r)).trace(2) for r in (True, False))
    assert kept.peaks["forward"] > dropped.peaks["forward"]
    assert sum(op.wire for op in kept.ops) < sum(op.wire for op in dropped.ops)


def test_only_the_last_micro_batch_reduces_gradients() -> None:
    for strategy in ("ddp", "fsdp2"):
        one, eight = (llama(Launch(strategy, 8), n).trace(2) for n in (1, 8))
        measured = [[op for op in t.ops if op.at >= t.start] for t in (one, eight)]
        reduced = [sum(op.wire for op in ops if "reduce" in op.name) for ops in measured]
        assert reduced[0] == reduced[1] > 0
        assert eight.seconds > 4 * one.seconds / 2


def test_bandwidth_of_links() -> None:
    h100, t4 = find_gpu("h100"), find_gpu("t4")
    assert bus_bandwidth(Launch("ddp", 8), h100) == 0.8 * 450e9
    assert bus_bandwidth(Launch("ddp", 16, machines=2), h100) == 0.8 * 450e9  # its network cards are fast enough
    assert bus_bandwidth(Launch("ddp", 16, machines=2), find_gpu("a100-80gb")) == 0.9 * 200e9
    assert bus_bandwidth(Launch("ddp", 2), t4) < 10e9
    slow, fast = (llama(Launch("ddp", 8, link=rate)).trace(2).seconds for rate in (1e9, 100e9))
    assert slow > fast + 0.02


def test_seconds_of_ring_collectives_grow_with_the_ranks() -> None:
    """Compared with NCCL 2.28's own model: the all-gather of a Llama-8B block in bf16, an all-reduce of four bytes."""
    h100 = find_gpu("h100")
    for machines in (1, 2, 16):
        launch = Launch("fsdp2", 8 * machines, machines)
        wire = 436_000_000 * (launch.processes - 1) // launch.processes
        steps = (launch.processes - machines) * 1.9e-6 + (machines - 1) * 4.0e-6
        ll128 = 14e-6 + steps + wire / (0.92 * 0.8 * 450e9)
        between = max(3.4e-6, 3e-6 if machines > 1 else 0)
        simple = 8.4e-6 + (launch.processes - machines) * between + (machines - 1) * 14e-6 + wire / (0.8 * 450e9)
        found = collective_seconds(wire, launch, h100, "c10d._allgather_base_.default")
        assert found == pytest.approx(min(ll128, simple))
    tree = 6.6e-6 + 2 * (7 * 0.6e-6 + 4 * 5.0e-6)
    assert collective_seconds(4, Launch("fsdp2", 128), h100, "c10d.allreduce_.default") == pytest.approx(
        tree, rel=1e-3
    )
    slot = Launch("fsdp2", 2)
    assert collective_seconds(4, slot, find_gpu("l4"), "c10d._allgather_base_.default") == pytest.approx(
        7.6e-6, rel=1e-3
    )


def test_model_that_is_already_sharded_is_traced() -> None:
    """Two traces equal that of its launch; the model and the user's process group stay as they are."""
    launch = Launch("fsdp2", 4, reshard_after_forward=False)
    asked = llama(launch)
    fresh = asked.trace(2)
    with rank_of(4) as mesh:
        group = mesh.get_group()
        with torch.device("meta"):
            share(asked.model, launch, mesh, ExitStack())
        kinds, parameters = [type(module) for module in asked.model.modules()], list(asked.model.parameters())
        for traced_again in (asked, replace(asked, launch=None)):
            assert traced_again.trace(2).events == fresh.events
        assert [type(module) for module in asked.model.modules()] == kinds
        assert all(map(operator.is_, asked.model.parameters(), parameters))
        assert dist.get_world_size() == 4
        assert torch._C._distributed_c10d._resolve_process_group(group.group_name) is not None
        with pytest.raises(UserError, match="'fsdp2, on 8 GPUs': the model is sharded already, over 4 processes"):
            replace(asked, launch=Launch("fsdp2", 8)).trace(2)
    assert not dist.is_initialized()


def test_step_that_shards_the_model_holds_no_complete_parameter() -> None:
    """The trace must not keep the last complete parameter alive. After the trace, the model is not sharded."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with rank_of(4) as mesh:

        def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
            for layer in model:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            return torch.optim.SGD(model.parameters(), lr=0.1)

        trace = trace_step(model, step, make_optimizer=make_optimizer, device="h100")
    assert {type(module) for module in model.modules()} == {nn.Sequential, nn.Linear}
    resident = sum(s.nbytes for s, _ in trace.live_at(trace.start) if s.category == "parameters")
    assert resident == 3 * 64 * 64 * 4 // 4


def test_all_reduces_overlap_backward() -> None:
    """The first bucket is reduced on its own stream while backward continues."""
    launch = Launch("ddp", 8, link=2e8)  # so slow that the network never waits for the host
    overlapped = llama(launch).trace(8)
    first = next(op for op in overlapped.ops if op.wire and op.at >= overlapped.start)
    serial = replace(overlapped, ops=[replace(op, stream="") for op in overlapped.ops])
    hidden = serial.seconds - overlapped.seconds
    assert 0.1 < hidden / collective_seconds(first.wire, launch, find_gpu("h100")) < 1
    assert hidden < overlapped.seconds_parts.compute  # at most the computation that remains


def test_trace_with_a_launch_round_trips_through_json() -> None:
    trace = llama(Launch("fsdp2", 4)).trace(1)
    loaded = StepTrace.from_json(trace.to_json())
    assert loaded == trace
    assert loaded.seconds == trace.seconds
    assert loaded.peak_reserved == trace.peak_reserved
