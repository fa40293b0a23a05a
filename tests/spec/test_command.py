"""Commands printed for a spec: the recipe's parser reads them, and specs that no recipe trains get a template."""

from __future__ import annotations

import shlex
from types import SimpleNamespace

import pytest

from ckpt_ft.errors import UserError
from ckpt_ft.spec.command import command_for, training_command
from ckpt_ft.spec.launch import Launch
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.training.models import LanguageModelArguments, load_pretrained
from ckpt_ft.training.run_arguments import parse_args


def test_command_of_one_process_has_every_flag() -> None:
    spec = TrainingSpec.of(
        "Qwen/Qwen2.5-0.5B", policy="full,head", batch_size=2, accumulation=4, seq_length=512, lora_r=8,
        lora_targets=("q_proj", "v_proj"), dtype="bfloat16", mixed_precision="bf16", max_grad_norm=0.5,
        attn_implementation="sdpa", optimizer="adamw", alloc_conf="expandable_segments:True",
    )  # fmt: skip
    assert training_command(spec, "llm", "rows.jsonl") == (
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True ckpt-ft recipe llm --model_name_or_path Qwen/Qwen2.5-0.5B "
        "--ac_policy full,head --use_peft --max_length 512 --per_device_train_batch_size 2 "
        "--gradient_accumulation_steps 4 --dtype bfloat16 --bf16 --attn_implementation sdpa --max_grad_norm 0.5 "
        "--optim adamw_torch --lora_r 8 --lora_target_modules q_proj v_proj --dataset_name rows.jsonl"
    )


@pytest.mark.parametrize("recipe", ["llm", "vlm", "dpo", "grpo", "image_classification"])
def test_use_kernels_reaches_from_pretrained(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(training_command(TrainingSpec.of("gpt2"), recipe))
    given = words[3 : words.index("--ac_policy")] + ["--use_kernels"]
    with pytest.raises(UserError, match="--use_kernels needs kernels"):
        parse_args([LanguageModelArguments], given)
    monkeypatch.setattr("transformers.utils.import_utils.is_kernels_available", lambda: True)
    auto = SimpleNamespace(from_pretrained=lambda name, **kwargs: kwargs["use_kernels"])
    for flags, loaded in ((given, True), (given[:-1], False)):
        (args,) = parse_args([LanguageModelArguments], flags)
        monkeypatch.setattr("ckpt_ft.training.models._config", lambda args: None)
        assert load_pretrained(args, auto) is loaded


def test_command_names_the_patch_that_cut_cross_entropy_needs() -> None:
    spec = TrainingSpec.of("gpt2", cut_cross_entropy=True)
    command = training_command(spec, "llm")
    assert command.endswith(
        "YOUR_SCRIPT.py --ac_policy none --per_device_train_batch_size 1  "
        "# calls cut_cross_entropy.transformers.cce_patch(model)"
    )
    assert shlex.split(command, comments=True)[-1] == "1"


def test_shell_characters_are_quoted() -> None:
    command = training_command(TrainingSpec.of("my model; rm x", policy="full"), "llm")
    assert shlex.split(command)[3:5] == ["--model_name_or_path", "my model; rm x"]


def test_multi_process_command_uses_accelerate_launch() -> None:
    spec = TrainingSpec.of("gpt2", policy="full", launch=Launch("fsdp2", 16, mixed_precision="bf16"))
    start, _, rest = training_command(spec, "llm").partition(' "$(ckpt-ft recipe')
    assert start.startswith("accelerate launch -q --use_fsdp --num_processes 16 --num_machines 2 ")
    assert start.endswith("--machine_rank RANK --main_process_ip HOST")
    assert rest.startswith(' --path llm)" --model_name_or_path gpt2 --ac_policy full')


@pytest.mark.parametrize(
    "fields",
    [
        {"optimizer": "prodigy"},  # not a value of `TrainingArguments.optim`
        {"ema": True},
        {"lora_r": 4, "load_in_8bit": True},
        {"frozen": ("embed",)},
        {"peft": {"peft_type": "IA3"}},
    ],
)
def test_spec_that_no_recipe_trains_gets_a_template_command(fields: dict[str, object]) -> None:
    spec = TrainingSpec.of("gpt2", policy="full").edit(**fields)
    launched = spec.edit(launch=Launch("ddp", 2))
    assert training_command(launched, "llm").endswith(
        "YOUR_SCRIPT.py --ac_policy full --per_device_train_batch_size 1"
    )
    assert "prodigy" not in training_command(launched, "llm")
    assert command_for(spec, "causal-lm").startswith("ckpt-ft estimate gpt2 --policy full")
    assert command_for(TrainingSpec.of("a/unet"), "diffusion model") == "ckpt-ft estimate a/unet"


def test_diffusion_and_vision_language_models_use_their_own_recipes() -> None:
    spec = TrainingSpec.of(
        "a/flux", policy="full", lora_r=16, load_in_4bit=True, dtype="bfloat16", mixed_precision="bf16", resolution=768
    )
    assert command_for(spec, "diffusion transformer") == (
        "ckpt-ft recipe diffusion_transformer --pretrained_model_name_or_path a/flux --ac_policy full "
        "--resolution 768 --train_batch_size 1 --mixed_precision bf16 --rank 16 --load_in_4bit --train_data_dir IMAGES"
    )
    assert command_for(spec.edit(dtype="float32"), "diffusion transformer").startswith("ckpt-ft estimate a/flux")
    whole = TrainingSpec.of("a/unet", mixed_precision="bf16", optimizer="adamw_8bit", resolution=512)
    assert command_for(whole, "diffusion U-Net").endswith(
        "--mixed_precision bf16 --use_8bit_adam --train_data_dir IMAGES"
    )
    assert "--train_towers both" in command_for(TrainingSpec.of("a/vlm", images=1), "causal-lm")
    seeing = TrainingSpec.of("a/vlm", lora_r=8, images=1, image_size=(640, 480), train_towers="language")
    assert "YOUR_SCRIPT.py" in training_command(seeing, "llm")
    assert command_for(seeing, "causal-lm") == (
        "ckpt-ft recipe vlm --model_name_or_path a/vlm --ac_policy none --use_peft --max_length 1024 "
        "--per_device_train_batch_size 1 --dtype float32 --optim adamw_torch_fused --lora_r 8 --train_towers language "
        "--dataset_name DATASET"
    )


def test_printed_max_length_includes_the_image_tokens() -> None:
    spec = TrainingSpec.of("a/vlm", images=1)  # 1,024 text tokens follow the image tokens
    assert "--max_length 2394 " in command_for(spec, "causal-lm", 2394)


def test_dpo_and_grpo_use_their_own_recipes() -> None:
    spec = TrainingSpec.of("a/llm", trainer="dpo", trainer_args='{"beta": 0.2, "loss_type": ["sigmoid", "hinge"]}')
    assert command_for(spec, "causal-lm", 64).endswith(
        "recipe dpo --model_name_or_path a/llm --ac_policy none --max_length 64 --per_device_train_batch_size 1 "
        "--dtype float32 --optim adamw_torch_fused --beta 0.2 --loss_type sigmoid hinge --dataset_name DATASET"
    )
    online = spec.edit(trainer="grpo", trainer_args='{"scale_rewards": "none"}', batch_size=8)
    said = command_for(online, "causal-lm", 64)
    assert "recipe grpo " in said
    assert "--scale_rewards none --max_completion_length 63 " in said
    assert "--max_completion_length 512 " in command_for(online, "causal-lm", 2048)
    assert command_for(spec.edit(trainer="sft"), "causal-lm").startswith("ckpt-ft estimate a/llm ")


def test_ulysses_command_sets_the_attention_of_the_model() -> None:
    """Accelerate sets no attention by default, and DeepSpeed refuses one that differs from the model's."""
    spec = TrainingSpec.of("gpt2", launch=Launch("zero3", 2, sp=2))
    assert "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION=sdpa accelerate" in training_command(spec, "llm")
    flash = spec.edit(attn_implementation="flash_attention_2")
    assert "SP_ATTN_IMPLEMENTATION=flash_attention_2 accelerate" in training_command(flash, "llm")


def test_image_classifier_uses_its_own_recipe() -> None:
    spec = TrainingSpec.of("resnet-50", policy="full", batch_size=32, resolution=160, optimizer="sgd")
    assert command_for(spec, "image-classification") == (
        "ckpt-ft recipe image_classification --model_name_or_path resnet-50 --ac_policy full --resolution 160 "
        "--per_device_train_batch_size 32 --dtype float32 --optim sgd --dataset_name DATASET"
    )
    assert command_for(spec.edit(lora_r=4), "image-classification").startswith("ckpt-ft estimate resnet-50")


@pytest.mark.parametrize("recipe", ["llm", "image_classification"])
def test_recipe_parser_reads_the_printed_command(recipe: str) -> None:
    from ckpt_ft.training.arguments import ACArguments
    from ckpt_ft.training.classification import VisionArguments
    from ckpt_ft.training.models import ModelArguments
    from ckpt_ft.training.run_arguments import RunArguments, parse_args
    from ckpt_ft.training.text import DataArguments

    more = {"lora_r": 4, "load_in_4bit": True, "double_quant": True, "seq_length": 64} if recipe == "llm" else {}
    spec = TrainingSpec.of("a/model", policy="full", accumulation=3, max_grad_norm=0.5, dtype="bfloat16", **more)
    words = shlex.split(training_command(spec, recipe, "rows"))[3:]
    data = DataArguments if recipe == "llm" else VisionArguments
    model, _, memory, run = parse_args((ModelArguments, data, ACArguments, RunArguments), words)
    assert (model.dtype, model.lora_r, model.load_in_4bit) == ("bfloat16", more.get("lora_r"), bool(more))
    assert (run.gradient_accumulation_steps, run.max_grad_norm, memory.ac_policy) == (3, 0.5, "full")
