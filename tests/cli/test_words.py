"""Command lines as people type them, without the tool's own vocabulary."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from ckpt_ft.cli import main as cli
from ckpt_ft.cli.named import unpacked
from ckpt_ft.cli.params import words_in_our_names
from ckpt_ft.cli.words import hear
from ckpt_ft.errors import UserError
from ckpt_ft.workloads.load import task_with_labels
from ckpt_ft.workloads.model_config import find_model

ROOT = Path(__file__).parents[2]
LORA, QLORA = {"lora_r": 16}, {"lora_r": 16, "load_in_4bit": True}


@pytest.mark.parametrize(
    ("typed", "command", "model", "flags"),
    [
        ("llama 8b lora 24gb", "", "llama 8b", {**LORA, "device": "24gb"}),
        ("can qwen2.5 7b fit on 24 GB?", "", "qwen2.5 7b", {"device": "24 GB"}),
        ("qwen3 8b qlora on a 12gb card", "", "qwen3 8b", {**QLORA, "device": "12gb"}),
        ("llama3.1:8b qlora 3060", "", "llama3.1:8b", {**QLORA, "device": "3060"}),
        ("qwen3 8b q4_k_m gguf", "", "qwen3 8b", {"load_in_4bit": True}),
        ("llama 3 8b 8-bit dpo", "", "llama 3 8b", {"load_in_8bit": True, "trainer": "dpo"}),
        ("meta-llama/Llama-3.1-8B qlora 4090", "", "meta-llama/Llama-3.1-8B", {**QLORA, "device": "4090"}),
        ("A100-SXM4-40GB llama 8b", "", "llama 8b", {"device": "A100-SXM4-40GB"}),
        ("full fine-tuning sd 1.5 rtx 4070 ti super", "", "sd 1.5", {"device": "rtx 4070 ti super"}),
        ("llama 8b full finetune two 4090s", "", "llama 8b", {"device": "2x 4090"}),
        ("llama 8b 8xh100 fsdp", "", "llama 8b", {"device": "8x h100", "launch": "fsdp2"}),
        ("gpt2 T4 x2", "", "gpt2", {"device": "2x T4"}),
        ("llama 3 8b on 2 gpus with ddp", "", "llama 3 8b", {"processes": 2, "launch": "ddp"}),
        (
            "llama 8b 8 h100s zero 3 seq len 4k batch 4", "", "llama 8b",
            {"device": "8x h100", "launch": "zero3", "seq_length": 4096, "batch_size": 4},
        ),
        ("phi 4 4090", "", "phi 4", {"device": "4090"}),  # the 4 is the model's
        ("smollm2 135m t4", "", "smollm2 135m", {"device": "t4"}),  # no card of 135 MB
        ("bge m3", "", "bge m3", {}),  # no Apple M3
        ("bert classifier t4", "", "bert", {"device": "t4", "task": "text-classification"}),
        ("bert token classification", "", "bert", {"task": "token-classification"}),
        ("vit classifier", "", "vit", {}),  # a classifier already, of images
        ("gpt2, llama 8b", "", "gpt2, llama 8b", {}),
        ("smallest gpu for llama 3 8b", "where", "llama 3 8b", {}),
        ("whisper-small on google colab", "", "whisper-small", {"device": "t4"}),
        ("llama 8b lora colab a100-40gb", "", "llama 8b", {**LORA, "device": "a100-40gb"}),
        ("Qwen3-0.6B gradient checkpointing", "", "Qwen3-0.6B", {"policy": "full"}),
        ("largest batch size bert t4", "max-batch", "bert", {"device": "t4"}),
        ("max-batch-size gpt2", "max-batch", "gpt2", {}),
        ("batch gpt2", "max-batch", "gpt2", {}),
        ("longest context qwen3-0.6b 3060", "max-length", "qwen3-0.6b", {"device": "3060"}),
        ("max-context Qwen3-0.6B", "max-length", "Qwen3-0.6B", {}),
        ("max-seq-len Qwen3-0.6B", "max-length", "Qwen3-0.6B", {}),
        ("context length gpt2", "max-length", "gpt2", {}),
        ("context length 8k gpt2", "", "gpt2", {"seq_length": 8192}),
        ("how long can my sequence be with gpt2 on 12gb", "max-length", "gpt2", {"device": "12gb"}),
        ("sequence classification bert", "", "bert", {"task": "text-classification"}),
        ("how many samples fit gpt2 t4", "max-batch", "gpt2", {"device": "t4"}),
        ("bert text classifier with 10 labels", "", "bert", {"num_labels": 10, "task": "text-classification"}),
        ("multilingual stuff for llama 3 8b", "", "llama 3 8b", {}),  # plain words beside a family are left out
        ("nemotron 8b", "", "nemotron 8b", {}),  # no other model of 8b
        ("llama guard 8b", "", "llama guard 8b", {}),
        ("gpt-neo 1.3b", "", "gpt-neo 1.3b", {}),  # no OPT of 1.3b
        ("llama 4 scout", "", "llama 4 scout", {}),  # no Phi-4
        ("save memory gpt2", "plan", "gpt2", {}),
        ("gpt2 out of memory t4", "plan", "gpt2", {"device": "t4"}),
        ("which policy gpt2 t4", "plan", "gpt2", {"device": "t4"}),
        ("which gpu for llama 8b", "where", "llama 8b", {}),
        ("what batch size can I use for gpt2 on a 3060", "max-batch", "gpt2", {"device": "3060"}),
        ("mixtral 8x7b qlora h100", "", "mixtral 8x7b", {**QLORA, "device": "h100"}),
        ("best llm for 16gb gpu", "", "", {"device": "16gb"}),
        ("how many tokens can I train with gpt2 on t4", "max-length", "gpt2", {"device": "t4"}),
        ("which model can I fine-tune on a 3060", "", "", {"device": "3060"}),
        ("what can I train with 24 GB of VRAM?", "", "", {"device": "24 GB"}),
        ("what is the biggest model for 48gb", "", "", {"device": "48gb"}),
        ("gemma 2 9b qlora r=64 bs=2", "", "gemma 2 9b", {**QLORA, "lora_r": 64, "batch_size": 2}),
        ("deepseek r1 distill 8b lora rank 8", "", "deepseek r1 distill 8b", {"lora_r": 8}),  # r1 is no rank
        ("mixtral 8x7b 2 a100 80gb", "", "mixtral 8x7b", {"device": "2x a100 80gb"}),
        ("llama 3 8b on 4 a100", "", "llama 3 8b", {"device": "4x a100"}),
        ("bert on a cpu", "", "bert", {}),
        (
            "qwen3 8b bf16 max_seq_length=2048 per_device_train_batch_size=4 gradient accumulation 8", "", "qwen3 8b",
            {"seq_length": 2048, "batch_size": 4, "accumulation": 8, "dtype": "bfloat16"},
        ),
        ("sdxl lora 1024x1024", "", "sdxl", {**LORA, "resolution": 1024}),
        ("llama 8b zero3 cpu offload", "", "llama 8b", {"launch": "zero3", "offload": "all"}),
    ],
)  # fmt: skip
def test_words_in_any_order(typed: str, command: str, model: str, flags: dict[str, Any]) -> None:
    heard = hear(typed.split())
    assert (heard.command, heard.model, heard.flags) == (command, model, flags)
    assert hear([typed]) == heard or "/" in typed  # quoted together


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("llama 8b lora 24gb", "estimate 'llama 8b' --lora-r=16 --device=24gb"),
        ("max-context gpt2 --gpu t4", "max-length gpt2 --gpu t4"),
        ("3060", "where --device=3060"),
        ("recommend --gpu 4090", "where --gpu 4090"),
        ("what fits --config my.yaml", "estimate --config my.yaml"),
        ("train.py --learning_rate 1", "dry-run train.py --learning_rate 1"),
        ("max_batch gpt2", "max-batch gpt2"),
    ],
)
def test_words_without_a_command_have_one(typed: str, ours: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._with_command(typed.split()) == shlex.split(ours)
    if not typed.startswith("max_batch"):
        assert capsys.readouterr().err == f"note: ckpt-ft {ours}\n"


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("estimat gpt2", "no command 'estimat'; did you mean 'estimate'"),
        ("llama 99b lora", "no known model is called 'llama 99b'"),
        ("where m2 max", "only cards that run CUDA or ROCm"),
        ("llama 7b on a mac m2 32gb", "only cards that run CUDA or ROCm"),
    ],
)
def test_words_that_name_nothing_are_refused(typed: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        words_in_our_names(cli._with_command(typed.split()), cli._switches)


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("estimate llama 8b --lora --gpu 4090", "estimate 'llama 8b' --lora 16 --gpu 4090"),
        ("estimate --lora llama 8b", "estimate 'llama 8b' --lora 16"),
        ("estimate m --method qlora", "estimate m --lora=16 --load-in-4bit"),
        ("estimate m --peft lora", "estimate m --lora 16"),
        ("estimate m --full", "estimate m"),
        ("where m --method full", "where m --method full"),
        ("estimate m --quantization nf4", "estimate m --load-in-4bit"),
        ("estimate m --quantization int8", "estimate m --load-in-8bit"),
        ("estimate m --bits 4", "estimate m --load-in-4bit"),
        ("estimate m --ddp --gpus 2", "estimate m --launch=ddp --processes=2"),
        ("estimate m --fsdp 'full_shard auto_wrap' --gpus 2", "estimate m --launch=fsdp2 --processes=2"),
        ("estimate --fsdp m", "estimate m --launch=fsdp2"),
        ("estimate m --deepspeed zero2", "estimate m --launch=zero2"),
        ("estimate m --deepspeed ds.json", "estimate m --launch=ds.json"),
        ("estimate m --zero 3", "estimate m --launch=zero3"),
        ("estimate m --task dpo", "estimate m --trainer=dpo"),
        ("estimate m --world-size 4", "estimate m --processes=4"),
        ("estimate m --task ner", "estimate m --task ner"),
        ("estimate m --context 8k", "estimate m --seq-length=8192"),
        ("where m --seq-length 4k,8k", "where m --seq-length 4096,8192"),
        ("estimate m --max_length=2k", "estimate m --max_length=2048"),
        ("estimate m --batch-size auto --gpu t4", "max-batch m --gpu t4"),
        ("estimate m --seq-length max", "max-length m"),
        ("estimate m --policy auto --gpu t4", "plan m --gpu t4"),
        ("estimate longest context gpt2", "max-length gpt2"),
        ("estimate --gpu 3060 --lora", "where --device 3060"),
        ("plan 4090", "where --device 4090"),
        ("max-length --config f.yaml --gpu t4", "max-length --config f.yaml --gpu t4"),
        ("where 2x3090", "where '--device=2x 3090'"),
    ],
)
def test_options_that_people_type(typed: str, ours: str) -> None:
    assert words_in_our_names(shlex.split(typed), cli._switches) == shlex.split(ours)


@pytest.mark.parametrize(
    ("said", "model"),
    [
        ("bert", "bert-base-uncased"),
        ("bert large", "bert-large-uncased"),
        ("bert base cased", "bert-base-cased"),
        ("mixtral 8x7b", "mistralai/Mixtral-8x7B-v0.1"),
        ("distilbert-base-uncased-finetuned-sst-2-english", "distilbert-base-uncased"),
        ("sd 3.5 medium", "stabilityai/stable-diffusion-3.5-medium"),
        ("llama vision 11b", "meta-llama/Llama-3.2-11B-Vision"),
        ("minilm", "sentence-transformers/all-MiniLM-L6-v2"),
    ],
)
def test_models_by_what_people_call_them(said: str, model: str) -> None:
    found = unpacked(said)
    assert found is not None
    assert found.model == model


def test_number_of_labels_makes_a_classifier() -> None:
    assert task_with_labels("bert-base-uncased") == "text-classification"
    assert task_with_labels("google/vit-base-patch16-224") == "image-classification"
    assert task_with_labels("BAAI/bge-reranker-base") == "reranker"  # one label: a cross-encoder
    assert task_with_labels("t5-small") == "seq2seq"


def test_models_of_a_card_are_those_that_it_trains(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._with_command(["models", "rtx", "3060"]) == ["where", "--device", "rtx 3060"]
    assert cli._with_command(["models", "llama"]) == ["models", "llama"]
    assert capsys.readouterr().err == "note: ckpt-ft where --device 'rtx 3060'\n"


QUESTIONS = re.findall(
    r"`(ckpt-ft [^`]+)`", (ROOT / "README.md").read_text().partition("| question |")[2].partition("\n\n")[0]
)


@pytest.mark.parametrize("asked", QUESTIONS)
def test_questions_of_the_readme_are_commands(asked: str) -> None:
    words = cli._with_command(shlex.split(asked)[1:])
    line = [word for word in words_in_our_names(words, cli._switches) if word != "my.yaml"]
    with cli._commands().make_context("ckpt-ft", list(line)) as context:
        name, command, rest = cli._commands().resolve_command(context, list(line))
        with command.make_context(name, rest) as read:
            model = read.params.get("model", "")
    assert name in ("where", "dry-run") or "my.yaml" in asked or find_model(model) or unpacked(model)


def test_readme_answers_a_dozen_questions() -> None:
    assert len(QUESTIONS) >= 12


def test_value_of_another_type_is_one_plain_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["ckpt-ft", "estimate", "gpt2", "--batch-size", "x"])
    with pytest.raises(UserError) as refused:
        cli._main()
    assert str(refused.value) == "Invalid value for '--batch-size': it must be a valid integer: 'x'"
