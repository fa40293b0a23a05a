"""Maps other libraries' settings to our flags, or says why a setting has no effect or is refused.

One table maps a library and the name of its setting to an entry. Flags of the command line, entries of a YAML file and
fields of a live Trainer are all looked up here. An entry is the name of our flag if the setting has the same meaning,
`Modelled` if its values have other names, `NoEffect` if neither memory nor time depends on it, and `Refused` if an
answer would be for a different run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ckpt_ft.errors import UserError


@dataclass(frozen=True)
class Modelled:
    """A setting that equals our flag `flag`, with other names for its values."""

    flag: str
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NoEffect:
    """A setting that affects neither memory nor time, and why."""

    why: str


@dataclass(frozen=True)
class Refused:
    """A setting that is not supported, and why."""

    why: str


Entry = str | Modelled | NoEffect | Refused

# Names of transformers.training_args.OptimizerNames, and axolotl's.
OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_hf": "adamw",
    "adamw_torch_fused": "adamw_fused",
    "adamw_fused": "adamw_fused",
    "adamw_bnb_8bit": "adamw_8bit",
    "adamw_8bit": "adamw_8bit",
    "paged_adamw_8bit": "adamw_8bit",
    "paged_adamw_32bit": "adamw",
    "adafactor": "adafactor",
    "sgd": "sgd",
    "adamw": "adamw",
    "prodigy": "prodigy",
}
PAGED = ("paged_adamw_8bit", "paged_adamw_32bit")
# Our optimizers and their names in `TrainingArguments.optim`; a Trainer does not have the others.
OPTIM_OF_TRAINER = {
    "adamw": "adamw_torch",
    "adamw_fused": "adamw_torch_fused",
    "adamw_8bit": "adamw_bnb_8bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
}
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "auto": "bfloat16"}  # auto: the dtype of most checkpoints
_LEARNING = NoEffect("it changes what is learned, not what is computed")
_RUN = NoEffect("it says where results go or how often they are written")
_ORDER = NoEffect("it changes which rows come when, not how large they are")

TABLE: dict[str, dict[str, Entry]] = {
    "recipes": {
        "ac_policy": "policy",
        "ac_budget": "budget",
        "use_dora": "dora",
        "use_ema": "ema",
        "lora_dropout": "lora_dropout",
        "peft_config": "peft_config",
        "train_towers": "train_towers",
        "max_pixels": "max_pixels",
        "longest_side": "longest_side",
        "image_size": "image_size",
        "images": "images",
        "aspect_ratio_buckets": "aspect_ratio_buckets",
        "audio_seconds": "audio_seconds",
        "packing": "packing",
    },
    "transformers": {
        "per_device_train_batch_size": "batch_size",
        "gradient_accumulation_steps": "accumulation",
        "max_grad_norm": "max_grad_norm",
        "optim": Modelled("optimizer", OPTIMIZERS),
        "bf16": "bf16",
        "fp16": "fp16",
        "torch_dtype": Modelled("dtype", _DTYPES),
        "dtype": Modelled("dtype", _DTYPES),
        "attn_implementation": "attn_implementation",
        "load_in_4bit": "load_in_4bit",
        "load_in_8bit": "load_in_8bit",
        "bnb_4bit_use_double_quant": "double_quant",
        "bnb_4bit_quant_storage": "quant_storage",
        "gradient_checkpointing": Modelled("policy", {"True": "full"}),
        "activation_checkpointing": Modelled("policy", {"True": "full"}),  # its name in newer versions
        "learning_rate": _LEARNING,
        "lr_scheduler_type": _LEARNING,
        "warmup_steps": _LEARNING,
        "weight_decay": _LEARNING,
        "num_train_epochs": NoEffect("it says how many steps there are, not what one costs"),
        "max_steps": NoEffect("it says how many steps there are, not what one costs"),
        "output_dir": _RUN,
        "logging_steps": _RUN,
        "save_steps": _RUN,
        "report_to": _RUN,
        "seed": _ORDER,
    },
    "trl": {
        "max_length": "seq_length",
        "max_seq_length": "seq_length",
        "packing": "packing",
        "use_peft": "use_peft",
        "lora_r": "lora_r",
        "lora_target_modules": "lora_targets",
        "use_bnb_nested_quant": "double_quant",
        "dataset_name": "dataset",
        "beta": Refused("a step on preferences, with its reference, is TRL's own"),
    },
    "peft": {
        "r": "lora_r",
        "lora_dropout": "lora_dropout",
        "use_dora": "dora",
        "lora_alpha": NoEffect("it scales what the adapters add"),
    },
    "axolotl": {
        "micro_batch_size": "batch_size",
        "sequence_len": "seq_length",
        "sample_packing": "packing",
        "peft_use_dora": "dora",
        "optimizer": Modelled("optimizer", OPTIMIZERS),
        "gradient_clipping": "max_grad_norm",
        "flash_attention": Modelled("attn_implementation", {"True": "flash_attention_2"}),
        "flex_attention": Modelled("attn_implementation", {"True": "flex_attention"}),
        "sdp_attention": Modelled("attn_implementation", {"True": "sdpa"}),
        "eager_attention": Modelled("attn_implementation", {"True": "eager"}),
    },
    "llama_factory": {
        "cutoff_len": "seq_length",
        "lora_rank": "lora_r",
        "lora_target": "lora_targets",
        "finetuning_type": NoEffect("adapters are asked for by their rank"),
    },
    "diffusers": {
        "train_batch_size": "batch_size",
        "rank": "lora_r",
        "resolution": "resolution",
        "mixed_precision": "mixed_precision",
        "train_text_encoder": "train_text_encoder",
        "use_8bit_adam": Modelled("optimizer", {"True": "adamw_8bit"}),
        "learning_rate": _LEARNING,
    },
}


def entry_of(library: str, name: str) -> Entry | None:
    """Returns the table's entry for the setting `name` of `library`; None if it is unknown."""
    return TABLE[library].get(name)


def value_of(entry: Entry, value: Any) -> tuple[str, Any]:
    """Returns (our flag, its value) for a modelled setting.

    Raises:
        UserError: the entry is not modelled, or the value is not.
    """
    if isinstance(entry, str):
        return entry, value
    if isinstance(entry, Modelled):
        if str(value) not in entry.values:
            raise UserError(f"{entry.flag} {value} is not modelled ({', '.join(entry.values)})")
        return entry.flag, entry.values[str(value)]
    raise UserError(entry.why)


@lru_cache(maxsize=1)
def _names() -> dict[str, tuple[str, ...]]:
    """Maps every name of a flag to all its names with the same values; our own name is first."""
    found: dict[str, list[str]] = {}
    for library, names in TABLE.items():
        for name, entry in names.items() if library != "peft" else ():  # PEFT's fields are not flags
            plain = entry if isinstance(entry, str) else entry.flag if isinstance(entry, Modelled) else ""
            if plain and not (isinstance(entry, Modelled) and "True" in entry.values):
                found.setdefault(plain, [plain]).append(name)
    rows = [tuple(dict.fromkeys(row)) for row in found.values()]
    return {name: row for row in rows for name in row}


def names_of(name: str) -> tuple[str, ...]:
    """Returns all names of the flag `name`, ours first; dashes are read as underscores."""
    plain = name.replace("-", "_")
    return _names().get(plain, (plain,))


def known_as(name: str, known: Collection[str]) -> str:
    """Returns the name in `known` of the flag `name`; `name` itself if it is in `known` or no name matches."""
    plain = name.replace("-", "_")
    return plain if plain in known else next((other for other in names_of(plain) if other in known), name)


def typed_as(name: str) -> str:
    """Returns the command-line name of the flag `name`, with dashes."""
    return names_of(name)[0].replace("_", "-")
