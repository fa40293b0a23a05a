"""The very command that runs what a plan picked: `accelerate launch` with its launch, and a recipe with its flags."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from ckpt_ft.spec.launch import Launch
from ckpt_ft.spec.launch_file import sharing_options
from ckpt_ft.spec.training_spec import TrainingSpec

if TYPE_CHECKING:
    from ckpt_ft.planning.results import Plan

_KIND = {"ddp": "--multi_gpu", "fsdp2": "--use_fsdp"}  # others are DeepSpeed's
_OPTIMS = {"adamw": "adamw_torch", "adamw_fused": "adamw_torch_fused", "adamw_8bit": "adamw_bnb_8bit"}
_OTHERS = "YOUR_SCRIPT.py"  # what no recipe trains


def command(plan: Plan, spec: TrainingSpec, dataset: str, config_file: str) -> str:
    """The command of the plan's pick, as one line for a shell.

    config_file: that its launch was written to, if it was; flags say it otherwise.
    """
    launch = plan.best.launch
    assert launch is not None, "one process needs no launch"
    words = ["accelerate", "launch", "-q", *(["--config_file", config_file] if config_file else launch_words(launch))]
    if launch.machines > 1:
        words += ["--machine_rank", "RANK", "--main_process_ip", "HOST"]
    script, flags = _recipe(plan, spec, dataset)
    return f"{shlex.join(words)} {script} {shlex.join(flags)}"


def launch_words(launch: Launch) -> list[str]:
    """The options of `accelerate launch` that say what its configuration file would."""
    values: dict[str, Any] = {
        "num_processes": launch.processes,
        "num_machines": launch.machines,
        "mixed_precision": launch.mixed_precision,
        **next(iter(sharing_options(launch).values()), {}),
    }
    words = [_KIND.get(launch.strategy, "--use_deepspeed")]
    for name, value in values.items():
        words += [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    return words


def _recipe(plan: Plan, spec: TrainingSpec, dataset: str) -> tuple[str, list[str]]:
    """A script and its flags."""
    from ckpt_ft.workloads.batches import class_for, task_of
    from ckpt_ft.workloads.model_config import read_config

    best = plan.best
    own = ["--ac_policy", best.policy, "--per_device_train_batch_size", str(best.batch)]
    config = read_config(plan.model)
    named = (config.get("architectures") or [""])[0] or class_for(config.get("model_type", ""))
    task = task_of(named)
    pictured = spec.data.images or (dataset and "vision_config" in config)
    unknown = (
        spec.quantisation.load_in_8bit or spec.adapter.peft or spec.model.frozen or spec.optimizer.ema
    )  # to the recipe
    if task is None or task.kind != "language model" or pictured or unknown:
        return _OTHERS, own
    flags = ["--model_name_or_path", plan.model, *own, "--max_length", str(spec.data.tokens)]
    flags += ["--dtype", spec.precision.dtype]
    if spec.precision.mixed_precision != "no":
        flags.append(f"--{spec.precision.mixed_precision}")
    if best.accumulation > 1:
        flags += ["--gradient_accumulation_steps", str(best.accumulation)]
    if spec.adapter.lora_r:
        flags += ["--use_peft", "--lora_r", str(spec.adapter.lora_r)]
        flags += ["--lora_target_modules", *spec.adapter.lora_targets] if spec.adapter.lora_targets else []
        flags += [] if spec.adapter.lora_dropout is None else ["--lora_dropout", str(spec.adapter.lora_dropout)]
    asked = {
        "use_dora": spec.adapter.use_dora,
        "load_in_4bit": spec.quantisation.load_in_4bit,
        "use_bnb_nested_quant": spec.quantisation.double_quant,
        "packing": spec.data.rows == "packed",
    }
    flags += [f"--{name}" for name, given in asked.items() if given]
    if spec.quantisation.quant_storage != "uint8":
        flags += ["--bnb_4bit_quant_storage", spec.quantisation.quant_storage]
    if spec.kernels.attn_implementation:
        flags += ["--attn_implementation", spec.kernels.attn_implementation]
    if spec.optimizer.max_grad_norm != 1.0:  # a Trainer's own
        flags += ["--max_grad_norm", f"{spec.optimizer.max_grad_norm:g}"]
    if spec.optimizer.name != "none":
        flags += ["--optim", _OPTIMS.get(spec.optimizer.name, spec.optimizer.name)]
    flags += ["--dataset_name", dataset or "DATASET"]
    return '"$(ckpt-ft recipe --path llm)"', flags
