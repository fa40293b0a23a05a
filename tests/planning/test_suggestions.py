"""Suggestions for a step that does not fit: each is a valid edit of the spec with the memory of the edited step."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from model_configs import write_config

from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.planning.budget import MemoryBudget
from ckpt_ft.planning.estimate import estimate, suggest, traced_estimate
from ckpt_ft.planning.methods import offloaded
from ckpt_ft.planning.results import Suggestion, Suggestions
from ckpt_ft.planning.search import blocks_to_swap
from ckpt_ft.planning.tracing import trace_policies
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.workloads.load import load

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 2048,
    "max_position_embeddings": 2048,
}  # fmt: skip
# PEFT refuses this adapter over 4-bit weights
REFUSED = {"peft_type": "LOHA", "task_type": "CAUSAL_LM", "target_modules": ["q_proj"]}


@pytest.fixture
def config(tmp_path: Path) -> str:
    return write_config(tmp_path, LLAMA)


def traced(spec: TrainingSpec, policy: str) -> StepTrace:
    workload = load(spec, "t4")
    (trace,) = trace_policies(workload, [policy], workload.step(1))
    assert isinstance(trace, StepTrace)
    return trace


def suggested(spec: TrainingSpec, policy: str, limit: int) -> Suggestions:
    return suggest(partial(load, device="t4"), spec, policy, 1, traced(spec, policy), MemoryBudget(limit))


def only_suggestion(found: Suggestions) -> Suggestion:
    (way,) = found.ways
    return way


def test_lora_on_half_precision_weights_comes_before_four_bits(config: str) -> None:
    """LoRA does not fit on fp32 weights and fits on bf16 weights."""
    spec = TrainingSpec.of(config, seq_length=128)
    edits: dict[str, Any] = {"lora_r": 16, "dtype": "bfloat16"}
    limit = traced(spec.edit(**edits), "full,head").peak_reserved
    assert traced(spec.edit(lora_r=16), "full,head").peak_reserved > limit
    way, smaller = suggested(spec, "full,head", limit).ways
    assert (way.edits, way.change, way.reserved) == (edits, "--lora 16 --dtype bfloat16", limit)
    assert smaller.edits == {**edits, "load_in_4bit": True}
    assert smaller.reserved < way.reserved
    assert way.command == (
        f"ckpt-ft recipe llm --model_name_or_path {config} --ac_policy full,head --use_peft "
        "--max_length 128 --per_device_train_batch_size 1 --dtype bfloat16 --optim adamw_torch_fused "
        "--lora_r 16 --dataset_name DATASET"
    )


def test_suggestion_of_4bit_drops_8bit(config: str) -> None:
    """A spec cannot load weights in 4 and in 8 bits, so the edit turns 8 bits off."""
    spec = TrainingSpec.of(config, seq_length=128, lora_r=16, load_in_8bit=True)
    edits = {"load_in_8bit": False, "load_in_4bit": True, "dtype": "bfloat16"}
    limit = traced(spec.edit(**edits), "full,head").peak_reserved
    way = only_suggestion(suggested(spec, "full,head", limit))
    assert (way.edits, way.reserved) == (edits, limit)
    assert way.change == "--dtype bfloat16 --load-in-4bit without --load-in-8bit"
    assert "--lora_r 16 --load_in_4bit" in way.command
    assert "--use_peft" in way.command


def test_given_policy_is_tried_with_shorter_sequences(config: str) -> None:
    """The given policy needs least memory at full length, so a quarter of the length is tried under it."""
    Path(config).write_text(json.dumps({**LLAMA, "vocab_size": 32768}))
    spec = TrainingSpec.of(config, seq_length=1024, dtype="bfloat16", lora_r=16, load_in_4bit=True)
    quarter = spec.edit(seq_length=256)
    limit = traced(quarter, "full,head").peak_reserved
    # of the other policies, this one needs least at 1024 tokens
    assert traced(quarter, "pointwise,head").peak_reserved > limit
    way = only_suggestion(suggested(spec, "full,head", limit))
    assert (way.edits, way.change, way.reserved) == ({"seq_length": 256}, "--seq-length 256", limit)


def test_optimizer_offload_is_suggested_if_8bit_adamw_does_not_fit(config: str) -> None:
    """The suggestion states its time, its host memory and the recipe's flags; it is not made for LoRA or SGD."""
    spec = TrainingSpec.of(config, seq_length=128, dtype="bfloat16")
    edits = {"optimizer": "ao_adamw_offload_gradients", "max_grad_norm": 0.0}
    trace = traced(spec.edit(**edits), "full,head")
    way = next(way for way in suggested(spec, "full,head", trace.peak_reserved).ways if way.edits == edits)
    assert (way.reserved, way.host, way.slower > 0) == (trace.peak_reserved, trace.peak_host, True)
    assert way.change == "--optimizer ao_adamw_offload_gradients --max-grad-norm 0"
    assert "--max_grad_norm 0 --offload_optimizer gradients" in way.command
    assert offloaded(spec.edit(accumulation=4)).changes["optimizer"] == "ao_adamw_offload"
    assert offloaded(spec.edit(lora_r=4)) is offloaded(spec.edit(optimizer="sgd")) is None


@pytest.mark.filterwarnings("ignore")  # peft warns about its defaults
def test_4bit_is_not_suggested_for_adapters_that_peft_refuses(config: str) -> None:
    """A PEFT configuration is kept as it is, and this adapter does not support 4-bit weights."""
    spec = TrainingSpec.of(config, seq_length=128, peft=REFUSED)
    limit = traced(spec.edit(dtype="bfloat16"), "full,head").peak_reserved
    swap, way = suggested(spec, "full,head", limit).ways  # the fastest comes first
    assert (way.edits, way.reserved) == ({"dtype": "bfloat16"}, limit)
    assert swap.edits == {"policy": "full,head,swap:4"}


def test_estimate_notes_the_time_of_swap_copies(config: str) -> None:
    """Three of four blocks are copied in forward and three in backward, over the T4's PCIe 3.0 x16."""
    spec = TrainingSpec.of(
        config, seq_length=128, lora_r=4, dtype="bfloat16", load_in_4bit=False, policy="full,swap:4", device="t4"
    )
    found, _ = traced_estimate(spec, lambda line: None)
    took = 6 / 4 * found.peak_host / 12.6e9
    said = f"copies between host and card take {took:.2g} s at 12.6 GB/s (assumed); the step waits no time for them"
    assert said in found.notes  # the host issues kernels slowly
    assert found.bound == "host"


def test_swap_is_suggested_for_adapters_with_the_fewest_blocks(config: str) -> None:
    """The suggestion has batch size 1 and states its host memory; small hosts and full fine-tuning do not get it."""
    spec = TrainingSpec.of(config, seq_length=128, lora_r=4, dtype="bfloat16", load_in_4bit=False)
    all_but_one, every = (traced(spec, f"full,head,swap:{blocks}") for blocks in (3, 4))
    assert all_but_one.peak_reserved > every.peak_reserved
    block = 2 * (3 * 512 * 1024 + 2 * 512 * 512 + 2 * 512 * 256)
    assert every.peak_host == 4 * block
    assert all_but_one.peak_host == 3 * block + 2**19  # pinned buffers have 8, 4 and 2 MiB
    ways = suggested(spec, "full,head", all_but_one.peak_reserved).ways
    assert [way.slower for way in ways] == sorted(way.slower for way in ways)
    (way,) = (way for way in ways if way.edits == {"policy": "full,head,swap:3"})
    assert (way.reserved, way.host) == (all_but_one.peak_reserved, all_but_one.peak_host)
    assert "--ac_policy full,head,swap:3" in way.command
    small = MemoryBudget(every.peak_reserved, host=every.peak_host - 1)
    found = suggest(partial(load, device="t4"), spec, "full,head", 1, traced(spec, "full,head"), small)
    assert not any("swap" in way.change for way in found.ways)
    assert blocks_to_swap(load(spec.edit(lora_r=0), "t4")) == (0, 1)


def test_seconds_of_a_smaller_batch_are_compared_per_sample_of_the_whole_step(config: str) -> None:
    """Both steps have accumulation: the seconds of each are divided by all its samples, those of all micro-batches."""
    spec = TrainingSpec.of(config, seq_length=512, batch_size=6, accumulation=2, policy="full", device="t4")
    asked = estimate(spec)
    halves = estimate(spec.edit(batch_size=3, accumulation=4))
    (way,) = estimate(spec.edit(budget=halves.peak_reserved + halves.context + 2**20)).answer.ways
    assert (way.edits["batch_size"], way.edits["accumulation"]) == (3, 4)
    smaller = estimate(spec.edit(**way.edits))
    assert way.slower == pytest.approx(smaller.seconds / asked.seconds - 1, abs=0.01)
