"""What stands in place of a model: files, a run's output, adapters, packed copies."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_ft.cli import main as cli
from ckpt_ft.cli.named import named, unpacked
from ckpt_ft.errors import UserError
from ckpt_ft.spec.flags import fields_of
from ckpt_ft.spec.training_file import read_training_file
from ckpt_ft.spec.training_spec import TrainingSpec


@pytest.mark.parametrize(
    ("name", "model", "flags"),
    [
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "Qwen/Qwen2.5-7B-Instruct", {"load_in_4bit": True, "double_quant": True}),
        ("someone/Qwen2.5-7B-Instruct-GPTQ-Int8", "Qwen/Qwen2.5-7B-Instruct", {"load_in_4bit": True}),
        ("TheBloke/Llama-2-7B-GPTQ", "meta-llama/Llama-2-7b-hf", {"load_in_4bit": True}),
        ("unsloth/Qwen3-8B-unsloth-bnb-4bit", "Qwen/Qwen3-8B", {"load_in_4bit": True}),
        ("Qwen/Qwen3-8B-FP8", "Qwen/Qwen3-8B", {"load_in_8bit": True}),
        ("x/gpt-oss-20b-dequantized", "openai/gpt-oss-20b", {}),
        ("models/deep/Qwen3-8B", "Qwen/Qwen3-8B", {}),
        ("models/Llama-2-7b", "meta-llama/Llama-2-7b-hf", {}),
        ("unsloth/llama-3-8b-bnb-4bit", "meta-llama/Meta-Llama-3-8B", {"load_in_4bit": True}),
        ("TheBloke/Mistral-7B-Instruct-v0.2-GGUF", "mistralai/Mistral-7B-Instruct-v0.2", {"load_in_4bit": True}),
    ],
)
def test_packed_copy_is_its_model(
    name: str, model: str, flags: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_ft.cli.named.hub_answers", lambda: False)
    found = unpacked(name)
    assert found is not None
    assert found.model == model
    assert flags.items() <= found.flags.items()
    assert found.notes[0].startswith(f"{name} is answered as {model}")


@pytest.mark.parametrize(
    ("said", "model", "flags"),
    [
        ("llama 3 8b with lora", "meta-llama/Meta-Llama-3-8B", {"lora_r": 16}),
        ("full fine-tuning sd 1.5", "runwayml/stable-diffusion-v1-5", {}),
        ("sd xl lora", "stabilityai/stable-diffusion-xl-base-1.0", {"lora_r": 16}),
        ("llama 3 8b 4bit", "meta-llama/Meta-Llama-3-8B", {"load_in_4bit": True}),
        ("qwen3 8b q4_k_m gguf", "Qwen/Qwen3-8B", {"load_in_4bit": True}),
        ("qwen3 8b 8-bit dpo", "Qwen/Qwen3-8B", {"load_in_8bit": True, "trainer": "dpo"}),
    ],
)
def test_model_by_what_people_say(said: str, model: str, flags: dict[str, int]) -> None:
    found = unpacked(said)
    assert found is not None
    assert (found.model, found.flags) == (model, flags)


def test_known_and_unknown_names_stay() -> None:
    assert unpacked("Qwen/Qwen3-8B") is None
    assert unpacked("nobody/has-this-AWQ") is None


def test_script_and_deepspeed_file_name_the_command_that_takes_them(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="train.py is a script: `ckpt-ft dry-run train.py` predicts"):
        named("train.py")
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 2}}')
    with pytest.raises(UserError, match="is DeepSpeed's: name a model, and give --launch"):
        named(str(file))
    with pytest.raises(UserError, match="GGUF weights cannot be trained: name the model"):
        named("mystery.gguf")


def test_gguf_file_is_its_model_in_4_bits() -> None:
    found = named("Qwen2.5-7B-Instruct-Q4_K_M.gguf")
    assert (found.model, found.flags["load_in_4bit"]) == ("Qwen/Qwen2.5-7B-Instruct", True)
    assert found.notes == ("GGUF weights cannot be trained: answered as Qwen/Qwen2.5-7B-Instruct in 4 bits",)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")  # of TRL's own default
def test_output_of_a_trainer_has_the_settings_of_its_run(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    args = trl.SFTConfig(
        str(tmp_path), per_device_train_batch_size=3, max_length=96, optim="adafactor", bf16=True, use_cpu=True,
        report_to="none", model_init_kwargs={"attn_implementation": "sdpa"},
    )  # fmt: skip
    torch.save(args, tmp_path / "training_args.bin")
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 4, "base_model_name_or_path": "Qwen/Qwen3-0.6B"})
    )
    found = named(str(tmp_path))
    assert found.content is not None
    read = read_training_file(found.file, found.kind, content=found.content)
    spec = TrainingSpec.of(read.model, **fields_of({**read.flags, **found.flags}))
    assert (spec.model.name, spec.trainer.trainer, spec.data.batch_size) == ("Qwen/Qwen3-0.6B", "sft", 3)
    assert (spec.data.seq_length, spec.optimizer.name, spec.adapter.peft) == (
        96,
        "adafactor",
        {"peft_type": "LORA", "r": 4, "base_model_name_or_path": "Qwen/Qwen3-0.6B"},
    )
    assert read.left_out == ()


@pytest.mark.parametrize(
    ("said", "model", "flags"),
    [
        ("bert", "bert-base-uncased", {}),
        ("llama 3.1 8b", "meta-llama/Llama-3.1-8B", {}),
        ("qwen3 8b qlora", "Qwen/Qwen3-8B", {"lora_r": 16, "load_in_4bit": True}),
        ("SDXL LoRA", "stabilityai/stable-diffusion-xl-base-1.0", {"lora_r": 16}),
        ("flux-schnell", "black-forest-labs/FLUX.1-schnell", {}),
        ("sd3.5 medium", "stabilityai/stable-diffusion-3.5-medium", {}),
        ("resnet50", "microsoft/resnet-50", {}),
        ("bge large embedding", "BAAI/bge-large-en", {"task": "embedding"}),
        ("reward model qwen3 0.6b", "Qwen/Qwen3-0.6B", {"trainer": "reward"}),
        (
            "llama-3-8b-Q4_K_M",
            "meta-llama/Meta-Llama-3-8B",
            {"load_in_4bit": True, "double_quant": True},
        ),
    ],
)
def test_model_is_found_by_what_people_say(said: str, model: str, flags: dict[str, Any]) -> None:
    found = unpacked(said)
    assert found is not None
    assert (found.model, found.flags) == (model, flags)
    assert found.notes[0].startswith(f"{said} is answered as {model}")


def test_task_is_no_model() -> None:
    with pytest.raises(UserError, match="name a model too"):
        unpacked("embedding model")


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("kohya.toml", "network_dim = 32\n", "kohya.toml: expected 'flag: value' lines"),
        ("tuner.yaml", "model_family: flux\nlora_rank: 8\n", "tuner.yaml: "),
    ],
)
def test_file_that_names_no_model_is_refused(
    name: str, text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_text(text)
    for words in ([str(tmp_path / name)], ["--config", str(tmp_path / name)]):
        monkeypatch.setattr(sys, "argv", ["ckpt-ft", "estimate", *words])
        with pytest.raises(UserError, match=re.escape(says)):
            cli._main()


def test_pickle_of_a_run_runs_no_code(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "touched",)

    torch.save(Harmful(), tmp_path / "training_args.bin")
    for content in (None, b"PK"):
        if content:
            (tmp_path / "training_args.bin").write_bytes(content)
        with pytest.raises(UserError, match="no saved TrainingArguments"):
            named(str(tmp_path))
    assert not (tmp_path / "touched").exists()


def tiny(tmp_path: Path, **more: object) -> str:
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99, **more,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def estimated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[dict[str, Any], str]:
    monkeypatch.setattr(sys, "argv", ["ckpt-ft", "estimate", *words, "--device", "t4", "--json"])
    assert cli._main() == 0
    said = capsys.readouterr()
    return json.loads(said.out), said.err


def test_file_in_place_of_a_model_is_answered_without_what_excludes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Liger has no kernels for GPT-NeoX here: a file that asks for them is answered without, a command line is not."""
    model = tiny(tmp_path, model_type="gpt_neox", architectures=["GPTNeoXForCausalLM"])
    file = tmp_path / "run.yaml"
    file.write_text(
        f"base_model: {model}\nmicro_batch_size: 2\nsequence_len: 16\nqat: {{weight_dtype: int4}}\nliger_rope: true\n"
        "plugins: [axolotl.integrations.liger.LigerPlugin]\n"
    )
    found, said = estimated(monkeypatch, capsys, str(file))
    assert [line.partition(":")[0] for line in found["left_out"]] == ["qat", "use_liger_kernel, liger_kernel_config"]
    assert said.count("not modelled: ") == 2
    assert found["batch_size"] == 2
    monkeypatch.setattr(sys, "argv", ["ckpt-ft", "max-batch", str(file), "--device", "t4", "--max-batch-size", "4"])
    assert cli._main() == 0
    assert capsys.readouterr().err.count("not modelled: ") == 2
    for words in ([str(file), "--strict"], [model, "--liger"]):
        monkeypatch.setattr(sys, "argv", ["ckpt-ft", "estimate", *words, "--device", "t4"])
        with pytest.raises(UserError, match="qat: ...: the fake|Liger's kernels of 'gpt_neox' are not modelled"):
            cli._main()


def test_file_of_trl_is_answered_without_an_adapter_of_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """TRL's losses read the head's weight: releases that do so refuse an adapter there, and older ones train it."""
    pytest.importorskip("trl")
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model_name_or_path: {tiny(tmp_path)}\nmax_length: 16\nper_device_train_batch_size: 1\nuse_lora: true\n"
        "lora_target_modules: [q_proj, lm_head]\n"
    )
    found, said = estimated(monkeypatch, capsys, str(file))
    (line,) = found["left_out"]
    assert line.startswith("lora_targets: --trainer sft: TRL refuses")
    # of A and B of two layers: two states in float32, and a step
    assert found["at_peak"]["optimizer"] == 4 * (2 * 16 * 32 * 4 + 512), said


def test_file_without_a_number_of_gpus_is_answered_for_the_fewest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model_name_or_path: {tiny(tmp_path)}\nmax_length: 16\nfsdp: full_shard\nper_device_train_batch_size: 2\n"
    )
    found, said = estimated(monkeypatch, capsys, str(file), "--recipe", "llm")
    assert found["launch"] == "fsdp2, on 1 GPU"
    assert "the file does not say on how many GPUs" in said
    assert [line.split()[0] for line in said.splitlines() if line[:1].isdecimal() and "MiB" in line] == [*"1248"]
    found, said = estimated(monkeypatch, capsys, str(file), "--recipe", "llm", "--processes", "4")
    assert found["launch"] == "fsdp2, on 4 GPUs"
    assert "how many GPUs" not in said


def test_launch_file_that_the_model_or_card_cannot_have_is_answered_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """accelerate finds no block of another model's class, and a T4 has no products in 8 bits."""
    model, file = tiny(tmp_path), tmp_path / "launch.yaml"
    options = {"fsdp_version": 2, "fsdp_transformer_layer_cls_to_wrap": "MistralDecoderLayer"}
    config = {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": options, "mixed_precision": "fp8"}
    file.write_text(json.dumps(config))
    file = file.rename(tmp_path / "launch.json")
    asked = model, "--launch", str(file), "--seq-length", "16"
    found, said = estimated(monkeypatch, capsys, *asked)
    assert "not modelled: mixed_precision: mixed precision fp8 on t4" in said
    assert [
        note for note in found["notes"] if "the launch wraps MistralDecoderLayer, which the model does not" in note
    ]
    file.write_text(json.dumps({**config, "mixed_precision": "bf16", "fsdp_config": {"fsdp_version": 2}}))
    assert found["peak_allocated"] == estimated(monkeypatch, capsys, *asked)[0]["peak_allocated"]


def test_ring_around_layers_with_a_state_is_answered_by_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """axolotl passes the state on by its own code, accelerate refuses such models."""
    model, file = tiny(tmp_path, layer_types=["linear_attention", "full_attention"]), tmp_path / "run.yaml"
    sizes = f"base_model: {model}\nmicro_batch_size: 2\nsequence_len: 64\nfsdp: [full_shard]\n"
    file.write_text(f"{sizes}context_parallel_size: 2\n")
    found, said = estimated(monkeypatch, capsys, str(file), "--processes", "2")
    assert "launch, seq_length: launch cp 2: layers that carry a state along the sequence" in said
    file.write_text(sizes.replace("64", "32"))
    assert (
        found["peak_allocated"] == estimated(monkeypatch, capsys, str(file), "--processes", "2")[0]["peak_allocated"]
    )
    with pytest.raises(UserError, match="rows of 32 tokens on each GPU take nearly as much"):
        estimated(monkeypatch, capsys, model, "--cp", "2", "--seq-length", "64")


def test_dtype_auto_of_a_configuration_alone_is_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"model_name_or_path: {tiny(tmp_path)}\ntemplate: qwen\ncutoff_len: 16\nfinetuning_type: full\n")
    found, said = estimated(monkeypatch, capsys, str(file), "--batch-size", "1")
    assert "does not say the dtype of its checkpoint: bfloat16; --dtype changes it" in said
    whole = estimated(monkeypatch, capsys, str(file), "--batch-size", "1", "--dtype", "float32")[0]
    assert found["at_peak"]["parameters"] < 0.6 * whole["at_peak"]["parameters"]


def test_parts_that_an_expression_finds_are_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny(tmp_path, num_hidden_layers=4)
    peaks = {
        part: estimated(monkeypatch, capsys, model, "--seq-length", "16", "--freeze", part)[0]["at_peak"]["optimizer"]
        for part in ("!last:1", "!last:2", "!first:2", r"!layers\.[23]\.")
    }
    matrices = 8 * (4 * 32 * 32 + 3 * 32 * 64)  # two float32 states of each weight
    norms, steps = 2 * 2 * 512, 9 * 512  # the smallest block of memory for each
    assert peaks["!last:1"] == matrices + norms + steps
    assert peaks["!last:2"] == peaks["!first:2"] == peaks[r"!layers\.[23]\."] == 2 * peaks["!last:1"]
    with pytest.raises(UserError, match="frozen part '!nothing': no parameter has it in its name"):
        estimated(monkeypatch, capsys, model, "--freeze", "!nothing")
