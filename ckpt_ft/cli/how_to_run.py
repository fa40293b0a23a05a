"""The very command that runs what a plan picked: `accelerate launch` with its launch, and a recipe with its flags."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from ckpt_ft.spec.launch import Launch
from ckpt_ft.spec.launch_file import sharing_options
from ckpt_ft.workloads.settings import Settings

if TYPE_CHECKING:
    from ckpt_ft.planning.results import Plan

_KIND = {"ddp": "--multi_gpu", "fsdp2": "--use_fsdp"}  # others are DeepSpeed's
_OPTIMS = {"adamw": "adamw_torch", "adamw_fused": "adamw_torch_fused", "adamw_8bit": "adamw_bnb_8bit"}
_OTHERS = "YOUR_SCRIPT.py"  # what no recipe trains


def command(plan: Plan, settings: Settings, dataset: str, config_file: str) -> str:
    """The command of the plan's pick, as one line for a shell.

    config_file: that its launch was written to, if it was; flags say it otherwise.
    """
    launch = plan.best.launch
    assert launch is not None, "one process needs no launch"
    words = ["accelerate", "launch", "-q", *(["--config_file", config_file] if config_file else launch_words(launch))]
    if launch.machines > 1:
        words += ["--machine_rank", "RANK", "--main_process_ip", "HOST"]
    script, flags = _recipe(plan, settings, dataset)
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


def _recipe(plan: Plan, settings: Settings, dataset: str) -> tuple[str, list[str]]:
    """A script and its flags."""
    from ckpt_ft.workloads.batches import class_for, task_of
    from ckpt_ft.workloads.model_config import read_config

    best = plan.best
    own = ["--ac_policy", best.policy, "--per_device_train_batch_size", str(best.batch)]
    config = read_config(plan.model)
    named = (config.get("architectures") or [""])[0] or class_for(config.get("model_type", ""))
    task = task_of(named)
    pictured = settings.images or (dataset and "vision_config" in config)
    unknown = settings.load_in_8bit or settings.peft or settings.frozen or settings.ema  # to the recipe
    if task is None or task.kind != "language model" or pictured or unknown:
        return _OTHERS, own
    flags = ["--model_name_or_path", plan.model, *own, "--max_length", str(settings.seq_length)]
    flags += ["--dtype", settings.dtype]
    if settings.mixed_precision != "no":
        flags.append(f"--{settings.mixed_precision}")
    if best.accumulation > 1:
        flags += ["--gradient_accumulation_steps", str(best.accumulation)]
    if settings.lora_r:
        flags += ["--use_peft", "--lora_r", str(settings.lora_r)]
        flags += ["--lora_target_modules", *settings.lora_targets] if settings.lora_targets else []
        flags += [] if settings.lora_dropout is None else ["--lora_dropout", str(settings.lora_dropout)]
    asked = {
        "use_dora": settings.use_dora,
        "load_in_4bit": settings.load_in_4bit,
        "use_bnb_nested_quant": settings.double_quant,
        "packing": settings.rows == "packed",
    }
    flags += [f"--{name}" for name, given in asked.items() if given]
    if settings.quant_storage != "uint8":
        flags += ["--bnb_4bit_quant_storage", settings.quant_storage]
    if settings.attn_implementation:
        flags += ["--attn_implementation", settings.attn_implementation]
    if settings.max_grad_norm != 1.0:  # a Trainer's own
        flags += ["--max_grad_norm", f"{settings.max_grad_norm:g}"]
    if settings.optimizer != "none":
        flags += ["--optim", _OPTIMS.get(settings.optimizer, settings.optimizer)]
    flags += ["--dataset_name", dataset or "DATASET"]
    return '"$(ckpt-ft recipe --path llm)"', flags
