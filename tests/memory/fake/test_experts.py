"""Mixtures of experts: as many bytes as PyTorch records of the real step on the CPU, whichever way the experts run.

The real routers are made to choose experts in turn, which is the case that a trace assumes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from test_peft_traces import peak_of_a_second_step
from trace_models import adamw, training_step
from transformers import AutoConfig, AutoModelForCausalLM

from ckpt_ft.memory.fake.step import trace_step

EXPERTS = 8
COMMON = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_LOCAL = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2}
_OWN = {"num_experts": EXPERTS, "num_experts_per_tok": 2}
_NARROW = {**_OWN, "moe_intermediate_size": 48}
_ROUTED = {
    "n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
_LATENT = {
    **_ROUTED, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "n_group": 2, "topk_group": 1, "num_key_value_heads": 4,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": _LOCAL,
    "qwen2_moe": {**_NARROW, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {**_NARROW, "head_dim": 16},
    "qwen3_next": {
        **_NARROW, "head_dim": 16, "shared_expert_intermediate_size": 48, "num_hidden_layers": 4,
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
    "gpt_oss": {**_LOCAL, "head_dim": 16},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "glm4_moe": {**_ROUTED, "head_dim": 16},
    "glm4_moe_lite": _LATENT,
    "llama4_text": {**_LOCAL, "num_experts_per_tok": 1, "head_dim": 16, "intermediate_size_mlp": 96},
    "olmoe": _OWN,
    "granitemoe": _LOCAL,
    "phimoe": _LOCAL,
    "ernie4_5_moe": {
        "moe_num_experts": EXPERTS, "moe_k": 2, "moe_intermediate_size": 48, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "minimax": {**_LOCAL, "head_dim": 16},
    "jamba": {
        **_OWN, "expert_layer_period": 2, "expert_layer_offset": 1, "attn_layer_period": 2, "attn_layer_offset": 1,
        "mamba_d_state": 8, "mamba_dt_rank": 8,
    },
}  # fmt: skip
QUICK = {("mixtral", "grouped_mm"), ("phimoe", "eager"), ("deepseek_v3", "batched_mm"), ("granitemoe", "grouped_mm")}


def in_turn(choose: Callable[..., Any]) -> Callable[..., Any]:
    """`choose` (topk or max), with its choice among the experts replaced by one after the other."""

    def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = choose(x, *args, **kwargs)
        if not isinstance(found, tuple) or x.shape[-1] != EXPERTS:
            return found
        found[1].data.copy_((torch.arange(found[1].numel()) % EXPERTS).view(found[1].shape))
        return found

    return run


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        pytest.param(kind, way, marks=() if (kind, way) in QUICK else pytest.mark.slow)
        for kind in FAMILIES
        for way in ("eager", "batched_mm", "grouped_mm")
    ],
)
def test_peak_is_the_profilers(kind: str, way: str) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**COMMON, **FAMILIES[kind]})
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    if kind != "llama4_text":  # whose experts run as one batched product
        model.set_experts_implementation(way)
    ids = torch.zeros(2, 64, dtype=torch.long)
    step = training_step(lambda model: model(input_ids=ids, labels=ids, use_cache=False).loss)
    trace = trace_step(model, step, make_optimizer=adamw, device="cpu")
    predicted = trace.peak_allocated - trace.replay.allocated[trace.start - 1]
    with (
        patch.object(torch, "topk", in_turn(torch.topk)),
        patch.object(torch.Tensor, "topk", in_turn(torch.Tensor.topk)),
        patch.object(torch.Tensor, "max", in_turn(torch.Tensor.max)),
    ):
        real = peak_of_a_second_step(step, model)
    assert predicted == pytest.approx(real, rel=2e-3)


def test_a_grouped_product_is_timed_by_each_experts_tokens() -> None:
    """64 experts read eight times the weights of 8 and fill their tiles partly: the same flops take longer."""

    class Experts(torch.nn.Module):
        def __init__(self, experts: int) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(experts, 1536, 2048, dtype=torch.bfloat16, device="meta"))
            self.x = torch.nn.Parameter(torch.empty(4096, 2048, dtype=torch.bfloat16, device="meta"))
            self.register_buffer("ends", torch.arange(1, experts + 1, dtype=torch.int32) * (4096 // experts))

        def run(self) -> None:
            torch.nn.functional.grouped_mm(self.x, self.weight.transpose(-2, -1), offs=self.ends).sum().backward()

    found = {}
    for experts in (8, 64):
        trace = trace_step(Experts(experts), lambda model, _: model.run(), device="h100")
        products = [op for op in trace.ops if "grouped_mm" in op.name][-3:]
        assert [op.flops for op in products] == [2 * 4096 * 2048 * 1536] * 3
        assert products[0].shape[:4] == (experts, 4096 // experts, 1536, 2048)
        assert {op.shape[:4] for op in products[1:]} == {
            (experts, 1536, 2048, 4096 // experts), (experts, 4096 // experts, 2048, 1536)
        }  # fmt: skip
        found[experts] = trace.seconds
    assert found[64] > 1.5 * found[8]
