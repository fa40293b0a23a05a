"""Other libraries' settings: the table names settings that exist, and a live Trainer's are read by it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from transformers import BitsAndBytesConfig, TrainingArguments

from ckpt_ft.errors import UserError
from ckpt_ft.spec.ecosystem import OPTIM_OF_TRAINER, OPTIMIZERS, TABLE, Modelled, NoEffect, Refused, entry_of, value_of
from ckpt_ft.spec.flags import flags
from ckpt_ft.spec.trainer import spec_of_arguments


def test_every_entry_is_a_flag_or_says_why_not() -> None:
    known = {*flags(), "dataset"}  # the last is an option of `plan`
    for library, entries in TABLE.items():
        for name, entry in entries.items():
            if isinstance(entry, (NoEffect, Refused)):
                assert entry.why, (library, name)
            else:
                assert (entry.flag if isinstance(entry, Modelled) else entry) in known, (library, name)


def test_the_settings_of_transformers_exist() -> None:
    arguments = {field.name for field in dataclasses.fields(TrainingArguments)}
    loading = {
        "activation_checkpointing",
        "torch_dtype",
        "dtype",
        "attn_implementation",
    }  # of some versions; from_pretrained's
    quantised = set(BitsAndBytesConfig().to_dict())
    assert set(TABLE["transformers"]) <= arguments | loading | quantised


def test_the_settings_of_trl_exist() -> None:
    trl = pytest.importorskip("trl")
    known = {
        field.name
        for kind in (trl.SFTConfig, trl.ModelConfig, trl.ScriptArguments, trl.DPOConfig)
        for field in dataclasses.fields(kind)
    }
    assert set(TABLE["trl"]) - {"max_seq_length"} <= known  # the older name of max_length


def test_optimizers_are_those_of_transformers() -> None:
    from transformers.training_args import OptimizerNames

    known = {name.value for name in OptimizerNames}
    assert set(OPTIM_OF_TRAINER.values()) <= known
    assert {OPTIMIZERS[name] for name in OPTIM_OF_TRAINER.values()} == set(OPTIM_OF_TRAINER)
    assert "prodigy" not in known  # so that no command is printed with it


def test_values_have_other_names() -> None:
    assert value_of("batch_size", 4) == ("batch_size", 4)
    entry = entry_of("axolotl", "flash_attention")
    assert entry is not None
    assert value_of(entry, True) == ("attn_implementation", "flash_attention_2")
    assert entry_of("transformers", "no_such_setting") is None
    with pytest.raises(UserError, match="optimizer lion_32bit is not modelled"):
        value_of(TABLE["transformers"]["optim"], "lion_32bit")
    with pytest.raises(UserError, match="TRL's own"):
        value_of(TABLE["trl"]["beta"], 0.1)


def test_a_live_trainers_arguments_are_read(tmp_path: Path) -> None:
    args = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=3, gradient_accumulation_steps=4, max_grad_norm=0.5, optim="sgd",
        bf16=True, use_cpu=True, report_to="none",
    )  # fmt: skip
    args.gradient_checkpointing = True
    spec = spec_of_arguments(args)
    assert (spec.data.batch_size, spec.data.accumulation) == (3, 4)
    assert (spec.optimizer.name, spec.optimizer.max_grad_norm) == ("sgd", 0.5)
    assert (spec.precision.mixed_precision, spec.policy) == ("bf16", "none")
    plain = TrainingArguments(str(tmp_path), optim="lion_32bit", use_cpu=True, report_to="none")
    assert spec_of_arguments(plain, "fp16").precision.mixed_precision == "fp16"
    assert spec_of_arguments(plain).optimizer.name == "adamw_fused"
    plain.max_grad_norm = None
    assert spec_of_arguments(plain).optimizer.max_grad_norm == 0.0
