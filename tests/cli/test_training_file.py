"""The flag `--config file.yaml`: files of our recipes, TRL and axolotl are read as their flags."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from model_configs import write_config

from ckpt_ft.cli import main as cli
from ckpt_ft.errors import UserError
from ckpt_ft.spec.flags import fields_of, words_of
from ckpt_ft.spec.launch import Launch
from ckpt_ft.spec.training_file import read_training_file
from ckpt_ft.spec.training_spec import TrainingSpec

HERE = Path(__file__).parent
FILES = HERE / "training_files"
RECIPES = HERE.parents[1] / "recipes"
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99, "max_position_embeddings": 2048,
}  # fmt: skip
SAYS = {
    "axolotl_qlora": (
        "NousResearch/Meta-Llama-3-8B --policy full --batch-size 2 --seq-length 4096 --accumulation 4 --packing "
        "--dtype bfloat16 --bf16 --ends-dtype bfloat16 --lora 32 --lora-dropout 0.05 --load-in-4bit --double-quant "
        "--prepare-kbit --optimizer paged_adamw_8bit --attn-implementation flash_attention_2"
    ),
    "axolotl_lora_8bit": (
        "TinyLlama/TinyLlama_v1.1 --batch-size 4 --seq-length 2048 --dtype float16 --fp16 --ends-dtype float16 "
        "--lora 16 --lora-targets q_proj,v_proj --lora-dropout 0.0 --load-in-8bit --prepare-kbit "
        "--optimizer adamw_8bit"
    ),
    "axolotl_full": (
        "Qwen/Qwen2.5-0.5B --policy full --seq-length 1024 --accumulation 8 --dtype bfloat16 --bf16 "
        "--max-grad-norm 0.5 --attn-implementation flex_attention"
    ),
    "trl_sft_lora": (
        "Qwen/Qwen2.5-0.5B-Instruct --policy full --batch-size 4 --seq-length 2048 --accumulation 2 --packing "
        "--dtype bfloat16 --bf16 --lora 32 --lora-targets all-linear --attn-implementation sdpa --trainer sft"
    ),
    "trl_sft_full": (
        "HuggingFaceTB/SmolLM2-360M --policy full --batch-size 8 --seq-length 512 --bf16 --optimizer adamw "
        "--trainer sft"
    ),
}


def spec_of(path: Path | str, recipe: str = "", **typed: Any) -> TrainingSpec:
    """Returns the spec of `ckpt-ft estimate --config path` with the flags `typed`."""
    read = read_training_file(str(path), recipe)
    return TrainingSpec.of(read.model, **fields_of({**read.flags, **typed}))


def estimated(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["ckpt-ft", "estimate", *words, "--json"])
    assert cli._main() == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", SAYS)
def test_file_equals_its_flags(name: str) -> None:
    spec = spec_of(FILES / f"{name}.yaml", "trl" if name.startswith("trl") else "", device="t4")
    assert " ".join(words_of(spec)) == f"{SAYS[name]} --device t4"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SAYS)
def test_files_have_estimates(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answer = estimated(monkeypatch, capsys, "--config", str(FILES / f"{name}.yaml"), "--device", "h100")
    assert answer["headroom"] > 0


def test_every_recipe_file_is_read() -> None:
    for path in [
        *RECIPES.glob("llm/*.yaml"),
        *RECIPES.glob("diffusion*/*.yaml"),
        *RECIPES.glob("vision/*.yaml"),
        *RECIPES.glob("vlm/*.yaml"),
        *RECIPES.glob("text/*.yaml"),
    ]:
        spec = spec_of(path)
        content = yaml.safe_load(path.read_text())
        assert spec.model.name in (content.get("model_name_or_path"), content.get("pretrained_model_name_or_path"))
        assert spec.policy == content["ac_policy"]


def test_vision_language_file_sets_towers_and_pixels(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model_name_or_path: m\nuse_peft: true\nmax_pixels: 100352\nac_policy: full@language\n")
    start = "m --policy full@language --train-towers language --batch-size 8 --seq-length 2048"
    found = words_of(spec_of(file, image_size="640x480"))
    assert " ".join(found) == f"{start} --images 1 --image-size 640x480 --max-pixels 100352 --lora 16"
    read = read_training_file(str(file), rows=True)
    assert "images" not in read.flags


def test_command_line_overrides_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_config(tmp_path, LLAMA)
    file = tmp_path / "run.yaml"
    file.write_text(f"model_name_or_path: {model}\nmax_length: 16\nper_device_train_batch_size: 2\nuse_peft: true\n")
    flags = ("--seq-length", "16", "--batch-size", "2", "--lora", "16")
    typed = estimated(monkeypatch, capsys, model, *flags)
    assert estimated(monkeypatch, capsys, "--config", str(file), "--recipe", "llm") == typed
    words = ("--config", str(file), "--recipe", "llm", "--batch-size", "3")
    assert estimated(monkeypatch, capsys, *words)["batch_size"] == 3


def test_paged_optimizer_keeps_its_name(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model_name_or_path: m\noptim: paged_adamw_8bit\n")
    read = read_training_file(str(file))
    assert read.flags["optimizer"] == "paged_adamw_8bit"
    assert read.notes == (f"{file} is read with the defaults of recipes/llm.py; --recipe names others",)


def test_prior_preservation_doubles_the_batch(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("pretrained_model_name_or_path: m\nwith_prior_preservation: true\ntrain_batch_size: 1\n")
    read = read_training_file(str(file), "diffusers")
    assert read.flags["batch_size"] == 2
    assert "with_prior_preservation: a batch of 1 is 2 images" in read.notes


def test_zeros_in_a_file_override_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model_name_or_path: m\nuse_peft: true\nlora_dropout: 0.0\nmax_grad_norm: 0\nbf16: false\n")
    spec = spec_of(file)
    assert (spec.adapter.lora_dropout, spec.optimizer.max_grad_norm, spec.precision.mixed_precision) == (
        0.0,
        0.0,
        "no",
    )


def test_explain_and_max_batch_read_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """These commands read the file although they have no flag for its optimizer or batch size."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    file = tmp_path / "run.yaml"
    file.write_text(f"model_name_or_path: {tmp_path}\nmax_length: 16\nper_device_train_batch_size: 2\noptim: sgd\n")
    for command, says in (("explain", "2 of 2 blocks"), ("max-batch", "under 'none' on t4"), ("check", "same")):
        device = [] if command == "check" else ["--device", "t4"]
        monkeypatch.setattr(sys, "argv", ["ckpt-ft", command, "--config", str(file), "--recipe", "llm", *device])
        assert cli._main() == 0
        assert says in capsys.readouterr().out


M = "model_name_or_path: m\n"
AXOLOTL = "base_model: m\nmicro_batch_size: 2\n"
DIFFUSERS = "pretrained_model_name_or_path: m\nrank: 4\ntrain_batch_size: 1\n"
TRL = "m --policy full --batch-size 8 --bf16"
READ = {  # the content of a file -> its command line
    "dataset_text_field: text\n": f"{TRL} --trainer sft",
    "packing: true\nactivation_checkpointing: false\n": "m --batch-size 8 --packing --bf16 --trainer sft",
    "packing: true\ntorch_compile: true\nactivation_checkpointing: false\n": (
        "m --batch-size 8 --packing --bf16 --torch-compile --trainer sft"
    ),
    "packing: true\ntorch_compile: false\ntorch_compile_backend: inductor\nactivation_checkpointing: false\n": (
        "m --batch-size 8 --packing --bf16 --torch-compile --trainer sft"  # TrainingArguments turn it on
    ),
    "packing: true\ngradient_checkpointing: 'false'\n": "m --batch-size 8 --packing --bf16 --trainer sft",
    "max_length: 64\nbf16: 'false'\n": "m --policy full --batch-size 8 --seq-length 64 --trainer sft",
    "use_peft: true\nload_in_4bit: true\n": f"{TRL} --lora 16 --load-in-4bit --trainer sft",
    "use_peft: true\nlora_target_modules: all-linear\nlora_modules_to_save: [lm_head]\n": (
        f"{TRL} --lora 16 --lora-targets all-linear --lora-modules-to-save lm_head --trainer sft"
    ),
    "use_peft: true\nlora_target_parameters: [mlp.experts.gate_up_proj]\n": (
        f"{TRL} --lora 16 --lora-target-parameters mlp.experts.gate_up_proj --trainer sft"
    ),
    "max_length: 64\nmodel_init_kwargs: {dtype: bfloat16, attn_implementation: eager}\n": (
        "m --policy full --batch-size 8 --seq-length 64 --dtype bfloat16 --bf16 --attn-implementation eager "
        "--trainer sft"
    ),
    "packing: true\ngradient_checkpointing_kwargs: {every_n_layers: 2}\n": (
        "m --policy every:2 --batch-size 8 --packing --bf16 --trainer sft"
    ),
    "max_length: 64\nbeta: 0.2\nloss_type: [ipo]\n": (
        "m --policy full --batch-size 8 --seq-length 64 --bf16 --trainer dpo "
        """--trainer-args '{"beta": 0.2, "loss_type": ["ipo"]}'"""
    ),
    "finetuning_type: lora\nquantization_bit: 4\ncutoff_len: 128\ntemplate: qwen\nlora_rank: 4\nbf16: true\n": (
        "m --policy full --train-towers language --batch-size 8 --seq-length 128 --dtype bfloat16 --bf16 --lora 4 "
        "--lora-dropout 0.0 --load-in-4bit --double-quant"
    ),
    "stage: sft\nfinetuning_type: full\nbf16: true\nflash_attn: fa2\ndisable_gradient_checkpointing: true\n": (
        "m --train-towers language --batch-size 8 --seq-length 2048 --dtype bfloat16 --bf16 --float32-trained "
        "--attn-implementation flash_attention_2"
    ),
    "stage: sft\nfinetuning_type: full\nbf16: true\nuse_muon: true\noptim: adamw_torch\n": (
        "m --policy full --train-towers language --batch-size 8 --seq-length 2048 --dtype bfloat16 --bf16 "
        "--float32-trained --optimizer muon"
    ),
}
AXOLOTL_READ = {
    "sequence_len: 64\n": "m --batch-size 2 --seq-length 64 --dtype bfloat16 --bf16 --ends-dtype float32",
    "sequence_len: 64\ntorch_compile: auto\n": (
        "m --batch-size 2 --seq-length 64 --dtype bfloat16 --bf16 --ends-dtype float32 --torch-compile"
    ),
    "sequence_len: 64\ntorch_compile_backend: inductor\n": (
        "m --batch-size 2 --seq-length 64 --dtype bfloat16 --bf16 --ends-dtype float32"
    ),
    "sequence_len: 64\ntorch_compile: true\n": (
        "m --batch-size 2 --seq-length 64 --dtype bfloat16 --bf16 --ends-dtype float32 --torch-compile"
    ),
    "sequence_len: 64\nplugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]\n": (
        "m --batch-size 2 --seq-length 64 --dtype bfloat16 --bf16 --cut-cross-entropy"
    ),
    "sequence_len: 64\nadapter: lora\nload_in_8bit: true\n": (
        "m --batch-size 2 --seq-length 64 --dtype bfloat16 --bf16 --ends-dtype bfloat16 --lora 16 --lora-dropout 0.0 "
        "--load-in-8bit --prepare-kbit"
    ),
    "adapter: lora\nlora_target_parameters: [mlp.experts.down_proj]\n": (
        "m --batch-size 2 --seq-length 512 --dtype bfloat16 --bf16 --lora 16 --lora-targets none "
        "--lora-target-parameters mlp.experts.down_proj --lora-dropout 0.0"
    ),
    "bf16: full\nflash_attention: true\n": (
        "m --batch-size 2 --seq-length 512 --dtype bfloat16 --attn-implementation flash_attention_2"
    ),
    "batch_size: 16\nbf16: false\n": "m --batch-size 2 --seq-length 512",
    "adapter: lora\nlora_r: 8\nlora_target_modules: 'layers.[01].mlp.(up|down)_proj'\noptimizer: AdamW\n": (
        "m --batch-size 2 --seq-length 512 --dtype bfloat16 --bf16 --lora 8 "
        "--lora-targets 'layers.[01].mlp.(up|down)_proj' --lora-dropout 0.0 --optimizer adamw"
    ),
}
DIFFUSERS_READ = {
    "": "m --resolution 512 --encode-each-step --lora 4 --optimizer adamw",
    "cache_latents: true\nlora_layers: to_q,to_v\nresolution: 256\noptimizer: AdamW\nuse_8bit_adam: true\n": (
        "m --resolution 256 --lora 4 --lora-targets to_q,to_v --optimizer adamw_8bit"
    ),
}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *((M + text, words) for text, words in READ.items()),
        *((AXOLOTL + text, words) for text, words in AXOLOTL_READ.items()),
        *((DIFFUSERS + text, words) for text, words in DIFFUSERS_READ.items()),
    ],
)
def test_file_of_another_trainer_has_the_defaults_of_that_trainer(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert shlex.join(words_of(spec_of(file))) == words


def test_launch_settings_in_a_file_are_read(tmp_path: Path) -> None:
    file, zero = tmp_path / "run.yaml", tmp_path / "zero.json"
    zero.write_text(
        json.dumps({"zero_optimization": {"stage": 2, "reduce_bucket_size": 1e6}, "bf16": {"enabled": "auto"}})
    )
    file.write_text(f"{M}max_length: 64\ndeepspeed: {zero}\n")
    launch = spec_of(file, processes=4).launch.launch
    assert launch is not None
    assert (launch.strategy, launch.processes, launch.mixed_precision) == ("zero2", 4, "bf16")
    assert launch.zero.reduce_bucket_size == 1_000_000
    file.write_text(f"{M}max_length: 64\nfsdp: true\nfsdp_config: {{reshard_after_forward: false}}\n")
    assert spec_of(file, processes=8).launch.launch == Launch("fsdp2", 8, 1, "bf16", reshard_after_forward=False)
    assert [launch.processes for launch in spec_of(file).launch.launches] == [1, 2, 4, 8]
    file.write_text(f"{AXOLOTL}fsdp_version: 2\nfsdp_config: {{offload_params: true}}\n")
    assert spec_of(file, processes=8).launch.launch == Launch("fsdp2", 8, 1, "bf16", offload_params=True)
    assert spec_of(file, processes=8).precision.ends_dtype == ""
    file.write_text(f"{AXOLOTL}context_parallel_size: 8\ndeepspeed: {zero}\n")
    assert [(launch.strategy, launch.processes, launch.sp) for launch in spec_of(file).launch.launches] == [
        ("zero2", 8, 8)
    ]
    file.write_text(f"{AXOLOTL}expert_parallel_size: 2\ndp_shard_size: 2\nfsdp_config: {{fsdp_version: 2}}\n")
    assert spec_of(file).launch.launch == Launch("fsdp2", 4, 1, "bf16", ep=2)
    assert "ep 2: answered as transformers' own, whose rest FSDP2 shards" in spec_of(file).host.left_out


@pytest.mark.parametrize(
    ("text", "recipe", "says"),
    [
        ("model_name_or_path: m\nbf16: maybe", "", "bf16: 'maybe' is neither true nor false"),
        ("model_name_or_path: m\npacking: [1]", "", "packing: '[1]' is neither true nor false"),
        ("max_length: 8", "", "it names no model (model_name_or_path, pretrained"),
        ("base_model: m\noptimizer: lion", "", "optimizer lion is not modelled; did you mean 'lion_8bit'?"),
        (
            "base_model: m",
            "torchtune",
            "--recipe torchtune: no such kind of file (llm, vlm, text, image_class",
        ),
        (
            "model_name_or_path: m\nbeta: 0.1\nactivation_checkpointing: maybe",
            "",
            "checkpointing: 'maybe' is neither",
        ),
        (M + "max_length: null\npacking: true", "", "rows are not cut, and their length is not known"),
        (M + "max_length: 8\nload_in_4bit: true", "", "4-bit weights cannot be trained themselves"),
        (M + "finetuning_type: prefix", "", "finetuning_type prefix is not modelled (lora, full, freeze, oft)"),
        (M + "stage: mcts\ntemplate: qwen", "", "mcts: it is another algorithm than those that are predicted (sft, "),
        (AXOLOTL + "rl: rlvr", "", "rlvr: it is another algorithm than those that are predicted (sft, pt, dpo"),
        (AXOLOTL + "rl: ebft\nebft: {mode: strided}", "", "ebft.mode: strided: it is another algorithm"),
        (M + "template: qwen\ndo_train: false", "", "do_train: False: such a run only evaluates or predicts"),
        (M + "template: qwen\ntensor_model_parallel_size: 4", "", "Megatron is another trainer"),
        (AXOLOTL + "adapter: llama-adapter", "", "adapter llama-adapter is not modelled (lora, qlora)"),
        ("- a", "", "expected 'flag: value' lines, found list"),
    ],
)
def test_bad_file_fails(text: str, recipe: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as refused:
        spec_of(file, recipe)
    assert says in str(refused.value)
    monkeypatch.setattr(sys, "argv", ["ckpt-ft", "estimate", "--recipe", "llm"])
    with pytest.raises(UserError, match="of which file"):
        cli._main()


LEFT_OUT = {  # the content of a file -> what its answer is without
    M + "packing: true\ntorch_compile_mode: max-autotune": "torch_compile_mode: a step is compiled by Inductor in its",
    M + "packing: true\nlearning_rat: 1": "learning_rat: no such setting is known; did you mean 'learning_rate'?",
    AXOLOTL
    + "plugins: [axolotl.integrations.grokfast.GrokfastPlugin]": "plugins GrokfastPlugin: a plugin may replace",
    AXOLOTL + "chunked_cross_entropy: true": "chunked_cross_entropy: the loss in chunks keeps no logits: less memory",
    AXOLOTL + "qat: {weight_dtype: int4}": "qat: the fake quantisation keeps rounded copies",
    AXOLOTL + "attn_implementation: xformers": "attn_implementation xformers: the model's own choice is predicted",
    AXOLOTL + "adapter: lora\noptimizer: dion": "optimizer dion: the adapters' states are predicted as AdamW's",
    DIFFUSERS + "offload_ema: true": "offload_ema: the moving average is predicted on the device",
    M + "template: qwen\nfinetuning_type: freeze\nuse_llama_pro: true": "use_llama_pro: the last blocks are predicted",
    M + "template: qwen\nmixture_of_depths: convert": "mixture_of_depths: every second block is predicted with all",
    AXOLOTL + "rl: ebft\nebft: {mode: structured, feature_layers: [0.5]}": "rl: answered as GRPO: without adapters",
    M + "packing: true\nuse_unsloth: true": "use_unsloth: fused kernels: fewer",
    M + "template: qwen\nuse_unsloth: true\nuse_v1_kernels: true": "use_unsloth, use_v1_kernels: fused kernels: fewer",
}


@pytest.mark.parametrize("text", LEFT_OUT)
def test_what_is_not_modelled_is_named_and_refused_by_strict(text: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    read = read_training_file(str(file))
    assert [line for line in read.left_out if line.startswith(LEFT_OUT[text])] != []
    with pytest.raises(UserError):
        read_training_file(str(file), strict=True)


STEPS = {  # the content of a file -> parts of its command line
    AXOLOTL + "rl: dpo\nsample_packing: true": "--trainer dpo",
    AXOLOTL + "rl: ipo": """--trainer dpo --trainer-args '{"loss_type": "ipo"}'""",
    AXOLOTL + "rl: simpo": """--trainer dpo --trainer-args '{"precompute_ref_log_probs": true}'""",
    AXOLOTL + "rl: gdpo\ntrl: {num_generations: 2}": """--trainer grpo --trainer-args '{"num_generations": 2}'""",
    AXOLOTL + "reward_model: true\nnum_labels: 1": "--trainer reward",
    AXOLOTL + "process_reward_model: true\nnum_labels: 2": "m --task token-classification --num-labels 2",
    AXOLOTL + "gradient_checkpointing: offload": "--policy full,offload",
    AXOLOTL + "activation_offloading: true\ngradient_checkpointing: 1\ntiled_mlp: true": "--policy full,offload,tile",
    AXOLOTL + "adapter: qlora\nlora_target_linear: true": "--load-in-4bit --double-quant",
    AXOLOTL + "unfrozen_parameters: ['lm_head.*', 'layers.[01],x']": "--freeze '!lm_head.*|layers.[01].x'",
    M + "beta: 2\nloss_type: simpo\nsimpo_gamma: 1\nmax_length: 8": """'{"precompute_ref_log_probs": true}'""",
    M + "max_seq_len: 8\nbf16: 1": "m --policy full --batch-size 8 --seq-length 8 --bf16",
    M + "max_length: 8\nuse_lora: true\nlora_r: 4\nuse_4bit: true": "--lora 4 --load-in-4bit --trainer sft",
    M + "packing: true\nuse_liger: true": "--liger --trainer sft",
    M + "max_prompt_length: 100\nmax_completion_length: 28\nnum_generations: 4": "--seq-length 128",
    M + "template: q\nquantization_bit: 3\nquantization_method: hqq\nbf16: true": "--load-in-4bit --double-quant",
    M + "template: q\nstage: rm\nfinetuning_type: full\nbf16: true": "--trainer reward",
    M + "template: q\nstage: dpo\npref_loss: orpo\nbf16: 1": "--trainer-args '{\"precompute_ref_log_probs\": true}'",
    M + "template: q\nfinetuning_type: freeze\nbf16: true\nfreeze_trainable_layers: 3": (
        "--dtype bfloat16 --bf16 --float32-trained"
    ),
    M + "template: q\nfinetuning_type: freeze\nbf16: true": "--freeze '!last:2'",
    M + "template: q\nstage: dpo\nbf16: true": "--trainer dpo --float32-logits",
    M + "template: q\nfinetuning_type: full\nbf16: true\nuse_galore: true\ngalore_layerwise: true": (
        "--optimizer galore_adamw_layerwise --optim-target-modules '(?!.*lm_head).*' --optim-rank 16"
    ),
    M + "max_length: 9\noptim: apollo_adamw\noptim_target_modules: [attn, mlp]": "--optim-target-modules attn,mlp",
    M + "template: q\nfinetuning_type: full\nuse_apollo: true\napollo_target: mlp\napollo_rank: 8\nbf16: true": (
        "--optimizer apollo_adamw --optim-target-modules mlp --optim-rank 8"
    ),
    M + "template: q\nfinetuning_type: oft\nbf16: true\nlora_target: all\noft_block_size: 16": (
        """--peft-config '{"peft_type": "OFT", "oft_block_size": 16, "target_modules": "all-linear"}'"""
    ),
    "model: m\npeft_config: {name: lora, r: 2, adapter_name_or_path: a}": "m --policy full --seq-length 2048 --dtype",
    "model: m\nmodel_class: llm\nmicro_batch_size: 2\npeft_config: {name: lora, r: 4, target_modules: all}\n"
    "kernel_config: {name: liger_kernel}\nquant_config: {name: bnb, quantization_bit: 4}": (
        "m --policy full --batch-size 2 --seq-length 2048 --dtype bfloat16 --bf16 --lora 4 --lora-dropout 0.0 "
        "--load-in-4bit --double-quant --liger"
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", STEPS)
def test_steps_of_axolotl_and_llama_factory_are_those_of_trl(text: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert STEPS[text] in shlex.join(words_of(spec_of(file)))


def test_notes_and_lines_of_what_a_file_leaves_to_its_library(tmp_path: Path) -> None:
    """axolotl fuses LoRA's layers by default, an ORPO file differs from DPO's by its folder, and rows have images."""
    fuses = "axolotl fuses LoRA's layers unless lora_mlp_kernel"
    for text, found in {"": 1, "lora_qkv_kernel: false": 0, "load_in_8bit: true": 0, "rl: dpo": 0}.items():
        read = read_training_file("run.yaml", content=yaml.safe_load(f"{AXOLOTL}adapter: lora\n{text}"))
        assert sum(fuses in note for note in read.notes) == found, text
    pairs = {"model_name_or_path": "m", "beta": 0.05, "max_length": 64}
    assert read_training_file("m/dpo/config.yaml", content=pairs).flags["trainer_args"] == '{"beta": 0.05}'
    odds = read_training_file("m/orpo/config.yaml", content=pairs)
    assert "precompute_ref_log_probs" in odds.flags["trainer_args"]
    assert odds.left_out == ("orpo: answered as DPO without a reference: the loss keeps other numbers",)
    last = {"SimPO/l-dpo.yaml": "beta", "dpo/l-simpo.yaml": "precompute_ref_log_probs", "scorpo.yaml": "beta"}
    for path, setting in last.items():
        assert list(json.loads(read_training_file(path, content=pairs).flags["trainer_args"])) == [setting], path
    mapped = {"base_model": "m", "device_map": {"": 0}}
    assert read_training_file("run.yaml", content=mapped).left_out == ()
    (line,) = read_training_file("run.yaml", content={**mapped, "device_map": "balanced"}).left_out
    assert line == "device_map: layers on several devices in one process are not predicted"
    images = {"model_name_or_path": "m", "template": "q", "image_max_pixels": 9, "freeze_vision_tower": False}
    read = read_training_file("run.yaml", content=images)
    assert read.flags["train_towers"] == "both"
    assert read.left_out == ("image_max_pixels: rows of text are predicted; --images adds images and their encoder",)
    seen = read_training_file("run.yaml", content=images, images=True)
    assert (seen.flags["max_pixels"], seen.left_out) == (9, ())
    sized = {"base_model": "m", "image_size": 512, "processor_type": "AutoProcessor", "freeze_mm_modules": True}
    assert read_training_file("run.yaml", content=sized).flags["train_towers"] == "language"
    (line,) = read_training_file("run.yaml", content=sized, images=True).left_out
    assert line == "image_size: images have the size that the processor gives them"


def test_file_of_an_own_script_is_no_axolotls_and_its_lora_is_read() -> None:
    """People's scripts have transformers' arguments beside a base_model, and LoRA without a switch for it."""
    own = {"base_model": "m/1b", "model_name": "n", "per_device_train_batch_size": 2, "optim": "sgd", "lora_rank": 4}
    read = read_training_file("run.yaml", content={**own, "target_modules": ["q"], "sequence_len": 64})
    assert (read.model, read.flags["trainer"], read.left_out) == ("m/1b", "sft", ())
    given = {"batch_size": 2, "seq_length": 64, "optimizer": "sgd", "lora_r": 4, "lora_targets": "q"}
    assert given.items() <= read.flags.items()
    for more in ({"use_peft": False}, {"lora_rank": 0}):
        assert "lora_r" not in read_training_file("run.yaml", content={**own, **more}).flags
    named = {"model_id": "m", "max_length": 8}
    assert read_training_file("run.yaml", content=named).model == "m"
    with pytest.raises(UserError, match="it names no model"):
        read_training_file("run.yaml", content={**named, "model_id": {"name": "m"}})


def test_trainer_and_freezing_are_without_packing(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(AXOLOTL + "rl: dpo\nsample_packing: true")
    assert spec_of(file).data.rows == "alike"


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("", None),
        ("eval_strategy: no", None),
        ("eval_strategy: epoch", 8),
        ("eval_strategy: steps\nper_device_eval_batch_size: 3", 3),
    ],
)
def test_evaluation_in_a_file_sets_the_eval_batch_size(text: str, rows: int | None, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"model_name_or_path: m\n{text}\n")
    assert read_training_file(str(file), "trl").flags.get("eval_batch_size") == rows


@pytest.mark.parametrize(
    ("line", "trainer"),
    [
        ("beta: 0.1", "dpo"),
        ("num_generations: 4", "grpo"),
        ("desirable_weight: 1.0", "kto"),
        ("padding_free: true", "sft"),
    ],
)
def test_trainer_is_recognized_from_trl_settings(line: str, trainer: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"model_name_or_path: m\nactivation_checkpointing: 'false'\n{line}\n")
    spec = spec_of(file)
    assert (spec.trainer.trainer, spec.policy, spec.precision.mixed_precision) == (trainer, "none", "bf16")
