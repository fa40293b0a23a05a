"""The commands that run a spec: `accelerate launch` with its launch, and a recipe with its flags."""

from __future__ import annotations

import shlex
from typing import Any

from .ecosystem import OPTIM_OF_TRAINER
from .flags import words_of
from .launch import Launch
from .launch_file import sharing_options
from .training_spec import TrainingSpec

_KIND = {"ddp": "--multi_gpu", "fsdp2": "--use_fsdp"}  # the others are DeepSpeed's
_OTHERS = "YOUR_SCRIPT.py"  # for a step that no recipe trains
# Fields that recipes/llm.py has as flags with a value, by the names of those flags.
_LLM_VALUES = {
    "quant_storage": "bnb_4bit_quant_storage",
    "attn_implementation": "attn_implementation",
    "max_grad_norm": "max_grad_norm",
}
# Fields that it has as switches.
_LLM_SWITCHES = {
    "use_dora": "use_dora",
    "load_in_4bit": "load_in_4bit",
    "double_quant": "use_bnb_nested_quant",
}


def training_command(spec: TrainingSpec, recipe: str, dataset: str = "", config_file: str = "") -> str:
    """The command that trains as `spec` says, as one line for a shell.

    Args:
        recipe: the name of the recipe that trains the model; "" for none, so that a script of the user's own is left
            open.
        dataset: a Hub id or a local file; "" leaves it open.
        config_file: an accelerate configuration that has the launch; "" for the options that say the same.
    """
    launch = spec.launch.launch
    setting = f"PYTORCH_CUDA_ALLOC_CONF={shlex.quote(spec.host.alloc_conf)} " if spec.host.alloc_conf else ""
    words = [] if launch is None else ["accelerate", "launch", "-q"]
    if launch is not None:
        words += ["--config_file", config_file] if config_file else launch_words(launch)
        if launch.machines > 1:
            words += ["--machine_rank", "RANK", "--main_process_ip", "HOST"]
    if recipe == "llm" and llm_trains(spec):
        script = ["ckpt-ft", "recipe", "llm"] if launch is None else []
        path = "" if launch is None else ' "$(ckpt-ft recipe --path llm)"'
        start = setting + shlex.join([*words, *script])
        return f"{start}{path} {shlex.join(llm_words(spec, dataset))}"
    runner = words or ["python"]
    return setting + shlex.join([*runner, _OTHERS, *_memory_words(spec)])


def command_for(spec: TrainingSpec, kind: str) -> str:
    """The command that trains as `spec` says if a recipe does, else the one that estimates it.

    kind: of workload, "language model" for example.
    """
    if kind == "language model" and llm_trains(spec):
        return training_command(spec, "llm")
    return shlex.join(["ckpt-ft", "estimate", *words_of(spec)])


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


def llm_trains(spec: TrainingSpec) -> bool:
    """Whether recipes/llm.py has flags for all that `spec` asks for."""
    optimizer = spec.optimizer.name
    other = (
        spec.quantisation.load_in_8bit,
        spec.quantisation.prepare_kbit,
        spec.adapter.peft,
        spec.model.frozen,
        spec.model.train_towers,
        spec.optimizer.ema,
        spec.data.images,
    )
    return not any(other) and (optimizer == "none" or optimizer in OPTIM_OF_TRAINER)


def llm_words(spec: TrainingSpec, dataset: str = "") -> list[str]:
    """The flags of recipes/llm.py for `spec`."""
    words = ["--model_name_or_path", spec.model.name, *_memory_words(spec)]
    words += ["--max_length", str(spec.data.tokens), "--dtype", spec.precision.dtype]
    if spec.precision.mixed_precision != "no":
        words.append(f"--{spec.precision.mixed_precision}")
    if spec.data.accumulation > 1:
        words += ["--gradient_accumulation_steps", str(spec.data.accumulation)]
    if spec.adapter.lora_r:
        words += ["--use_peft", "--lora_r", str(spec.adapter.lora_r)]
        words += ["--lora_target_modules", *spec.adapter.lora_targets] if spec.adapter.lora_targets else []
        words += [] if spec.adapter.lora_dropout is None else ["--lora_dropout", str(spec.adapter.lora_dropout)]
    words += [f"--{flag}" for key, flag in _LLM_SWITCHES.items() if spec.get(key)]
    words += ["--packing"] if spec.data.rows == "packed" else []
    default = TrainingSpec()
    for key, flag in _LLM_VALUES.items():
        if spec.get(key) != default.get(key):
            value = spec.get(key)
            words += [f"--{flag}", f"{value:g}" if isinstance(value, float) else str(value)]
    if spec.optimizer.name != "none":
        words += ["--optim", OPTIM_OF_TRAINER[spec.optimizer.name]]
    return [*words, "--dataset_name", dataset or "DATASET"]


def _memory_words(spec: TrainingSpec) -> list[str]:
    return ["--ac_policy", spec.policy, "--per_device_train_batch_size", str(spec.data.batch_size)]
