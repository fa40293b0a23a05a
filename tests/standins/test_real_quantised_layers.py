"""Models whose layers bitsandbytes and torchao have packed themselves: policies, checkpoints and bytes on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from recipe_scripts import history, load_recipe
from torch import nn
from trace_models import adamw, peak_of_a_second_step, training_step
from transformers import (
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    TorchAoConfig,
)

from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.checkpointing.parity import check_parity
from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.memory.record import cpu_kernels
from ckpt_ft.standins.quantised_layers import to_nf4

IDS = torch.arange(2 * 48).view(2, 48) % 96
BATCH = {"input_ids": IDS, "labels": IDS}
LORA = {"r": 4, "target_modules": "all-linear", "lora_dropout": 0.1, "init_lora_weights": False}
SAME = (
    "full", "save:attention+matmul", "every:2", "segments:2", "modules:mlp", "offload", "full,offload",
)  # fmt: skip
REORDERED = ("pointwise", "every:2,pointwise", "head")


def nf4(compute: torch.dtype = torch.float32, nested: bool = True) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute, bnb_4bit_use_double_quant=nested
    )


def torchao(kind: str) -> TorchAoConfig:
    import torchao.quantization

    return TorchAoConfig(getattr(torchao.quantization, kind)())


PACKED = {
    "nf4": nf4,
    "nf4 in bfloat16": lambda: nf4(torch.bfloat16),
    "int8": lambda: BitsAndBytesConfig(load_in_8bit=True),
    "torchao int8": lambda: torchao("Int8WeightOnlyConfig"),
    "torchao float8": lambda: torchao("Float8WeightOnlyConfig"),
}


def plain(dtype: torch.dtype = torch.float32, **sizes: int) -> LlamaForCausalLM:
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, **sizes}
    return LlamaForCausalLM(LlamaConfig(vocab_size=96, use_cache=False, **shape)).to(dtype)  # type: ignore[arg-type]


def loaded(folder: Path, quantisation: Any, model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The model that transformers loads from `model`, with packed layers."""
    model.save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder, quantization_config=quantisation, dtype=model.dtype)


@pytest.mark.parametrize("kind", PACKED)
def test_policies_keep_the_numbers_over_packed_layers(kind: str, tmp_path: Path) -> None:
    live = loaded(tmp_path, PACKED[kind](), plain())
    packed = [type(module.weight).__name__ for module in live.modules() if isinstance(module, nn.Linear)]
    assert len(set(packed) - {"Parameter"}) == 1, "one kind beside the head's"
    model = get_peft_model(live, LoraConfig(**LORA)).train()  # type: ignore[arg-type]
    swap = () if "torchao" in kind else ("full,swap:3",)  # torchao's weights are no plain tensors
    exact = kind == "nf4 in bfloat16"  # whose roundings differ by more than 1e-6 after any reordering
    for policy in SAME + swap + (() if exact else REORDERED):
        parity = check_parity(model, BATCH, policy)
        assert parity.ok, parity


@pytest.mark.parametrize("policy", ["full", "segments:2", "modules:attention"])
def test_bias_that_bitsandbytes_casts_in_its_first_forward_is_no_difference(policy: str, tmp_path: Path) -> None:
    """PEFT's preparation for k-bit training leaves biases in float32; the first forward of their layers casts them."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    Qwen2ForCausalLM(Qwen2Config(vocab_size=96, use_cache=False, **sizes)).save_pretrained(tmp_path)  # type: ignore[arg-type]

    def losses(policy: str) -> list[float]:
        live = Qwen2ForCausalLM.from_pretrained(tmp_path, quantization_config=nf4(torch.bfloat16))
        torch.manual_seed(0)
        base = prepare_model_for_kbit_training(live, use_gradient_checkpointing=False)
        model: Any = get_peft_model(base, LoraConfig(**LORA)).train()  # type: ignore[arg-type]
        bias = live.model.layers[0].self_attn.q_proj.bias
        assert bias.dtype == torch.float32
        apply_policy(model, policy, verify="first")
        optimizer, found = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1), []
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(**BATCH).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        assert bias.dtype == torch.bfloat16
        return found

    assert losses(policy) == losses("none")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("nested", [False, True])
def test_bytes_over_nf4_layers_equal_the_profilers(
    nested: bool, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model with bitsandbytes' layers, and of one with the replacements of an estimate.

    Memory inside a half-precision matmul is left out, because it differs between CPUs.
    """
    monkeypatch.setattr(cpu_kernels, "takes_scratch", lambda func, args: False)
    live = loaded(tmp_path, nf4(dtype, nested), plain(dtype, hidden_size=256, num_hidden_layers=2))
    base = LlamaForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    lora = LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.05)
    models = [get_peft_model(model, lora).train() for model in (live, to_nf4(base, dtype, nested=nested))]
    step = training_step(lambda model: model(**BATCH).loss)
    traces = [trace_step(model, step, make_optimizer=adamw, device="cpu") for model in models]
    held = [trace.replay.allocated[trace.start - 1] for trace in traces]
    assert held[0] == held[1]
    recorded = peak_of_a_second_step(step, models[0])
    for trace in traces:
        assert trace.peak_allocated - held[0] == pytest.approx(recorded, rel=1e-3)


QLORA = [
    "--use_cpu", "--max_steps", "4", "--max_length", "64", "--per_device_train_batch_size", "2", "--disable_tqdm",
    "true", "--logging_steps", "1", "--load_in_4bit", "--use_bnb_nested_quant", "--use_peft", "--lora_r", "4",
    "--lora_dropout", "0.1", "--lora_target_modules", "all-linear", "--dtype", "float32",
]  # fmt: skip


@pytest.fixture(scope="module")
def llm(sample: tuple[Path, Path]) -> ModuleType:
    return load_recipe("llm")


def test_qlora_run_keeps_its_losses_under_a_policy_and_when_resumed(llm: ModuleType, tmp_path: Path) -> None:
    def run(out: str, *flags: str) -> list[float]:
        llm.main([*QLORA, "--save_steps", "2", "--output_dir", str(tmp_path / out), *flags])
        return history(tmp_path / out)

    losses = run("plain", "--ac_report", "none")
    assert run("policy", "--ac_policy", "save:attention+matmul", "--ac_check", "--ac_report", "json") == losses
    report = json.loads((tmp_path / "policy" / "memory_report.json").read_text())["ranks"][0]
    (tmp_path / "policy" / "checkpoint-4" / "trainer_state.json").unlink()  # as after a kill during writing
    resumed = run("policy", "--ac_policy", "full", "--ac_report", "none", "--resume_from_checkpoint", "latest")
    assert resumed == losses
    predicted = report["predicted"]["allocated"]
    assert predicted == pytest.approx(max(peak["allocated"] for peak in report["peaks"].values()), rel=2e-3)
