"""The replacement for bitsandbytes' 4-bit layers: under policies and autocast, and the layers that stay unpacked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_configs import write_config

from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.checkpointing.parity import check_parity
from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.planning.plan import plan
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.standins.quantised_layers import NF4Linear, prepare_kbit, to_int8, to_nf4
from ckpt_ft.workloads.adapters import adapt
from ckpt_ft.workloads.load import load

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96,
    "max_position_embeddings": 64,
}  # fmt: skip
QLORA = TrainingSpec.of(load_in_4bit=True, lora_r=2, dtype="bfloat16", mixed_precision="bf16", seq_length=16)


@pytest.fixture
def config(tmp_path: Path) -> str:
    return write_config(tmp_path, LLAMA)


class OwnDtype(torch.nn.Linear):
    """Ignores autocast, computes in its own dtype and returns its input's dtype, as bitsandbytes' layers do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.to(self.weight.dtype)).to(x.dtype)


@pytest.mark.parametrize("policy", ["modules:mlp,pointwise", "pointwise"])
def test_pointwise_does_not_cast_the_input_of_quantised_layers(policy: str) -> None:
    """Under autocast `pointwise` casts inputs of torch's linear layers; this layer returns its input's dtype."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {key: value for key, value in LLAMA.items() if key not in ("model_type", "architectures")}
    base: Any = LlamaForCausalLM(LlamaConfig(**sizes))  # type: ignore[arg-type]
    for module in base.model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = OwnDtype
    model = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)).train()
    ids = torch.randint(96, (2, 16))

    def loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found: torch.Tensor = model(**batch).loss
        return found

    assert check_parity(model, {"input_ids": ids, "labels": ids}, policy, loss=loss).ok


@pytest.mark.parametrize("policy", ["modules:mlp,pointwise", "full"])
def test_qlora_under_mixed_precision_is_traced(config: str, policy: str) -> None:
    workload = load(QLORA.edit(prepare_kbit=True).edit(model=config), "a100-40gb")
    apply_policy(workload.model, policy)
    assert workload.trace(2).peak_allocated > workload.trace(1).peak_allocated > 0


def test_unpacked_weights_keep_their_dtype_without_kbit_preparation(config: str) -> None:
    """Bytes of embeddings, norms and head as recipes/llm.py loads them, and after PEFT's k-bit preparation."""
    loaded, prepared = (
        load(QLORA.edit(model=config), "t4"),
        load(QLORA.edit(prepare_kbit=True).edit(model=config), "t4"),
    )
    whole = 2 * 96 * 64 + 5 * 64  # embeddings and head, norms
    packed = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128) // 2
    for workload, size in ((loaded, 2), (prepared, 4)):
        frozen = [p for p in workload.model.parameters() if not p.requires_grad]
        assert sum(p.nbytes for p in frozen) == size * whole + packed
    assert "in bfloat16, as loaded" in loaded.trace(1).notes[0]
    assert "in float32, as peft" in prepared.trace(1).notes[0]
    assert loaded.trace(1).peak_allocated < prepared.trace(1).peak_allocated
    assert plan(loaded, batch_size=1, policies=["none"]).notes == loaded.trace(1).notes


def test_packed_bytes_are_stored_in_any_dtype() -> None:
    linear = torch.nn.Linear(128, 64)
    for storage in (torch.uint8, torch.bfloat16, torch.float32):
        held = NF4Linear(linear, torch.float32, storage=storage)
        assert (held.weight.dtype, held.weight.nbytes) == (storage, 128 * 64 // 2)


def test_double_quantisation_has_one_byte_per_scale() -> None:
    layer = NF4Linear(torch.nn.Linear(128, 256), torch.float32, nested=True)
    kept = {name: (tuple(b.shape), b.dtype) for name, b in layer.named_buffers()}
    scales = 128 * 256 // 64
    assert kept == {
        "absmax": ((scales,), torch.uint8),
        "nested_absmax": ((scales // 256,), torch.float32),
        "nested_levels": ((256,), torch.float32),
        "offset": ((), torch.float32),
        "levels": ((16,), torch.float32),
    }


def test_compute_dtype_equals_the_recipes() -> None:
    """recipes/llm.py uses bf16 for weights that are requested in float32."""
    for dtype, compute in (("float32", torch.bfloat16), ("float16", torch.float16), ("bfloat16", torch.bfloat16)):
        model = adapt(
            torch.nn.Sequential(torch.nn.Linear(64, 64)), TrainingSpec.of(load_in_4bit=True, lora_r=2, dtype=dtype)
        )
        layers = [m for m in model.modules() if isinstance(m, NF4Linear)]
        assert [layer.compute_dtype for layer in layers] == [compute]


def test_backward_unpacks_the_weight_in_its_original_dtype() -> None:
    """A base loaded in float32 with bf16 compute: 4 bytes per weight, and 2 of its cast, at the same time."""
    rows, n, m = 8, 128, 256
    model = torch.nn.Sequential(NF4Linear(torch.nn.Linear(n, m, bias=False), torch.bfloat16))
    x = torch.zeros(rows, n, dtype=torch.bfloat16, requires_grad=True)

    def step(model: torch.nn.Module, optimizer: object) -> None:
        model(x).sum().backward()

    trace = trace_step(model, step, device="t4")
    made = [(s.phase, s.nbytes) for s in trace.storages if s.nbytes in (2 * n * m, 4 * n * m) and s.op]
    once = [("forward", 2 * n * m), ("backward", 4 * n * m), ("backward", 2 * n * m)]
    assert made == once * 2


def test_kbit_preparation_does_not_cast_packed_weights() -> None:
    model = to_nf4(torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.LayerNorm(64)).bfloat16(), skip=())
    held = to_nf4(torch.nn.Sequential(torch.nn.Linear(128, 64)), skip=(), storage=torch.bfloat16)
    prepare_kbit(model), prepare_kbit(held)
    assert (model[1].weight.dtype, model[0].weight.dtype) == (torch.float32, torch.uint8)
    assert (held[0].weight.dtype, held[0].weight.nbytes) == (torch.bfloat16, 128 * 64 // 2)


def test_weight_of_any_size_is_packed() -> None:
    layer = NF4Linear(torch.nn.Linear(10, 7), torch.float32)
    assert (layer.weight.nbytes, layer.absmax.numel()) == (35, 2)


@pytest.mark.parametrize("pack", [to_nf4, to_int8])
def test_transformers_does_not_quantise_heads_and_float32_layers(pack: Any) -> None:
    """These are heads of any name, layers kept in float32, and GPT-2's layers, which are no `nn.Linear`."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForSequenceClassification,
        T5Config,
        T5ForConditionalGeneration,
        WhisperConfig,
        WhisperForConditionalGeneration,
    )

    left = {}
    for kind, config in (
        (GPT2LMHeadModel, GPT2Config(n_layer=1)),
        (LlamaForSequenceClassification, LlamaConfig(num_hidden_layers=1)),
        (T5ForConditionalGeneration, T5Config(num_layers=1)),
        (WhisperForConditionalGeneration, WhisperConfig(encoder_layers=1, decoder_layers=1)),
    ):
        with torch.device("meta"):
            model = pack(kind(config))
        own = [(n.rpartition(".")[2], type(m).__name__) for n, m in model.named_modules() if not any(m.children())]
        left[kind.__name__[:4]] = {name for name, type_ in own if type_ in ("Linear", "Conv1D")}
    assert left == {"GPT2": {"lm_head"}, "Llam": {"score"}, "T5Fo": {"lm_head", "wo"}, "Whis": {"proj_out"}}
