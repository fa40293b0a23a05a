"""Every flag of the commands, every name that other tools have for it, and every key of a YAML file stays readable."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from ckpt_ft.cli import app as cli
from ckpt_ft.spec.settings import known_as, names_of, typed_as

MODEL = (
    "--seq-length --accumulation --max-grad-norm --resolution --aspect-ratio-buckets --train-text-encoder "
    "--encode-each-step --frames --audio-seconds --images --image-size --max-pixels --longest-side --train-towers "
    "--mixed-precision --bf16 --fp16 --lora --lora-r --use-peft --lora-targets --attn-implementation --dora "
    "--peft-config --freeze --packing --padding --ema --double-quant --quant-storage --load-in-8bit --lora-dropout"
)
GPU = "--device --gpu-memory --gpu-like --dtype --load-in-4bit --prepare-kbit"
ONE_LAUNCH = "--optimizer --launch --processes --machines --link --alloc-conf"
OPTIONS = {
    "check": f"--policy --batch-size --seed {MODEL}",
    "estimate": f"--policy --batch-size --capacity --budget --html --snapshot --perfetto --json "
    f"{GPU} {ONE_LAUNCH} {MODEL}",
    "explain": f"--policy --batch-size {GPU} {MODEL}",
    "max-batch": f"--policy --budget --margin --max-batch-size --json {GPU} {ONE_LAUNCH} {MODEL}",
    "plan": "--budget --batch-size --target --dataset --margin --max-batch-size --gpus --jobs --output --plot --html "
    f"--fresh --write-launch --json {GPU} {ONE_LAUNCH} {MODEL}",
    "gpus": "--json",
    "kohya": "--output",
    "merge": "--output --base --dtype",
    "models": "--json",
    "recipe": "--path",
    "report": "--html",
}
SYNONYMS = (  # the first is the command line's
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
def test_every_command_has_the_options_it_had(command: str) -> None:
    commands: Any = typer.main.get_command(cli.app)
    found = {name for parameter in commands.commands[command].params for name in parameter.opts}
    assert set(OPTIONS[command].split()) - found == set()


@pytest.mark.parametrize("row", SYNONYMS)
def test_a_flag_is_read_under_every_name(row: str) -> None:
    first, *others = row.split()
    for name in (first, *others):
        assert {first, *others} <= set(names_of(name))
        assert typed_as(name) == first.replace("_", "-")
        assert known_as(name, [others[-1], "unrelated"]) == others[-1]
        assert known_as(name.replace("_", "-"), [first]) == first
