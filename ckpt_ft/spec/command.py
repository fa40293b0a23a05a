"""Builds the commands that run a spec: `accelerate launch` with its launch, and a recipe with its flags."""

from __future__ import annotations

import json
import shlex
from typing import Any

from ckpt_ft.spec.launch import OFFLOADS, Launch, parallelism

from .flags import words_of
from .optimizers import OFFLOADING, OPTIM_OF_TRAINER
from .training_spec import TrainingSpec, declared

_KIND = {"ddp": "--multi_gpu", "fsdp2": "--use_fsdp"}  # all others use DeepSpeed
_OTHERS = "YOUR_SCRIPT.py"  # placeholder if no recipe trains the step
# The fields of a spec that a recipe has flags for, in the order in which a command has them.
_TRAINER = (
    "batch_size", "accumulation", "eval_batch_size", "eval_accumulation_steps", "dtype", "mixed_precision", "compile",
    "attn_implementation", "experts_implementation", "max_grad_norm", "optimizer", "use_liger_kernel",
    "liger_kernel_config",
)  # fmt: skip
_ADAPTER = (
    "lora_r", "lora_targets", "lora_target_parameters", "lora_modules_to_save", "lora_dropout", "use_dora",
    "peft_config", "load_in_4bit", "double_quant", "quant_storage", "rows",
)  # fmt: skip
_DIFFUSION = (
    "resolution", "batch_size", "accumulation", "dtype", "mixed_precision", "lora_r", "lora_dropout", "peft_config",
    "max_grad_norm", "optimizer",
)  # fmt: skip
_FIELDS: dict[str, tuple[str, ...]] = {
    "text": ("task", "seq_length", *_TRAINER, *(key for key in _ADAPTER if key != "rows")),
    "llm": ("seq_length", "rope_scaling", "router_aux_loss_coef", *_TRAINER, *_ADAPTER),
    "vlm": (
        "seq_length", *_TRAINER, *(key for key in _ADAPTER if key != "rows"), "train_towers", "max_pixels",
        "longest_side", "images", "image_size",
    ),
    "dpo": ("seq_length", *_TRAINER, *_ADAPTER, "trainer", "trainer_args"),
    "grpo": ("seq_length", *_TRAINER, *_ADAPTER, "trainer", "trainer_args"),
    "image_classification": ("resolution", *_TRAINER),
    "diffusion_unet": (*_DIFFUSION, "ema"),
    "diffusion_transformer": (*_DIFFUSION, "lora_targets", "load_in_4bit"),
}  # fmt: skip
# Flags that are not called as their field. "": other flags, or the rows of the dataset, say it (see `_flag_words`).
_NAMES = {
    "seq_length": "max_length", "batch_size": "per_device_train_batch_size",
    "accumulation": "gradient_accumulation_steps", "eval_batch_size": "per_device_eval_batch_size",
    "compile": "torch_compile", "optimizer": "optim", "lora_targets": "lora_target_modules",
    "double_quant": "use_bnb_nested_quant", "quant_storage": "bnb_4bit_quant_storage",
    **dict.fromkeys(("mixed_precision", "rows", "images", "image_size", "trainer", "trainer_args"), ""),
}  # fmt: skip
_NAMES_OF_DIFFUSION = {
    **_NAMES, "batch_size": "train_batch_size", "lora_r": "rank", "ema": "use_ema", "dtype": "", "optimizer": "",
    "mixed_precision": "mixed_precision",
}  # fmt: skip
# kind of workload -> recipe
RECIPES = {
    "causal-lm": "llm",
    "image-text-to-text": "vlm",
    "image-classification": "image_classification",
    **dict.fromkeys(("text-classification", "token-classification", "embedding", "reranker"), "text"),
    "diffusion U-Net": "diffusion_unet",
    "diffusion transformer": "diffusion_transformer",
}
# Flags that are always printed, so that the command does not depend on a recipe's defaults.
_ALWAYS = ("batch_size", "dtype", "optimizer")
# Fields that are not flags of a recipe: the model and the policy, which every recipe has, and settings outside of it.
_OUTSIDE = (
    "model", "launch", "launches", "asked", "device", "budget", "host_memory", "alloc_conf",
    "default_seq_length", "strict", "left_out", "task", "num_labels",
)  # fmt: skip


def training_command(spec: TrainingSpec, recipe: str, dataset: str = "") -> str:
    """The shell command that trains as `spec` describes, on one line.

    Args:
        recipe: the name of the recipe that trains the model; "" for a placeholder of the user's own script.
        dataset: a Hub id or a local file; "" for a placeholder.
    """
    launch = spec.launch.launch
    setting = f"PYTORCH_CUDA_ALLOC_CONF={shlex.quote(spec.host.alloc_conf)} " if spec.host.alloc_conf else ""
    words = [] if launch is None else ["accelerate", "launch", "-q"]
    if spec.kernels.compile == "regional":  # TrainingArguments have no flag for it, and the launcher sets the variable
        setting += "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=true " if launch is None else ""
        words += [] if launch is None else ["--dynamo_use_regional_compilation"]
    if launch is not None and (sizes := parallelism(launch, spec.kernels.attn_implementation)):
        # its options for them are for FSDP2 only (accelerate/commands/launch.py)
        sizes = {f"PARALLELISM_CONFIG_{name.upper()}": value for name, value in sizes.items()}
        setting += "".join(f"{k}={v} " for k, v in {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", **sizes}.items())
    if launch is not None:
        words += launch_words(launch)
        if launch.machines > 1:
            words += ["--machine_rank", "RANK", "--main_process_ip", "HOST"]
    if recipe and can_train(recipe, spec):
        start = f'{shlex.join(words)} "$(ckpt-ft recipe --path {recipe})"' if launch else f"ckpt-ft recipe {recipe}"
        return f"{setting}{start} {shlex.join(recipe_words(recipe, spec, dataset))}"
    batch = ["--per_device_train_batch_size", str(spec.data.batch_size)]
    patch = "  # calls cut_cross_entropy.transformers.cce_patch(model)" if spec.kernels.cut_cross_entropy else ""
    return setting + shlex.join([*(words or ["python"]), _OTHERS, "--ac_policy", spec.policy, *batch]) + patch


def recipe_of(spec: TrainingSpec, kind: str) -> str:
    """The recipe that trains a kind of workload, such as "causal-lm"; "" if none does."""
    if spec.trainer.trainer:
        return spec.trainer.trainer if spec.trainer.trainer in _FIELDS else ""
    return "vlm" if spec.data.images else RECIPES.get(kind, "")


def recipe_command(spec: TrainingSpec, kind: str) -> str:
    """The command of the recipe that trains a model of `kind` as `spec` describes; "" if no recipe does."""
    recipe = recipe_of(spec, kind)
    return training_command(spec, recipe) if recipe and can_train(recipe, spec) else ""


def command_for(spec: TrainingSpec, kind: str, tokens: int = 0) -> str:
    """The command that trains as `spec` describes if a recipe supports it, else the command that estimates it.

    tokens: of a sequence, with its images' tokens, and clamped to the model's positions; 0 for those of `spec`.
    """
    trained = spec.edit(seq_length=tokens) if tokens not in (0, spec.data.tokens) else spec
    return recipe_command(trained, kind) or shlex.join(["ckpt-ft", "estimate", *words_of(spec)])


def launch_words(launch: Launch) -> list[str]:
    """Options of `accelerate launch`."""
    values: dict[str, Any] = {
        "num_processes": launch.processes,
        "num_machines": launch.machines,
        "mixed_precision": launch.mixed_precision,
    }
    strategy = "ddp" if launch.ep > 1 else launch.strategy
    if strategy == "fsdp2":
        values |= {
            "fsdp_version": 2,
            "fsdp_activation_checkpointing": False,
            "fsdp_auto_wrap_policy": "NO_WRAP" if launch.wrap is None else "TRANSFORMER_BASED_WRAP",
            "fsdp_cpu_ram_efficient_loading": launch.mixed_precision != "fp8",  # torchao refuses it
            "fsdp_offload_params": launch.offload_params,
            "fsdp_reshard_after_forward": launch.reshard_after_forward,
            "fsdp_state_dict_type": "FULL_STATE_DICT",
            **({"fsdp_transformer_layer_cls_to_wrap": ",".join(launch.wrap)} if launch.wrap else {}),
        }
    elif launch.stage and strategy != "ddp":
        values |= {
            "zero_stage": launch.stage,
            **{f"{name}_device": "cpu" if getattr(launch.zero, name) else "none" for name in OFFLOADS},
            "zero3_init_flag": launch.stage == 3,
            "zero3_save_16bit_model": launch.stage == 3,
        }
    if launch.mixed_precision == "fp8":
        values |= {"fp8_backend": "ao", "fp8_enable_fsdp_float8_all_gather": launch.float8_gather}
    words = [_KIND.get(strategy, "--use_deepspeed")]
    for name, value in values.items():
        words += [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    return words


def can_train(recipe: str, spec: TrainingSpec) -> bool:
    """Whether the recipe has flags for every field of `spec` that is not at its default."""
    launch, mixed, dtype = spec.launch.launch, spec.precision.mixed_precision, str(spec.precision.dtype)
    trained = {*OPTIM_OF_TRAINER, *OFFLOADING.values(), "none"}
    divided = launch is not None and launch.ep > 1 and (recipe != "llm" or spec.adapter.trains)
    if recipe.startswith("diffusion"):
        trained = {"adamw_fused", "adamw_8bit", *OFFLOADING.values()}
        adapts = spec.adapter.lora_r or spec.adapter.peft_config
        dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(mixed, "float32") if adapts else "float32"
    if mixed == "fp8" or divided or spec.optimizer.name not in trained or spec.precision.dtype != dtype:
        return False
    known = {*_FIELDS.get(recipe, ()), *_OUTSIDE, *(["peft"] if spec.adapter.peft_config else [])}  # set by that file
    return all(own.key in known or spec.get(own.key) == own.default for own in declared().values())


def recipe_words(recipe: str, spec: TrainingSpec, dataset: str = "") -> list[str]:
    """The flags of a recipe for `spec`."""
    is_diffusion = recipe.startswith("diffusion")
    words = ["--pretrained_model_name_or_path" if is_diffusion else "--model_name_or_path", spec.model.name]
    words += ["--ac_policy", spec.policy]
    if spec.adapter.lora_r and not is_diffusion:
        words.append("--use_peft")
    if spec.launch.launch is not None and spec.launch.launch.ep > 1:  # such optimizers have no checkpoints
        words += ["--ep_size", str(spec.launch.launch.ep), "--save_only_model"]
    names = _NAMES_OF_DIFFUSION if is_diffusion else {**_NAMES, "seq_length": ""} if recipe == "grpo" else _NAMES
    for key in _FIELDS[recipe]:
        flag, value = names.get(key, key), spec.get(key)
        if value != declared()[key].default or key in _ALWAYS:
            words += _flag_words(key, flag, value)
        elif key == "train_towers":  # without it the recipe trains the language model alone
            words += [f"--{flag}", "both"]
        elif key == "seq_length" and flag:
            words += [f"--{flag}", str(spec.data.tokens)]
    words += _trl_words(spec)
    flag, placeholder = ("--train_data_dir", "IMAGES") if is_diffusion else ("--dataset_name", "DATASET")
    return [*words, flag, dataset or placeholder]


def _trl_words(spec: TrainingSpec) -> list[str]:
    """The flags of a configuration of TRL, which the recipe has all."""
    given = json.loads(spec.trainer.trainer_args or "{}")
    if spec.trainer.trainer == "grpo":  # the sequence is a prompt and a completion, of which TRL sets the length
        given["max_completion_length"] = min(given.get("max_completion_length", 512), spec.data.tokens - 1)
    words = []
    for name, value in given.items():
        texts = [str(one) for one in value] if isinstance(value, list) else [json.dumps(value).strip('"')]
        words += [f"--{name}", *texts] if value is not None else []
    return words


def _flag_words(key: str, flag: str, value: Any) -> list[str]:
    if key == "optimizer" and value in OFFLOADING.values():
        return ["--offload_optimizer", next(what for what, name in OFFLOADING.items() if name == value)]
    if not flag:
        words = {
            "mixed_precision": value,
            "optimizer": "use_8bit_adam" if value == "adamw_8bit" else "",
            "rows": "packing" if value == "packed" else "",
        }
        return [f"--{words[key]}"] if words.get(key) else []
    if key == "optimizer":
        return [] if value == "none" else [f"--{flag}", OPTIM_OF_TRAINER[value]]
    if isinstance(value, tuple):
        return [f"--{flag}", *value]
    if value is True or key == "compile":
        return [f"--{flag}"]
    return [f"--{flag}", f"{value:g}" if isinstance(value, float) else str(value)]
