"""Flash and flex attention are traced with torch's own flash kernel, because theirs accept no fake tensors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from ckpt_ft.errors import UserError
from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.standins.flash_attention import attention


def llama(implementation: str, dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False, dtype=dtype,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype)
    model.config._attn_implementation = implementation  # as on a machine that has the kernel
    return model


def traced(model: nn.Module, device: str = "a100-40gb") -> StepTrace:
    ids = torch.zeros(2, 128, dtype=torch.long)
    return trace_step(
        model, lambda model, _: model(input_ids=ids, labels=ids).loss.backward(), device=device, warmup_steps=0
    )


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flash_attention_3", "flex_attention"])
def test_live_model_is_traced_with_the_flash_kernel(implementation: str) -> None:
    was = dict(AttentionInterface._global_mapping)
    trace, sdpa = traced(llama(implementation)), traced(llama("sdpa"))
    name = "flash_attn_3.attention" if implementation.endswith("3") else "aten._scaled_dot_product_flash_attention"
    flash = [op.dtype for op in trace.ops if op.name == f"{name}.default"]
    assert flash == ["bfloat16"] * 2
    # Without a mask, sdpa takes grouped heads directly too.
    assert trace.peak_allocated == sdpa.peak_allocated
    assert AttentionInterface._global_mapping == was


def test_fp32_queries_are_cast_for_the_flash_kernel() -> None:
    """After PEFT's k-bit preparation, queries are fp32, and transformers casts them to the model's dtype."""
    model = llama("flash_attention_2")
    model.model.embed_tokens.float()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _, given: (given[0].bfloat16(),))
            module.register_forward_hook(lambda _, given, out: out.float())
    assert {op.dtype for op in traced(model).ops if "flash_attention" in op.name} == {"bfloat16"}


@pytest.mark.parametrize(("device", "dtype"), [("t4", torch.float16), ("a100-40gb", torch.float32)])
def test_gpu_or_dtype_without_flash_attention_is_refused(device: str, dtype: torch.dtype) -> None:
    with pytest.raises(
        UserError, match=r"heads of 16 in float(16|32) on compute capability (7.5|8.0): flash attention"
    ):
        traced(llama("flash_attention_2", dtype), device)


def test_flash_attention_with_values_narrower_than_queries() -> None:
    """Multi-head latent attention: the kernel takes one width; the output has the width of the values."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, 8, width) for width in (16, 16, 12))
    out, _ = attention(SimpleNamespace(is_causal=True, config=None), query, key, value, None)  # type: ignore[arg-type]
    right = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
    assert out.shape == (2, 8, 3, 12)
    torch.testing.assert_close(out, right)
