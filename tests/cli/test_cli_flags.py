"""Every flag of the commands, and every name for it in other tools and in YAML files, stays readable."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from ckpt_ft.cli import main as cli
from ckpt_ft.cli.params import words_in_our_names
from ckpt_ft.errors import UserError
from ckpt_ft.spec.flags import fields_of
from ckpt_ft.spec.settings import known_as, names_of, typed_as
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.workloads.model_config import checkpoint_dtype

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99, "max_position_embeddings": 2048,
}  # fmt: skip

MODEL = (
    "--seq-length --accumulation --max-grad-norm --resolution --aspect-ratio-buckets --train-text-encoder "
    "--encode-each-step --frames --audio-seconds --images --image-size --max-pixels --longest-side --train-towers "
    "--mixed-precision --bf16 --fp16 --lora --lora-r --use-peft --lora-targets --attn-implementation --dora "
    "--peft-config --freeze --packing --padding --ema --double-quant --quant-storage --load-in-8bit --lora-dropout"
)
GPU = "--device --dtype --load-in-4bit --prepare-kbit"
ONE_LAUNCH = "--optimizer --launch --processes --machines --link --alloc-conf"
OPTIONS = {
    "check": f"--policy --batch-size --seed {MODEL}",
    "estimate": f"--policy --batch-size --capacity --budget --host-memory --html --snapshot --perfetto --json "
    f"{GPU} {ONE_LAUNCH} {MODEL}",
    "explain": f"--policy --batch-size {GPU} {MODEL}",
    "max-batch": f"--policy --budget --margin --max-batch-size --json {GPU} {ONE_LAUNCH} {MODEL}",
    "plan": "--budget --host-memory --batch-size --target --dataset --margin --max-batch-size --gpus --jobs --output "
    f"--html --fresh --json {GPU} {ONE_LAUNCH} {MODEL}",
    "calibrate": "",
    "gpus": "--json",
    "models": "--json",
    "recipe": "--path",
    "report": "--html",
}
SYNONYMS = (  # the command line's name comes first
    "policy ac_policy",
    "budget ac_budget",
    "batch_size per_device_train_batch_size train_batch_size micro_batch_size",
    "accumulation gradient_accumulation_steps",
    "seq_length max_length max_seq_length sequence_len cutoff_len",
    "lora_r rank lora_rank",
    "lora_targets lora_target_modules lora_target",
    "dora use_dora peft_use_dora",
    "double_quant use_bnb_nested_quant bnb_4bit_use_double_quant",
    "quant_storage bnb_4bit_quant_storage",
    "packing sample_packing",
    "dtype torch_dtype",
    "optimizer optim",
    "ema use_ema",
    "dataset dataset_name",
    "max_grad_norm gradient_clipping",
)


@pytest.mark.parametrize("command", OPTIONS)
def test_no_command_loses_an_option(command: str) -> None:
    commands: Any = typer.main.get_command(cli.app)
    found = {name for parameter in commands.commands[command].params for name in parameter.opts}
    assert set(OPTIONS[command].split()) - found == set()


@pytest.mark.parametrize("row", SYNONYMS)
def test_flag_is_read_under_every_name(row: str) -> None:
    first, *others = row.split()
    for name in (first, *others):
        assert {first, *others} <= set(names_of(name))
        assert typed_as(name) == first.replace("_", "-")
        assert known_as(name, [others[-1], "unrelated"]) == others[-1]
        assert known_as(name.replace("_", "-"), [first]) == first


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("estimate m --learning_rate 1e-4 --logging_steps=10 --report_to none", "estimate m"),
        ("estimate m --gpus 4 --ctx=4096", "estimate m --processes=4 --seq-length=4096"),
        ("estimate m --bs 2 --4bit --memory 8GB", "estimate m --batch-size=2 --load-in-4bit --device=8GB"),
        ("plan m --gpus 2", "plan m --gpus 2"),
        (
            "estimate m --bf16 True --fp16 False --optim adamw_torch_fused",
            "estimate m --bf16 --optim adamw_torch_fused",
        ),
        ("estimate --model_name_or_path m --gradient_checkpointing True", "estimate --policy=full m"),
        ("plan m --activation_checkpointing False --torch_compile False", "plan m"),
        ("estimate m --torch_compile", "estimate m --torch_compile"),
        ("estimate m --torch_compile_mode default", "estimate m --torch-compile"),
        ("estimate m --lora_target_modules q_proj,v_proj", "estimate m --lora_target_modules q_proj,v_proj"),
        ("estimate m --eval_strategy steps --batch-size 8", "estimate m --batch-size 8 --eval-batch-size=8"),
        ("estimate m --eval_strategy no --do_eval False", "estimate m"),
        ("estimate --lora m", "estimate m --lora 16"),
        ("estimate m --lora --fp16", "estimate m --lora 16 --fp16"),
        ("estimate m --lora 8", "estimate m --lora 8"),
        ("where m --method lora", "where m --method lora"),
        ("estimate m --lora -1", "estimate m --lora -1"),
        ("estimate m --qlora --fp16", "estimate m --lora=16 --load-in-4bit --fp16"),
        ("gpus --json", "gpus --json"),
    ],
)
def test_command_line_of_a_trainer_is_translated(typed: str, ours: str) -> None:
    assert words_in_our_names(typed.split(), cli._switches) == ours.split()


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (
            "estimate m --strict --torch_compile_backend eager",
            "torch_compile_backend: eager: a step is compiled by Inductor",
        ),
        ("estimate m --learning_rat 1", "No such option: --learning_rat; did you mean '--learning_rate'?"),
        ("estimate m --fsdp no_shard", "--fsdp: give --launch fsdp2, zero2 or zero3 with --processes"),
    ],
)
def test_unsupported_trainer_flag_is_refused(typed: str, says: str) -> None:
    with pytest.raises(UserError) as refused:
        words_in_our_names(typed.split(), cli._switches)
    assert says in str(refused.value)


def test_optimizer_names_of_the_trainer_are_translated() -> None:
    for name, ours in (("adamw_torch", "adamw"), ("adamw_torch_fused", "adamw_fused"), ("AdamW", "adamw")):
        assert fields_of({"optimizer": name})["optimizer"] == ours
    with pytest.raises(UserError, match="adafactor does not run under FSDP2"):
        TrainingSpec.of("m", **fields_of({"optimizer": "adafactor", "launch": "fsdp2", "processes": 2}))


def test_dtype_auto_is_the_dtype_of_the_checkpoint(tmp_path: Path) -> None:
    assert checkpoint_dtype("gpt2") == "float32"
    assert checkpoint_dtype("meta-llama/Llama-2-7b-hf") == "float16"
    assert checkpoint_dtype("Qwen/Qwen2.5-0.5B") == "bfloat16"
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "llama", "torch_dtype": "float16"}')
    assert checkpoint_dtype(str(tmp_path)) == "float16"
    file.write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match="dtype auto: nothing says the dtype of"):
        checkpoint_dtype(str(tmp_path))


def test_invalid_number_is_named_with_its_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ckpt-ft", "plan", "gpt2", "--seq-length", "abc"])
    with pytest.raises(UserError, match=r"--seq-length.*'abc'"):
        cli._main()
