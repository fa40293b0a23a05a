"""Replacements for fused kernels: bytes of published measurements, gradients of plain layers, and the flags."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, Trainer, TrainingArguments
from versions import is_older

from benchmarks import operators
from ckpt_ft.errors import UserError
from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.spec.flags import fields_of
from ckpt_ft.spec.training_file import read_training_file
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.standins import liger
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.workload import Workload

SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 300, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# Rows of other versions, which are not reproduced (docs/fused_kernels.md describes the differences).
OTHERWISE = {("rms_norm", "liger", "0.2.1"), ("layer_norm", "liger", "0.6.0")}
ROWS = [row for row in operators.rows() if (row.operator, row.provider, row.version) not in OTHERWISE]


def _cases() -> list[Any]:
    quick: dict[Any, Any] = {(row.operator, row.provider, row.mode): row for row in reversed(ROWS)}
    return [pytest.param(row, marks=() if row in quick.values() else pytest.mark.slow) for row in ROWS]


@pytest.mark.parametrize("row", _cases(), ids=lambda row: "-".join(map(str, row[:4])))
def test_peak_of_an_operator_equals_the_published_one(row: operators.Row) -> None:
    assert operators.predicted(row) == pytest.approx(row.mib, rel=2e-3)


def _model(kind: str, **more: Any) -> Any:
    config = AutoConfig.for_model(kind, **{**SMALL, **more})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 0.5, 0.3)
    model.config.use_cache = False
    return model


def _gradients(model: Any) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Returns the shapes and dtypes of the gradients after a step on fake tensors."""
    found = {}

    def step(model: Any, optimizer: None) -> None:
        ids = torch.arange(48).view(2, 24) * 5
        model(input_ids=ids, labels=ids).loss.backward()
        found.update(
            {name: (p.grad.shape, p.grad.dtype) for name, p in model.named_parameters() if p.grad is not None}
        )

    trace_step(model, step, device="a100-80gb", warmup_steps=0)
    return found


_ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LATENT = {
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1,
}  # fmt: skip
_LINEAR = {
    "num_hidden_layers": 4, "shared_expert_intermediate_size": 24, "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_KINDS: dict[str, dict[str, Any]] = {kind: {} for kind in liger.FAMILIES} | {
    "granite": {"logits_scaling": 2.0},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "output_router_logits": True, **_ROUTED},
    "qwen3_next": {"num_experts": 4, **_ROUTED, **_LINEAR},
    "deepseek_v2": {**_ROUTED, **_LATENT},
    "deepseek_v3": {**_ROUTED, **_LATENT},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", _KINDS)
def test_patched_model_trains_the_same_parameters(kind: str) -> None:
    plain = _model(kind, **_KINDS[kind])
    fused = copy.deepcopy(plain)
    experts = kind in ("mixtral", "qwen3_moe", "qwen3_next", "deepseek_v2", "deepseek_v3")
    liger.apply(fused, {"swiglu": False} if experts else {})
    assert _gradients(plain) == _gradients(fused)
    assert len(_gradients(fused)) == len(list(plain.parameters()))
    replaced = sum(type(a) is not type(b) for a, b in zip(plain.modules(), fused.modules(), strict=True))
    least = 3 if experts or kind == "gpt_oss" else 4  # without the experts
    assert replaced >= 1 + 2 * least  # the model; in each block two norms, the MLP, and attention or more norms


_OPERATORS = {
    "rms_norm": "liger_rms_norm", "swiglu": "liger_gated_product", "geglu": "liger_gated_product",
    "rope": "liger_rope",
    "fused_linear_cross_entropy": "liger_cross_entropy",
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "norms", "product"), [("llama", 2, "swiglu"), ("qwen3", 4, "swiglu"), ("gemma3_text", 6, "geglu")]
)
def test_each_liger_flag_changes_its_own_kernels(kind: str, norms: int, product: str) -> None:
    """Counts the norms, MLPs and rotations of two blocks that `apply_liger_kernel_to_*` patches, and the loss."""
    plain = _model(kind)
    ids = torch.arange(48).view(2, 24) * 5

    def calls(**asked: bool) -> Counter[str]:
        model = copy.deepcopy(plain)
        liger.apply(model, asked)
        step = lambda model, _: model(input_ids=ids, labels=ids).loss.backward()  # noqa: E731
        trace = trace_step(model, step, device="a100-80gb", warmup_steps=0)
        return Counter(op.name.split(".")[1] for op in trace.ops if "liger" in op.name)

    full = calls()
    assert full["liger_rms_norm"] == full["liger_rms_norm_backward"] == 2 * norms + 1
    assert full["liger_gated_product"] == full["liger_gated_product_backward"] == 2
    # forward and backward; 48 rows in chunks of eight
    assert (full["liger_rope"], full["liger_cross_entropy"]) == (2 * 2, 6)
    for switch in ("rms_norm", product, "rope", "fused_linear_cross_entropy"):
        own = _OPERATORS[switch]
        without = {name: count for name, count in full.items() if name not in (own, f"{own}_backward")}
        without.pop("liger_scale", None) if switch == "fused_linear_cross_entropy" else None
        assert calls(**{switch: False}) == without
    other = "geglu" if product == "swiglu" else "swiglu"
    assert calls(**{other: False}) == full  # Liger ignores kernels that the family does not have
    logits = calls(cross_entropy=True, fused_linear_cross_entropy=False)
    assert logits == {**full, "liger_cross_entropy": 1, "liger_scale": 1}


def test_ligers_experts_are_refused(tmp_path: Path) -> None:
    _model("qwen3_moe", **_KINDS["qwen3_moe"]).config.save_pretrained(tmp_path)
    flags = {"liger": True, "lora_r": 4, "lora_target_parameters": "mlp.experts.down_proj", "bf16": True}
    with pytest.raises(UserError, match="Liger's experts are not modelled; give --liger-kernel-config") as refused:
        load(TrainingSpec.of(str(tmp_path), **fields_of(flags)), "h100")
    assert refused.value.without == {"liger_kernel_config": '{"swiglu": false}'}
    load(TrainingSpec.of(str(tmp_path), **fields_of({**flags, "liger_kernel_config": '{"swiglu": false}'})), "h100")


def test_model_with_cut_cross_entropy_trains_the_same_parameters() -> None:
    plain = _model("qwen3")
    fused = copy.deepcopy(plain)
    liger.apply_cut_cross_entropy(fused)
    assert _gradients(plain) == _gradients(fused)


@pytest.fixture
def config(tmp_path: Path) -> str:
    _model("llama", vocab_size=8192, hidden_size=128).config.save_pretrained(tmp_path)  # its loss has 64 chunks
    return str(tmp_path)


def _trace(config: str, **flags: Any) -> Any:
    spec = TrainingSpec.of(config, **fields_of({"bf16": True, "seq_length": 128, **flags}))
    return load(spec, "a100-80gb").trace(4)


def test_fused_losses_and_kernels_lower_the_estimate(config: str) -> None:
    """Fused losses never hold the logits of all tokens; the seconds of kernels are those of the bytes they move."""
    plain, fused, cut = _trace(config), _trace(config, liger=True), _trace(config, cut_cross_entropy=True)
    logits = 4 * 128 * 8192 * 4  # bytes, more than a workspace has
    assert any(storage.nbytes >= logits for storage in plain.storages)
    assert not any(storage.nbytes >= logits for storage in (*fused.storages, *cut.storages))
    assert plain.peak_allocated > max(fused.peak_allocated, cut.peak_allocated) + 2 * logits
    kept = _trace(
        config, liger=True, liger_kernel_config='{"fused_linear_cross_entropy": false, "cross_entropy": true}'
    )
    assert fused.peak_allocated < kept.peak_allocated < plain.peak_allocated
    assert 0 < kept.seconds < plain.seconds


@pytest.mark.parametrize("flag", ["liger", "cut_cross_entropy"])
def test_fused_loss_with_adapters_under_fsdp2_is_refused(config: str, flag: str) -> None:
    """An older accelerate gathers the output layer with the model, so that a fused loss reads it whole."""
    launch = {"launch": "fsdp2", "processes": 2}
    sharded = {flag: True, **launch}
    assert _trace(config, **sharded).peak_allocated < _trace(config, **{flag: True}).peak_allocated
    if is_older("accelerate", "1.14"):
        plain, fused = _trace(config, lora_r=4, **launch), _trace(config, lora_r=4, **sharded)
        assert plain.peak_allocated > fused.peak_allocated + 2 * 4 * 128 * 8192 * 4  # bytes of fp32 logits
        return
    with pytest.raises(UserError, match="the output layer is divided over GPUs where it reads it"):
        _trace(config, lora_r=4, **sharded)


def test_plan_of_a_live_trainer_has_its_liger_kernels(config: str, tmp_path: Path) -> None:
    rows = [{"input_ids": torch.zeros(64, dtype=torch.long), "labels": torch.zeros(64, dtype=torch.long)}] * 4
    model = LlamaForCausalLM(AutoConfig.from_pretrained(config))
    args = TrainingArguments(
        str(tmp_path / "out"), per_device_train_batch_size=4, report_to=[], use_cpu=True, use_liger_kernel=True,
        liger_kernel_config={"rope": False},
    )  # fmt: skip
    planned = Workload.from_trainer(Trainer(model, args, train_dataset=rows))
    kinds = [type(module) for module in model.modules()]
    peak = planned.trace(4).peak_allocated
    spec = TrainingSpec.of(config, use_liger_kernel=True, liger_kernel_config='{"rope": false}', seq_length=64)
    assert peak == pytest.approx(load(spec, "cpu").trace(4).peak_allocated, rel=1e-3)
    assert kinds == [type(module) for module in model.modules()]


AXOLOTL = {
    "base_model": "gpt2", "micro_batch_size": 2, "liger_rope": True, "liger_rms_norm": True,
    "liger_glu_activation": True, "cut_cross_entropy": True,
    "plugins": ["axolotl.integrations.liger.LigerPlugin",
                "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"],
}  # fmt: skip


def test_kernel_settings_of_other_trainers_are_read(tmp_path: Path) -> None:
    def fields(content: dict[str, Any]) -> Any:
        (tmp_path / "run.yaml").write_text(json.dumps(content))
        return TrainingSpec.of("gpt2", **fields_of(read_training_file(str(tmp_path / "run.yaml")).flags)).kernels

    asked = fields(AXOLOTL)
    assert asked.use_liger_kernel
    assert asked.cut_cross_entropy
    assert {name for name, on in asked.liger_kernels.items() if on} == {"rope", "rms_norm", "swiglu", "geglu"}
    assert not fields({**AXOLOTL, "plugins": []}).use_liger_kernel
    listed = {key: value for key, value in AXOLOTL.items() if key != "cut_cross_entropy"}
    assert fields(listed).cut_cross_entropy  # axolotl's plugin enables it by itself
    assert not fields({**AXOLOTL, "cut_cross_entropy": False}).cut_cross_entropy
    assert fields(
        {"model_name_or_path": "gpt2", "cutoff_len": 64, "bf16": True, "enable_liger_kernel": True}
    ).use_liger_kernel
    sft = {"model_name_or_path": "gpt2", "max_length": 64, "packing": False, "use_liger_kernel": True}
    assert fields({**sft, "liger_kernel_config": {"rope": False}}).liger_kernels == {"rope": False}
    assert not fields({**AXOLOTL, "plugins": ["mine.Plugin"]}).use_liger_kernel


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"liger": True, "liger_kernel_config": "{rope}"}, "is not JSON"),
        ({"liger": True, "liger_kernel_config": '{"ropes": true}'}, "no Liger kernel 'ropes'; did you mean 'rope'"),
        ({"liger_kernel_config": '{"rope": true}'}, "without use liger kernel; give both"),
        ({"liger": True, "cut_cross_entropy": True, "liger_kernel_config": '{"cross_entropy": true}'}, "two losses"),
    ],
)
def test_invalid_kernel_setting_is_refused(config: str, flags: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        _trace(config, **flags)


def test_model_without_liger_kernels_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("gpt2", n_layer=1, n_embd=32, n_head=2, vocab_size=64).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="kernels of 'gpt2'.* are not modelled"):
        _trace(str(tmp_path), liger=True)
