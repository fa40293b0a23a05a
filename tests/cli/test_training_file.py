"""`--config file.yaml` of an estimate: a recipe's own file, TRL's and axolotl's say what their flags would."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ckpt_ft.cli import app as cli
from ckpt_ft.errors import UserError
from ckpt_ft.spec.flags import fields_of, words_of
from ckpt_ft.spec.training_file import read_training_file
from ckpt_ft.spec.training_spec import TrainingSpec

HERE = Path(__file__).parent
FILES = HERE / "training_files"
RECIPES = HERE.parents[1] / "recipes"
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99, "max_position_embeddings": 2048,
}  # fmt: skip
LLM = "read with the defaults of recipes/llm.py; --recipe trl reads it with those of TRL"
SAYS = {
    "axolotl_qlora": (
        "NousResearch/Meta-Llama-3-8B --policy full --batch-size 2 --seq-length 4096 --accumulation 4 --packing "
        "--dtype bfloat16 --bf16 --lora 32 --lora-dropout 0.05 --load-in-4bit --double-quant --prepare-kbit "
        "--optimizer adamw_8bit --attn-implementation flash_attention_2"
    ),
    "axolotl_lora_8bit": (
        "TinyLlama/TinyLlama_v1.1 --batch-size 4 --seq-length 2048 --dtype float16 --fp16 --lora 16 "
        "--lora-targets q_proj,v_proj --load-in-8bit --prepare-kbit --optimizer adamw_8bit"
    ),
    "axolotl_full": (
        "Qwen/Qwen2.5-0.5B --policy full --seq-length 1024 --accumulation 8 --dtype bfloat16 --bf16 "
        "--max-grad-norm 0.5 --attn-implementation flex_attention"
    ),
    "trl_sft_lora": (
        "Qwen/Qwen2.5-0.5B-Instruct --policy full --batch-size 4 --seq-length 2048 --accumulation 2 --packing "
        "--dtype bfloat16 --bf16 --lora 32 --lora-targets all-linear --attn-implementation sdpa --trainer sft"
    ),
    "trl_sft_full": (
        "HuggingFaceTB/SmolLM2-360M --policy full --batch-size 8 --seq-length 512 --bf16 --optimizer adamw "
        "--trainer sft"
    ),
}


def spec_of(path: Path | str, recipe: str = "", **typed: Any) -> TrainingSpec:
    """What `ckpt-ft estimate --config` with the flags `typed` asks for."""
    read = read_training_file(str(path), recipe)
    return TrainingSpec.of(read.model, **fields_of({**read.flags, **typed}))


def estimated(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["ckpt-ft", "estimate", *words, "--json"])
    assert cli._main() == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", SAYS)
def test_a_file_is_the_flags_that_say_the_same(name: str) -> None:
    spec = spec_of(FILES / f"{name}.yaml", "trl" if name.startswith("trl") else "", device="t4")
    assert " ".join(words_of(spec)) == f"{SAYS[name]} --device t4"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SAYS)
def test_the_files_have_estimates(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = estimated(monkeypatch, capsys, "--config", str(FILES / f"{name}.yaml"), "--device", "h100")
    assert answer["headroom"] > 0


def test_every_configuration_of_the_recipes_is_read() -> None:
    for path in [
        *RECIPES.glob("llm/*.yaml"),
        *RECIPES.glob("diffusion*/*.yaml"),
        *RECIPES.glob("vision/*.yaml"),
        *RECIPES.glob("vlm/*.yaml"),
    ]:
        spec = spec_of(path)
        content = yaml.safe_load(path.read_text())
        assert spec.model.name in (content.get("model_name_or_path"), content.get("pretrained_model_name_or_path"))
        assert spec.policy == content["ac_policy"]


def test_a_vision_language_recipes_file_says_its_towers_and_pixels(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model_name_or_path: m\nuse_peft: true\nmax_pixels: 100352\nac_policy: full@language\n")
    start = "m --policy full@language --train-towers language --batch-size 8 --seq-length 2048"
    found = words_of(spec_of(file, image_size="640x480"))
    assert " ".join(found) == f"{start} --images 1 --image-size 640x480 --max-pixels 100352 --lora 16"
    read = read_training_file(str(file), rows_have_images=True)
    assert "images" not in read.flags


def test_the_command_line_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "config.json"
    model.write_text(json.dumps(LLAMA))
    file = tmp_path / "run.yaml"
    file.write_text(f"model_name_or_path: {model}\nmax_length: 16\nper_device_train_batch_size: 2\nuse_peft: true\n")
    flags = ("--seq-length", "16", "--batch-size", "2", "--lora", "16")
    typed = estimated(monkeypatch, capsys, str(model), *flags)
    assert estimated(monkeypatch, capsys, "--config", str(file)) == typed
    assert estimated(monkeypatch, capsys, "--config", str(file), "--batch-size", "3")["batch_size"] == 3


def test_a_paged_optimizer_is_said_to_be_counted_on_the_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model_name_or_path: m\noptim: paged_adamw_8bit\n")
    read = read_training_file(str(file))
    assert read.flags["optimizer"] == "adamw_8bit"
    said = "paged_adamw_8bit: its state is counted on the card; paging moves it to the host when memory runs out"
    assert read.notes == (said, LLM)


def test_a_pair_is_two_images() -> None:
    read = read_training_file(str(RECIPES / "diffusion" / "sdxl_dreambooth_lora_12gb.yaml"))
    assert read.flags["batch_size"] == 2
    assert "with_prior_preservation: a batch of 1 is 2 images" in read.notes


def test_zeros_say_something(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model_name_or_path: m\nuse_peft: true\nlora_dropout: 0.0\nmax_grad_norm: 0\nbf16: false\n")
    spec = spec_of(file)
    assert (spec.adapter.lora_dropout, spec.optimizer.max_grad_norm, spec.precision.mixed_precision) == (
        0.0,
        0.0,
        "no",
    )


def test_what_is_not_read_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read_training_file(str(FILES / "axolotl_full.yaml")).unread == ()
    unread = read_training_file(str(FILES / "axolotl_qlora.yaml")).unread
    assert unread[:4] == ("datasets", "output_dir", "lora_alpha", "learning_rate")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    file = tmp_path / "run.yaml"
    file.write_text(f"model_name_or_path: {tmp_path}\nmax_length: 16\nlearning_rate: 1\noptim: paged_adamw_32bit\n")
    monkeypatch.setattr(sys, "argv", ["ckpt-ft", "estimate", "--config", str(file), "--json"])
    assert cli._main() == 0
    notes = capsys.readouterr().err.splitlines()
    assert notes[0].startswith("note: paged_adamw_32bit: its state is counted on the card")
    assert notes[1:] == [f"note: {LLM}", f"note: not read of {file}: learning_rate"]


def test_every_command_with_a_spec_reads_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """explain and max-batch have no flag for an entry that every file sets: the optimizer, the batch size."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    file = tmp_path / "run.yaml"
    file.write_text(f"model_name_or_path: {tmp_path}\nmax_length: 16\nper_device_train_batch_size: 2\noptim: sgd\n")
    for command, says in (("explain", "2 of 2 blocks"), ("max-batch", "under 'none' on t4"), ("check", "same")):
        device = [] if command == "check" else ["--device", "t4"]
        monkeypatch.setattr(sys, "argv", ["ckpt-ft", command, "--config", str(file), *device])
        assert cli._main() == 0
        assert says in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "recipe", "says"),
    [
        ("model_name_or_path: m\nbf16: maybe", "", "bf16: 'maybe' is neither true nor false"),
        ("model_name_or_path: m\npacking: [1]", "", "packing: '[1]' is neither true nor false"),
        ("max_length: 8", "", "it names no model (model_name_or_path, pretrained"),
        ("base_model: m\noptimizer: lion", "", "optimizer lion is not modelled (adamw_torch, "),
        (
            "base_model: m",
            "torchtune",
            "--recipe torchtune: no such kind of file (llm, vlm, image_class",
        ),
        (
            "model_name_or_path: m\nbeta: 0.1\nactivation_checkpointing: maybe",
            "",
            "activation_checkpointing: 'maybe' is",
        ),
        ("- a", "", "expected 'flag: value' lines, found list"),
    ],
)
def test_bad_files(text: str, recipe: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as refused:
        read_training_file(str(file), recipe)
    assert says in str(refused.value)
    monkeypatch.setattr(sys, "argv", ["ckpt-ft", "estimate", "--recipe", "llm"])
    with pytest.raises(UserError, match="of which file"):
        cli._main()
