"""Mixtures of experts: the traced bytes equal the real CPU step's, for each way in which experts run.

Real routers are patched to choose experts in turn, which is what a trace assumes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from test_peft_traces import peak_of_a_second_step
from trace_models import adamw, training_step
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.integrations import moe
from versions import is_older

from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.errors import UserError
from ckpt_ft.memory.cost.kernels import device_seconds
from ckpt_ft.memory.cost.schedule import READ_BACK, Host, schedule, step_seconds
from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.memory.gpus import find_gpu
from ckpt_ft.spec.flags import fields_of
from ckpt_ft.spec.training_file import read_training_file
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.workloads.load import load

EXPERTS = 8
# Values for the size arguments of all families; a configuration takes those that it has.
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "head_dim": 16, "num_experts": EXPERTS, "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS, "moe_num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_k": 2, "moe_topk": 2,
    "top_k": 2, "moe_intermediate_size": 48, "expert_ffn_hidden_size": 48, "shared_expert_intermediate_size": 48,
    "shared_intermediate_size": 48, "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1,
    "first_k_dense_replace": 1, "num_dense_layers": 1, "moe_layer_start_index": 1, "q_lora_rank": 32,
    "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "n_group": 2, "topk_group": 1,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "index_topk": 16, "index_n_heads": 4, "index_head_dim": 16,
}  # fmt: skip
_LATENT = {"num_key_value_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in (
        "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_5_moe_text", "gpt_oss", "glm4_moe", "olmoe", "flex_olmo",
        "granitemoe", "granitemoe_swa", "granitemoeshared", "phimoe", "ernie4_5_moe", "minimax",
        "minimax_m2", "hunyuan_v1_moe", "dots1", "afmoe", "cohere2_moe", "exaone_moe", "solar_open", "mellum",
        "mimo_v2_flash", "laguna", "nemotron_h", "hy_v3", "aria_text",
    )},
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"), _LATENT),
    "longcat_flash": {**_LATENT, "num_layers": 2, "ffn_hidden_size": 96, "zero_expert_num": 0, "head_dim": 8},
    "qwen3_next": {"num_hidden_layers": 4},
    "llama4_text": {"num_experts_per_tok": 1, "intermediate_size_mlp": 96},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "jamba": {
        "expert_layer_period": 2, "expert_layer_offset": 1, "attn_layer_period": 2, "attn_layer_offset": 1,
        "mamba_d_state": 8, "mamba_dt_rank": 8,
    },
    "dbrx": {
        "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 512,
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": EXPERTS, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},  # as in its checkpoint
    },
    # at its own sizes, the Mamba layer of transformers 5.16 takes 17 GB
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_state": 16, "mamba_chunk_size": 32},
    "jetmoe": {"kv_channels": 16},
    "doge": {"is_moe": True, "num_experts": EXPERTS * EXPERTS},
}  # fmt: skip
ONE_WAY = (
    "llama4_text", "dbrx", "jetmoe", "doge", "longcat_flash",
)  # families with their own class of experts  # fmt: skip
QUICK = {("mixtral", "grouped_mm"), ("phimoe", "eager"), ("deepseek_v3", "batched_mm"), ("granitemoe", "grouped_mm")}


def tiny(kind: str) -> Any:
    """Returns the configuration of a tiny model of the family."""
    own = CONFIG_MAPPING[kind]
    names = {*inspect.signature(own).parameters, *getattr(own, "attribute_map", {})}
    sizes = {} if kind == "dbrx" else {name: size for name, size in SIZES.items() if name in names}
    return AutoConfig.for_model(kind, **{**sizes, "vocab_size": 320, **FAMILIES[kind]})


def has_router_loss(kind: str) -> bool:
    """Whether the family's model can compute its router loss, if it has one.

    transformers 5.16 does not record the router logits of GraniteMoE and its kin, so that their forward raises.
    """
    return not kind.startswith("granitemoe") or not is_older("transformers", "5.23")


def choosing_in_turn(choose: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `choose` (topk or max) with its choice of experts replaced by each expert in turn."""

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
        for way in (("eager",) if kind in ONE_WAY else ("eager", "batched_mm", "grouped_mm"))
    ],
)
def test_peak_of_experts_equals_the_profilers(kind: str, way: str) -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(tiny(kind), attn_implementation="eager").train()
    if kind not in ONE_WAY:
        model.set_experts_implementation(way)
    model.config.get_text_config().output_router_logits = way != "batched_mm" and has_router_loss(kind)
    ids = torch.zeros(2, 64, dtype=torch.long)
    step = training_step(lambda model: model(input_ids=ids, labels=ids, use_cache=False).loss)
    trace = trace_step(model, step, make_optimizer=adamw, device="cpu")
    predicted = trace.peak_allocated - trace.replay.allocated[trace.start - 1]
    with (
        patch.object(torch, "topk", choosing_in_turn(torch.topk)),
        patch.object(torch.Tensor, "topk", choosing_in_turn(torch.Tensor.topk)),
        patch.object(torch.Tensor, "max", choosing_in_turn(torch.Tensor.max)),
    ):
        real = peak_of_a_second_step(step, model)
    assert predicted == pytest.approx(real, rel=2e-3)


FAST = {kind for kind, _ in QUICK}
POLICIES = (
    "full", "every:2", "first:1", "modules:mlp", "segments:2", "save:attention+matmul", "save:router", "pointwise",
    "full,offload",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in FAST else pytest.mark.slow) for kind in FAMILIES]
)
def test_policies_keep_the_bits_when_experts_tie(kind: str) -> None:
    """Router rows are equal in pairs, so every choice is between equal scores and a second run could differ."""
    ids = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(1))
    for way in ("eager",) if kind in ONE_WAY else ("eager", "batched_mm", "grouped_mm"):
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(tiny(kind), attn_implementation="eager").train()
        if kind not in ONE_WAY:
            model.set_experts_implementation(way)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2 and parameter.shape[0] == EXPERTS:
                    parameter[1::2] = parameter[::2]

        model.config.get_text_config().output_router_logits = has_router_loss(kind)

        def numbers(model: Any = model) -> list[torch.Tensor]:
            model.zero_grad(set_to_none=True)
            torch.manual_seed(2)  # PhiMoE's router draws
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

        expected = numbers()
        for policy in POLICIES:
            applied = apply_policy(model, policy, verify="never")
            assert all(map(torch.equal, numbers(), expected)), (way, policy)
            applied.remove()


@pytest.mark.filterwarnings("ignore")
def test_frozen_routers_have_no_gradients() -> None:
    """They have no gradients and no states; the prediction equals the measurement, and policies keep the bits."""
    ids = torch.randint(3, 300, (2, 64), generator=torch.Generator().manual_seed(1))
    step = training_step(lambda model: model(input_ids=ids, labels=ids, use_cache=False).loss)
    optimizer = {}
    for frozen in (False, True):
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(tiny("mixtral"), attn_implementation="eager").train()
        model.set_experts_implementation("grouped_mm")
        routers = [p for name, p in model.named_parameters() if name.endswith("mlp.gate.weight")]
        for router in routers:
            router.requires_grad_(not frozen)
        trace = trace_step(model, step, make_optimizer=adamw, device="cpu")
        optimizer[frozen] = trace.at_peak["optimizer"]
    saved = optimizer[False] - optimizer[True]
    assert saved == pytest.approx(2 * sum(router.nbytes for router in routers), abs=8 * len(routers))
    predicted = trace.peak_allocated - trace.replay.allocated[trace.start - 1]
    assert predicted == pytest.approx(peak_of_a_second_step(step, model), rel=2e-3)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        assert all(router.grad is None for router in routers)
        return [p.grad for p in model.parameters() if p.grad is not None]

    expected = gradients()
    for policy in ("full", "segments:2", "save:router"):
        applied = apply_policy(model, policy, verify="never")
        assert all(map(torch.equal, gradients(), expected)), policy
        applied.remove()


def test_router_loss_weight_is_refused_without_such_a_loss(tmp_path: Path) -> None:
    for kind, refused in (("mixtral", False), ("glm4_moe", True), ("jetmoe", True), ("llama", True)):
        AutoConfig.for_model(kind, num_hidden_layers=1).save_pretrained(tmp_path)
        spec = TrainingSpec.of(str(tmp_path), router_aux_loss_coef=0.1)
        if refused:
            with pytest.raises(UserError, match=r"router aux loss coef 0.1: \w+ForCausalLM has no router loss"):
                load(spec, "cpu")
            continue
        model = load(spec, "cpu").model
        assert (model.config.output_router_logits, model.router_aux_loss_coef) == (True, 0.1)
        assert not load(spec.edit(router_aux_loss_coef=0.0), "cpu").model.config.output_router_logits


def test_seconds_of_a_grouped_matmul_depend_on_tokens_per_expert() -> None:
    """64 experts read eight times the weights of 8 and fill tiles partly, so that equal flops take longer."""

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
    # An A100 has no grouped kernel: the host reads the tokens of each expert and issues a product for each.
    ops, a100 = [products[0]], find_gpu("a100-80gb")
    spans = list(schedule(ops, a100))
    assert [span.op.name for span in spans] == ["aten._local_scalar_dense.default", *[products[0].name] * 64]
    assert sum(span.op.flops for span in spans) == products[0].flops
    host = Host.beside(a100)
    least = 65 * (host.per_op + host.per_launch) * host.slower + READ_BACK * host.slower
    assert least < step_seconds(ops, a100).total < least + device_seconds(products[0], a100) + 64 * 5e-6
    assert step_seconds(ops, find_gpu("h100")).total < least / 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("frozen", [False, True])
def test_gpu_without_grouped_matmul_runs_experts_in_a_loop(frozen: bool) -> None:
    """On a T4, transformers runs a loop; the gradient of a frozen weight is computed with the gradient of the rows."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(tiny("granitemoe"), attn_implementation="eager").train()
    model.requires_grad_(not frozen).get_input_embeddings().requires_grad_(True)
    ids = torch.zeros(2, 64, dtype=torch.long)
    step = training_step(lambda model: model(input_ids=ids, labels=ids, use_cache=False).loss)
    with patch.object(moe, "_can_use_grouped_mm", lambda *tensors: False):
        trace = trace_step(model, step, make_optimizer=adamw, device="cpu")
        with patch.object(torch.Tensor, "topk", choosing_in_turn(torch.Tensor.topk)):
            real = peak_of_a_second_step(step, model)
    assert trace.peak_allocated - trace.replay.allocated[trace.start - 1] == pytest.approx(real, rel=2e-3)
    tokens, up, down = 2 * 64 * 2, (2 * 96, 64), (64, 96)
    for card in ("t4", "a100-80gb"):
        trace = trace_step(model, step, make_optimizer=adamw, device=card)
        ops = [
            op for op in trace.ops if op.at >= trace.start and op.flops and "0.block_sparse_moe.experts" in op.module
        ]
        flops = [2 * tokens * rows * columns for rows, columns in (up, down)]
        assert [op.flops for op in ops[:2]] == flops
        assert [op.shape for op in ops[:2]] == [(EXPERTS, tokens // EXPERTS, *sizes, 0) for sizes in (up, down)]
        if card == "t4":  # one op for each product, or in transformers 5.16 two for each expert
            half = len(ops) // 2 - 1
            assert half in (1, 2 * EXPERTS)
            assert [sum(op.flops for op in part) for part in (ops[2:][:half], ops[2:][half:])] == [
                2 * flops[1], 2 * flops[0]
            ]  # fmt: skip
        else:
            assert {op.flops for op in ops[2:]} == set(flops)
            assert len(ops[2:]) == (2 if frozen else 4)


def test_experts_implementation_is_set_by_flag_or_file(tmp_path: Path) -> None:
    """It is refused for models without experts."""
    kinds = {}
    for kind in ("mixtral", "llama"):
        kinds[kind] = str(tmp_path / kind)
        AutoConfig.for_model(kind, **{n: SIZES[n] for n in ("hidden_size", "vocab_size")}).save_pretrained(kinds[kind])
    file = tmp_path / "run.yaml"
    file.write_text("model_name_or_path: m\nmax_length: 64\nmodel_init_kwargs: {experts_implementation: eager}\n")
    for given in (read_training_file(str(file)).flags, {"experts_implementation": "batched_mm"}):
        spec = TrainingSpec.of(kinds["mixtral"], **fields_of(given))
        assert load(spec, "cpu").model.config._experts_implementation == spec.kernels.experts_implementation
    with pytest.raises(UserError, match="experts implementation: LlamaForCausalLM has no experts"):
        load(TrainingSpec.of(kinds["llama"], experts_implementation="eager"), "cpu")


def test_experts_kernel_from_the_hub_is_refused() -> None:
    model: Any = AutoModelForCausalLM.from_config(tiny("mixtral"))
    model.config._experts_implementation = "sonicmoe"
    with pytest.raises(UserError, match="experts_implementation sonicmoe: a kernel of the Hub is not predicted"):
        trace_step(model, lambda model, _: model(input_ids=torch.zeros(1, 8, dtype=torch.long)), device="cpu")
