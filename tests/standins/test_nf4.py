"""The stand-in for bitsandbytes' 4-bit layers: under policies and autocast, and what is left around it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.checkpointing.parity import check_parity
from ckpt_ft.planning.plan import plan
from ckpt_ft.standins.nf4 import NF4Linear, to_nf4
from ckpt_ft.workloads.adapters import adapt
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.settings import Settings

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96,
    "max_position_embeddings": 64,
}  # fmt: skip
QLORA = Settings(load_in_4bit=True, lora_r=2, dtype="bfloat16", mixed_precision="bf16", seq_length=16)


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    return str(file)


@pytest.mark.parametrize("policy", ["modules:mlp,pointwise", "pointwise"])
def test_a_layer_that_goes_by_its_inputs_dtype_gets_the_input_as_it_is(policy: str) -> None:
    """Under autocast `pointwise` casts for torch's own linear layers: a 4-bit one answers in its input's dtype."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {key: value for key, value in LLAMA.items() if key not in ("model_type", "architectures")}
    base: Any = to_nf4(LlamaForCausalLM(LlamaConfig(**sizes)))  # type: ignore[arg-type]
    model = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)).train()
    ids = torch.randint(96, (2, 16))

    def loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found: torch.Tensor = model(**batch).loss
        return found

    assert check_parity(model, {"input_ids": ids, "labels": ids}, policy, loss=loss).ok


@pytest.mark.parametrize("policy", ["modules:mlp,pointwise", "full"])
def test_qlora_under_mixed_precision_has_a_trace(config: str, policy: str) -> None:
    workload = load(config, replace(QLORA, prepare_kbit=True), "a100-40gb")
    apply_policy(workload.model, policy)
    assert workload.trace(2).peak_allocated > workload.trace(1).peak_allocated > 0


def test_what_is_not_packed_stays_as_loaded_unless_it_is_prepared(config: str) -> None:
    """Embeddings, norms and head, in bytes: what recipes/llm.py holds, and what peft's preparation makes of it."""
    loaded, prepared = load(config, QLORA), load(config, replace(QLORA, prepare_kbit=True))
    whole = 2 * 96 * 64 + 5 * 64  # embeddings and head, norms
    packed = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128) // 2
    for workload, size in ((loaded, 2), (prepared, 4)):
        frozen = [p for p in workload.model.parameters() if not p.requires_grad]
        assert sum(p.nbytes for p in frozen) == size * whole + packed
    assert "in bfloat16, as loaded" in loaded.trace(1).notes[0]
    assert "in float32, as peft" in prepared.trace(1).notes[0]
    assert loaded.trace(1).peak_allocated < prepared.trace(1).peak_allocated
    assert plan(loaded, batch_size=1, policies=["none"]).notes == loaded.trace(1).notes


def test_what_the_bytes_are_held_as_changes_no_bit() -> None:
    linear = torch.nn.Linear(128, 64)
    x = torch.randn(3, 128)
    plain = NF4Linear(linear, torch.float32)
    for storage in (torch.bfloat16, torch.float32):
        held = NF4Linear(linear, torch.float32, storage=storage)
        assert (held.weight.dtype, held.weight.nbytes) == (storage, plain.weight.nbytes)
        assert held(x).equal(plain(x))


def test_double_quantisation_loses_little() -> None:
    """Scales in 8 bits: the weight moves by less than a hundredth of what 4 bits cost."""
    linear = torch.nn.Linear(128, 256)
    plain, nested = (NF4Linear(linear, torch.float32, nested).dequantize() for nested in (False, True))
    lost = (plain - linear.weight).norm()
    assert 0 < (nested - plain).norm() < 0.05 * lost  # type: ignore[operator]


def test_the_compute_type_is_the_recipes() -> None:
    """bf16 for weights that are asked for in float32, as recipes/llm.py asks bitsandbytes."""
    for dtype, compute in (("float32", torch.bfloat16), ("float16", torch.float16), ("bfloat16", torch.bfloat16)):
        model = adapt(torch.nn.Sequential(torch.nn.Linear(64, 64)), Settings(load_in_4bit=True, lora_r=2, dtype=dtype))
        layers = [m for m in model.modules() if isinstance(m, NF4Linear)]
        assert [layer.compute_dtype for layer in layers] == [compute]
