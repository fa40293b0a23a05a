"""Adapters of every kind, quantised weights, frozen parts and row layouts, as the options request them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_configs import write_config
from peft_kinds import TARGETS, configuration
from torch import nn
from versions import is_older

from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.errors import UserError
from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.workloads.adapters import adapt
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.model_config import read_config

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96,
    "max_position_embeddings": 64,
}  # fmt: skip
LINEAR = 2 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 256 * 512)  # weights of the linear layers in the blocks
REST = 2 * 96 * 256 + 5 * 256  # embeddings, head and norms
PLAIN = TrainingSpec.of(seq_length=32, dtype="bfloat16")
LAYERS = [(256, 256), (128, 256), (128, 256), (256, 256), (512, 256), (512, 256), (256, 512)]  # shapes in one block
BY_VALUES = ("ADAMSS", "FROD", "SHIRA", "UNILORA")  # cluster, mask or index by values
WITHOUT_SIZES = ("XLORA", *BY_VALUES)  # the first combines existing adapters
# kinds that read values, and kinds that do not
TRACED = ("BOFT", "VERA", "PREFIX_TUNING")


@pytest.fixture
def config(tmp_path: Path) -> str:
    return write_config(tmp_path, LLAMA)


def kinds() -> list[str]:
    from peft import PeftType

    return sorted({kind.value for kind in PeftType} - set(WITHOUT_SIZES))


def sizes(model: nn.Module) -> tuple[int, int, int]:
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return trained, sum(p.nbytes for p in model.parameters()), sum(b.nbytes for b in model.buffers())


@pytest.mark.filterwarnings("ignore")  # peft warns about its defaults
@pytest.mark.parametrize("kind", kinds())
def test_adapters_on_meta_equal_those_on_a_real_model(kind: str) -> None:
    """Every kind of PEFT trains as many parameters and holds as many bytes, also if values decide its shapes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes_of = {key: value for key, value in LLAMA.items() if key not in ("model_type", "architectures")}
    shape = LlamaConfig(**sizes_of, use_cache=False)  # type: ignore[arg-type]
    found = []
    for device in ("meta", "cpu"):
        with torch.device(device):
            base = LlamaForCausalLM(shape)
        found.append(sizes(adapt(base, TrainingSpec.of(peft=configuration(kind)))))
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", BY_VALUES)
def test_adapter_of_unknown_sizes_is_refused(kind: str, config: str) -> None:
    with pytest.raises(UserError, match=f"the sizes of {kind} depend on values"):
        load(PLAIN.edit(peft=configuration(kind)).edit(model=config), "t4")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", TRACED)
def test_step_with_every_adapter_is_traced(kind: str, config: str) -> None:
    workload = load(PLAIN.edit(peft=configuration(kind)).edit(model=config), "t4")
    at_peak = workload.trace(2).at_peak
    blocks = (-(-p.nbytes // 512) * 512 for p in workload.model.parameters())
    assert at_peak["parameters"] == sum(blocks)
    assert at_peak["optimizer"] < at_peak["parameters"]


@pytest.mark.filterwarnings("ignore")
def test_tensors_outside_parameters_are_counted_for_all_blocks(tmp_path: Path) -> None:
    """PEFT keeps indices in dicts, as neither parameters nor buffers; they are of each block."""
    file = tmp_path / "config.json"
    found = []
    for layers in (7, 8):
        file.write_text(json.dumps({**LLAMA, "num_hidden_layers": layers}))
        workload = load(TrainingSpec.of(str(file), seq_length=32, peft=configuration("WAVEFT")), "cpu")
        step = workload.step(2)
        trace = trace_step(workload.model, step, make_optimizer=workload.make_optimizer, device="cpu")
        residents = (storage for storage, _ in trace.live_at(trace.start - 1))
        found.append(sum(storage.nbytes for storage in residents if storage.category == "activations"))
    assert found[1] - found[0] == 8 * 2 * 2 * 2592  # bytes of a block's indices


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["LN_TUNING", "ADAPTION_PROMPT"])
def test_adapters_have_the_dtype_of_peft(kind: str, config: str) -> None:
    """Copies of norms keep the base's dtype; in float32 they would not fit its matmuls."""
    workload = load(PLAIN.edit(peft=configuration(kind)).edit(model=config), "t4")
    assert {p.dtype for p in workload.model.parameters()} == {torch.bfloat16}
    assert workload.trace(1).peak_allocated > 0


@pytest.mark.filterwarnings("ignore")
def test_adalora_trains_rank_numbers_in_half_precision_only(config: str) -> None:
    """PEFT 0.21 casts them on a base in half precision; divisions by trained numbers save their operands."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes_of = {key: value for key, value in LLAMA.items() if key not in ("model_type", "architectures")}
    if is_older("peft", "0.21"):
        pytest.skip("an older PEFT, which trains none in half precision; a trace is of the newer ones")
    for dtype, trained in (("bfloat16", True), ("float32", False)):
        settings = PLAIN.edit(dtype=dtype, peft=configuration("ADALORA"))
        base = LlamaForCausalLM(LlamaConfig(**sizes_of)).to(getattr(torch, dtype))  # type: ignore[arg-type]
        for model in (load(settings.edit(model=config), "t4").model, adapt(base, settings)):
            ranks = [p.requires_grad for name, p in model.named_parameters() if ".ranknum." in name]
            assert ranks == [trained] * 4


@pytest.mark.parametrize("way", ["corda", "loftq", "pissa", "olora"])
def test_lora_initialization_does_not_change_sizes(way: str, config: str) -> None:
    """Also if its values are computed from data, or by a package that a trace does not need."""
    lora = {"peft_type": "LORA", "r": 8, **TARGETS}
    found = [
        sizes(load(PLAIN.edit(peft={**lora, **given}).edit(model=config), "t4").model)
        for given in ({}, {"init_lora_weights": way})
    ]
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "bits", "says"),
    [
        ("HIRA", 4, "with HIRA over weights in 4 bits: .*broadcast"),
        ("LOHA", 4, "with LOHA over weights in 4 bits: .*must have same reduction dim"),
        ("SUPERTUNING", 8, "with SUPERTUNING over weights in 8 bits"),
        ("PSOFT", 8, "the PEFT configuration: TypeError: PSOFT init requires float32"),
        ("XLORA", 0, "with XLORA: .*must have same reduction dim"),
    ],
)
def test_adapter_that_does_not_run_is_one_line(
    kind: str, bits: int, says: str, config: str, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = PLAIN.edit(peft=configuration(kind), load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    with pytest.raises(UserError, match=says):
        load(settings.edit(model=config), "t4").trace(1)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.filterwarnings("ignore")
def test_xlora_trains_its_classifier_only(tmp_path: Path, config: str) -> None:
    """X-LoRA's base and adapters are frozen; a trained layer mixes the adapters per token."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes_of = {key: value for key, value in LLAMA.items() if key not in ("model_type", "architectures")}
    base = LlamaForCausalLM(LlamaConfig(**sizes_of))  # type: ignore[arg-type]
    get_peft_model(base, LoraConfig(r=4, **TARGETS)).save_pretrained(tmp_path / "saved")
    mixed = {"peft_type": "XLORA", "task_type": "CAUSAL_LM", "hidden_size": 256, "xlora_depth": 1}
    saved = str(tmp_path / "saved")
    workload = load(PLAIN.edit(peft={**mixed, "adapters": {"0": saved, "1": saved}}).edit(model=config), "t4")
    assert workload.trace(1).peak_allocated > 0
    assert sizes(workload.model)[0] == (256 + 1) * 2  # one layer: a weight per adapter


def test_configuration_of_a_saved_adapter_is_read(config: str) -> None:
    saved = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "inference_mode": True, "revision": None}
    model = load(
        PLAIN.edit(peft={**saved, "base_model_name_or_path": "gone/from-the-hub"}).edit(model=config), "t4"
    ).model
    assert sizes(model)[0] == 2 * 4 * (256 + 256)
    with pytest.raises(UserError, match="the PEFT configuration: .*unexpected keyword argument 'rank'"):
        load(PLAIN.edit(peft={"peft_type": "LORA", "rank": 4}).edit(model=config), "t4")


def test_bytes_of_quantised_weights(config: str) -> None:
    """bitsandbytes' layout: half a byte per weight and a scale per 64, nested or not; or a byte, a scale per row."""
    weights = [out * into for out, into in LAYERS] * 2
    lora = PLAIN.edit(lora_r=2)

    def bytes_of(settings: TrainingSpec) -> tuple[int, int]:
        model = load(settings.edit(model=config), "t4").model
        frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
        rotary = 2 * 64 // 2 * 4  # its frequencies, and the original ones
        return frozen - 2 * REST, sum(b.nbytes for b in model.buffers()) - rotary

    scales = [n // 64 for n in weights]
    assert bytes_of(lora.edit(load_in_4bit=True)) == (LINEAR // 2, sum(4 * n + 16 * 4 for n in scales))
    nested = sum(n + -(-n // 256) * 4 + 256 * 4 + 4 + 16 * 4 for n in scales)
    assert bytes_of(lora.edit(load_in_4bit=True, double_quant=True)) == (LINEAR // 2, nested)
    assert bytes_of(lora.edit(load_in_8bit=True)) == (LINEAR, 2 * sum(4 * out for out, _ in LAYERS))


def test_dora_has_one_magnitude_per_row(config: str) -> None:
    for quantised in ({}, {"load_in_4bit": True}, {"load_in_8bit": True}):
        trained = [
            sizes(load(PLAIN.edit(lora_r=2, use_dora=dora, **quantised).edit(model=config), "t4").model)[0]  # type: ignore[arg-type]
            for dora in (False, True)
        ]
        assert trained[1] - trained[0] == 2 * sum(out for out, _ in LAYERS)


def test_frozen_parts_have_no_optimizer_states(config: str) -> None:
    def optimizer(settings: TrainingSpec) -> int:
        return load(settings.edit(dtype="float32").edit(model=config), "t4").trace(1).at_peak["optimizer"]

    counts = 512  # of the step count of each tensor
    part = 96 * 256  # the embeddings
    frozen = PLAIN.edit(frozen=("embed_tokens",))
    assert optimizer(PLAIN) - optimizer(frozen) == 2 * 4 * part + counts
    with pytest.raises(UserError, match=r"frozen part 'vision': no parameter has it in its name \(the model's"):
        load(PLAIN.edit(frozen=("vision",)).edit(model=config), "t4")


def test_moving_average_is_float32(config: str) -> None:
    plain, averaged = (load(PLAIN.edit(ema=ema).edit(model=config), "t4").trace(1) for ema in (False, True))
    assert averaged.at_peak["optimizer"] - plain.at_peak["optimizer"] == 4 * (LINEAR + REST)
    assert averaged.peaks["optimizer"] > plain.peaks["optimizer"] + 4 * (LINEAR + REST)


def test_seconds_of_micro_batches_and_kernels_of_clipping(config: str) -> None:
    once, four = (load(PLAIN.edit(accumulation=n).edit(model=config), "t4").trace(2) for n in (1, 4))
    assert once.micro_batches == 1
    assert four.micro_batches == 4
    assert 2 * once.seconds < four.seconds < 4 * once.seconds
    clipped, whole = (load(PLAIN.edit(max_grad_norm=norm).edit(model=config), "t4").trace(2) for norm in (1.0, 0.0))
    names = [{op.name for op in trace.ops} for trace in (clipped, whole)]
    assert any("_foreach_norm" in name for name in names[0])
    assert not any("_foreach_norm" in name for name in names[1])


def kernels(settings: TrainingSpec, config: str) -> tuple[set[str], int]:
    """Returns the attention kernels of a step and the bytes of pairwise masks."""
    workload = load(settings.edit(model=config), "a100-40gb")
    trace = workload.trace(2)
    names = ("flash", "efficient", "cudnn", "math")
    found = {next(name for name in names if name in op.name) for op in trace.ops if "attention." in op.name}
    pairs = 2 * 32 * 32
    return found, sum(s.nbytes >= pairs and "mask" in s.op for s in trace.storages)


@pytest.mark.parametrize("implementation", ["flash_attention_2", "kernels-community/flash-attn3", "flex_attention"])
def test_row_layout_decides_the_mask(config: str, implementation: str) -> None:
    assert kernels(PLAIN, config)[0] == {"flash"}
    assert kernels(PLAIN.edit(rows="padded"), config)[0] == {"efficient"}
    assert kernels(PLAIN.edit(rows="packed"), config)[0] == {"efficient"}
    flash = PLAIN.edit(attn_implementation=implementation)
    assert kernels(flash.edit(rows="packed"), config)[0] == {"flash"}
    assert kernels(flash.edit(rows="padded"), config)[0] == {"flash"}
    batch = load(PLAIN.edit(rows="packed").edit(model=config), "t4").make_batch(2, None)
    assert batch["position_ids"].tolist() == [[*range(16), *range(16)]] * 2


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"load_in_8bit": True}, "8-bit weights cannot be trained themselves"),
        ({"load_in_4bit": True, "load_in_8bit": True, "lora_r": 2}, "weights in 4 bits and in 8 bits: choose one"),
        ({"double_quant": True}, "double quant: it has no effect without load in 4bit"),
        ({"use_dora": True}, "use dora: it has no effect without LoRA rank"),
        ({"lora_r": 2, "peft": {}}, "two adapters: give one of them"),
        ({"accumulation": 0}, "a step has at least 1 micro-batch"),
        ({"max_grad_norm": -1.0}, "gradients clipped to -1.0"),
        ({"rows": "many"}, "rows 'many'"),
    ],
)
def test_contradictory_options_are_refused(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says) as refused:
        TrainingSpec.of(**asked)
    assert "--" not in str(refused.value)


def test_packed_rows_of_an_image_model_are_refused() -> None:
    with pytest.raises(UserError, match="packed rows: the batches of microsoft/resnet-50, .*, hold no text"):
        load(TrainingSpec.of("microsoft/resnet-50", rows="packed"), "t4")


def lora(**more: Any) -> int:
    """Returns the number of parameters that LoRA of rank 4 trains in a Llama."""
    with torch.device("meta"):
        base = load(TrainingSpec.of(**more, seq_length=32, lora_r=4, lora_dropout=0.0), "cpu").model
    return sizes(base)[0]


def test_lora_of_chosen_modules_and_fully_trained_modules(config: str) -> None:
    q_proj, v_proj = 2 * 4 * (256 + 256), 2 * 4 * (128 + 256)  # in two blocks
    assert lora(model=config, lora_targets=("q_proj", "v_proj")) == q_proj + v_proj
    assert lora(model=config, lora_targets=(r"model\.layers\.1\.self_attn\.q_proj",)) == q_proj // 2
    assert lora(model=config, lora_targets=("q_proj",), lora_modules_to_save=("lm_head",)) == q_proj + 96 * 256


def test_lora_of_expert_parameters(tmp_path: Path) -> None:
    mixtral = {
        **LLAMA, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(mixtral))
    names = ("mlp.experts.down_proj",)
    only = lora(model=str(tmp_path), lora_targets=("q_proj",))
    more = lora(model=str(tmp_path), lora_targets=("q_proj",), lora_target_parameters=names)
    experts = 2 * 4 * 4 * (256 + 512)  # blocks, experts, rank
    assert more == only + experts
    assert lora(model=str(tmp_path), lora_targets=("none",), lora_target_parameters=names) == experts


def test_notes_about_quantised_and_adapted_experts(tmp_path: Path) -> None:
    """bitsandbytes packs linear layers only, not fused experts; PEFT adapts experts by their parameters' names."""
    mixtral = {
        **LLAMA, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(mixtral))
    common: dict[str, Any] = {"lora_r": 4, "dtype": "bfloat16", "seq_length": 32}
    with pytest.raises(UserError, match="LoRA dropout 0.05: PEFT adapts fused experts and routers without; give 0"):
        load(TrainingSpec.of(str(tmp_path), lora_dropout=0.05, **common), "cpu")
    adapted = load(TrainingSpec.of(str(tmp_path), **common), "cpu").model  # no dropout by default, as in the recipes
    trained = {name.partition("layers.0.")[2].partition(".lora_")[0] for name, p in adapted.named_parameters()
               if p.requires_grad and "layers.0." in name}  # fmt: skip
    attention = {f"self_attn.{letter}_proj" for letter in "qkvo"}
    # PEFT wraps routers and experts by parameter, down_proj inside gate_up_proj
    assert trained == attention | {"mlp.gate", "mlp.experts", "mlp.experts.base_layer"}
    spec = TrainingSpec.of(str(tmp_path), load_in_4bit=True, lora_targets=("q_proj",), **common)
    workload = load(spec, "cpu")
    experts = [p for name, p in workload.model.named_parameters() if p.ndim == 3 and "experts" in name]
    assert {p.dtype for p in experts} == {torch.bfloat16}
    said = next(note for note in workload.notes if "fused parameters" in note)
    assert f"{sum(p.nbytes for p in experts) / 2**20:.1f} MiB of experts" in said
    eight = load(TrainingSpec.of(str(tmp_path), load_in_8bit=True, lora_targets=("q_proj",), **common), "cpu")
    assert {p.dtype for name, p in eight.model.named_parameters() if "q_proj.base" in name} == {torch.int8}
    assert {p.dtype for name, p in eight.model.named_parameters() if p.ndim == 3} == {torch.bfloat16}
    assert any("8 bits: bitsandbytes packs linear layers only, and" in note for note in eight.notes)
    with pytest.raises(UserError, match=r"'experts.up': no parameter has that name; those of experts are mlp.experts"):
        load(TrainingSpec.of(str(tmp_path), lora_target_parameters=("experts.up",), **common), "cpu")
    with pytest.raises(UserError, match=r"LoRA dropout 0.1 and LoRA target parameters"):
        TrainingSpec.of(str(tmp_path), lora_target_parameters=("experts.down_proj",), lora_dropout=0.1, **common)
    wide = load(spec.edit(prepare_kbit=True), "cpu")  # PEFT casts the unpacked weights
    said = next(note for note in wide.notes if "fused parameters" in note)
    assert (
        f"{2 * sum(p.nbytes for p in experts) / 2**20:.1f} MiB of experts in fused parameters are in float32" in said
    )


def test_bytes_of_experts_packed_by_axolotl(tmp_path: Path) -> None:
    """One byte per two weights and a float32 scale per 64; a block unpacks all its experts, adapted or not."""
    qwen = {
        **LLAMA, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 128, "num_hidden_layers": 3, "head_dim": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(qwen))
    spec = TrainingSpec.of(
        str(tmp_path), lora_r=4, dtype="bfloat16", seq_length=32, load_in_4bit=True, lora_targets=("q_proj",)
    )
    weights = 3 * 8 * 3 * 256 * 128  # the experts of all blocks
    left, packed = load(spec, "cpu"), load(spec.edit(quantize_moe_experts=True), "cpu")
    assert sizes(left.model)[1] - sizes(packed.model)[1] == 2 * weights - weights // 2
    # scales, and 16 levels each
    assert sizes(packed.model)[2] - sizes(left.model)[2] == 4 * weights // 64 + 3 * 2 * 64
    block = 2 * weights // 3
    apply_policy(packed.model, "full")
    trace = packed.trace(2)
    assert block < trace.at_peak["activations"] + trace.at_peak["temporary"] < 2 * block
    names = ("mlp.experts.down_proj", "mlp.experts.gate_up_proj")
    adapted = load(spec.edit(quantize_moe_experts=True, lora_target_parameters=names), "cpu")
    assert sizes(adapted.model)[0] - sizes(packed.model)[0] == 3 * 8 * 4 * (128 + 256 + 256 + 256)
    trace = adapted.trace(2)
    assert trace.at_peak["optimizer"] >= 8 * sizes(adapted.model)[0]  # each adapter of an expert has a gradient
    routed = load(spec.edit(quantize_moe_experts=True, lora_targets=("q_proj", "mlp.gate")), "cpu")
    assert sizes(routed.model)[0] - sizes(packed.model)[0] == 3 * 4 * (8 + 256)  # routers are not packed
    assert routed.trace(2).at_peak["optimizer"] >= 8 * sizes(routed.model)[0]
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(UserError, match="quantised experts: LlamaForCausalLM has no experts in 3-D parameters"):
        load(spec.edit(quantize_moe_experts=True), "cpu")
    with pytest.raises(UserError, match="it has no effect without load in 4bit"):
        TrainingSpec.of(str(tmp_path), lora_r=4, quantize_moe_experts=True)


def test_norms_embeddings_and_head_have_a_dtype_of_their_own(config: str) -> None:
    narrow = load(TrainingSpec.of(config, seq_length=32, dtype="bfloat16"), "cpu").model
    wide = load(TrainingSpec.of(config, seq_length=32, dtype="bfloat16", ends_dtype="float32"), "cpu").model
    assert sizes(narrow)[1] == 2 * (LINEAR + REST)
    assert sizes(wide)[1] == 2 * LINEAR + 4 * REST


def test_packed_models_are_marked_as_transformers_marks_them(config: str) -> None:
    """Jamba, Falcon Mamba and GPT-J call a packed layer where they use the weight of another one."""
    four = TrainingSpec.of(config, seq_length=32, dtype="bfloat16", lora_r=4, load_in_4bit=True)
    assert load(four, "cpu").model.config._is_quantized
    assert not hasattr(load(four.edit(load_in_4bit=False), "cpu").model.config, "_is_quantized")


def test_axolotl_prepares_packed_models_and_casts_their_ends_back(tmp_path: Path) -> None:
    """Experts in 3-D parameters are not packed, and stay in float32."""
    mixtral = {**LLAMA, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
    (tmp_path / "config.json").write_text(json.dumps(mixtral))
    packed = {"seq_length": 32, "dtype": "bfloat16", "lora_r": 4, "load_in_4bit": True}
    model = load(TrainingSpec.of(str(tmp_path), **packed, prepare_kbit=True, ends_dtype="bfloat16"), "cpu").model
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters() if not parameter.requires_grad}
    in_half = {name for name, dtype in dtypes.items() if dtype == torch.bfloat16}
    assert all("norm" in name or "embed" in name or "lm_head" in name for name in in_half)
    assert len(in_half) == 2 * LLAMA["num_hidden_layers"] + 3
    assert {dtype for name, dtype in dtypes.items() if "experts" in name} == {torch.float32}


@pytest.mark.parametrize("name", ["mamba2", "bamba", "nemotron_h", "granitemoehybrid", "falcon_h1"])
def test_configuration_with_infinity_is_read(name: str, tmp_path: Path) -> None:
    """transformers 5 writes infinity as {"__float__": "Infinity"}."""
    from transformers import AutoConfig

    AutoConfig.for_model(name).save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    assert "__float__" in text
    limits = read_config(str(tmp_path))["time_step_limit"]
    assert limits[1] == float("inf")


def test_weights_that_are_trained_beside_frozen_ones_are_float32(config: str) -> None:
    spec = TrainingSpec.of(config, seq_length=32, dtype="bfloat16", frozen=("!last:1",), float32_trained=True)
    parameters = list(load(spec, "cpu").model.parameters())
    assert {p.dtype for p in parameters if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in parameters if not p.requires_grad} == {torch.bfloat16}


def test_names_of_another_version_of_the_model_are_left_out_of_a_file(config: str) -> None:
    with pytest.raises(UserError, match="not found in the base model") as refused:
        load(TrainingSpec.of(config, seq_length=32, lora_r=4, lora_targets=("model.tower.(up|down)_proj",)), "cpu")
    assert refused.value.without == {"lora_targets": ()}
    frozen = load(TrainingSpec.of(config, seq_length=32, lora_r=4, frozen=("!model.tower.*",)), "cpu").model
    plain = load(TrainingSpec.of(config, seq_length=32, lora_r=4), "cpu").model
    assert sizes(frozen) == sizes(plain)
