"""One flag, many names: those that TRL, transformers, diffusers, axolotl and LLaMA-Factory have for what we ask.

The command line and the recipes' parser read every name of a row as the one that they have themselves.
"""

from __future__ import annotations

from collections.abc import Collection

SYNONYMS = (  # the first is the command line's
    ("policy", "ac_policy"),
    ("budget", "ac_budget"),
    ("batch_size", "per_device_train_batch_size", "train_batch_size", "micro_batch_size"),
    ("accumulation", "gradient_accumulation_steps"),
    ("seq_length", "max_length", "max_seq_length", "sequence_len", "cutoff_len"),
    ("lora_r", "rank", "lora_rank"),
    ("lora_targets", "lora_target_modules", "lora_target"),
    ("dora", "use_dora", "peft_use_dora"),
    ("double_quant", "use_bnb_nested_quant", "bnb_4bit_use_double_quant"),
    ("quant_storage", "bnb_4bit_quant_storage"),
    ("packing", "sample_packing"),
    ("dtype", "torch_dtype"),
    ("optimizer", "optim"),
    ("ema", "use_ema"),
    ("dataset", "dataset_name"),
    ("max_grad_norm", "gradient_clipping"),
)
_ROWS = {name: row for row in SYNONYMS for name in row}


def names_of(name: str) -> tuple[str, ...]:
    """All names of the flag `name`, itself among them; dashes are underscores."""
    plain = name.replace("-", "_")
    return _ROWS.get(plain, (plain,))


def known_as(name: str, known: Collection[str]) -> str:
    """What the flag `name` is called among `known`; itself where it is there, or where none of its names is."""
    plain = name.replace("-", "_")
    return plain if plain in known else next((other for other in names_of(plain) if other in known), name)


def typed_as(name: str) -> str:
    """What the command line calls the flag `name`, with dashes."""
    return names_of(name)[0].replace("_", "-")
