"""TRL's fused LM head: for a GPU its Triton kernels are traced, for a CPU its torch operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.memory.record.trace import StepTrace

TILE, TOKENS, VOCABULARY = 32768, 256, 40000  # the widest tile of logits has 32,768 columns
utils = pytest.importorskip("trl.trainer.utils")


def traced(device: str, ignored: int = 0, peft: bool = False, **config: Any) -> StepTrace:
    """Returns a step of a one-layer Llama in bf16 with TRL's head; the first `ignored` labels are not in the loss."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, dtype=torch.bfloat16, **sizes, **config))
    utils.add_fused_lm_head(model.bfloat16(), outputs=("log_probs", "entropy", "is_top1"))
    if peft:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    ids = torch.zeros(1, TOKENS + 1, dtype=torch.long)
    labels = ids.clone()
    labels[:, : ignored + 1] = -100

    def step(model: Any, optimizer: Any) -> None:
        model(input_ids=ids, labels=labels, fused_lm_head=True).loss.backward()
        model.zero_grad()

    return trace_step(model, step, device=device, warmup_steps=0)


def allocations_of(trace: StepTrace, nbytes: int) -> int:
    """Returns the number of allocations with exactly `nbytes`."""
    return sum(storage.nbytes == nbytes for storage in trace.storages)


@pytest.mark.parametrize("tied", [False, True])
def test_gpu_trace_has_one_half_precision_tile_of_logits(tied: bool) -> None:
    trace = traced("a100-80gb", tie_word_embeddings=tied)
    assert allocations_of(trace, TOKENS * TILE * 2) == 2  # in forward and in backward
    assert allocations_of(trace, TOKENS * TILE * 4) == 0  # the fp32 temporaries of TRL's torch operators
    assert allocations_of(trace, VOCABULARY * 32 * 4) == 1  # the head's gradient is accumulated in fp32
    assert allocations_of(traced("cpu"), TOKENS * TILE * 4) > 2


def test_gpu_trace_scores_only_labelled_tokens() -> None:
    trace = traced("a100-80gb", ignored=TOKENS // 2)
    assert allocations_of(trace, TOKENS // 2 * TILE * 2) == 2
    assert allocations_of(trace, TOKENS * TILE * 2) == 0


def test_frozen_head_has_no_gradient() -> None:
    trace = traced("a100-80gb", peft=True)
    assert allocations_of(trace, TOKENS * TILE * 2) == 2
    assert allocations_of(trace, VOCABULARY * 32 * 4) == 0
