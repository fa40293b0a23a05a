"""`--config file.yaml` of an estimate: a recipe's own file, TRL's and axolotl's say what their flags would."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ckpt_ft.cli import app as cli
from ckpt_ft.cli.training_file import with_file
from ckpt_ft.errors import UserError

HERE = Path(__file__).parent
FILES = HERE / "training_files"
RECIPES = HERE.parents[1] / "recipes"
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99, "max_position_embeddings": 2048,
}  # fmt: skip
SAYS = {
    "axolotl_qlora": (
        "NousResearch/Meta-Llama-3-8B --batch-size 2 --accumulation 4 --seq-length 4096 --packing --dtype bfloat16 "
        "--bf16 --optimizer adamw_8bit --lora 32 --lora-dropout 0.05 --load-in-4bit --double-quant --prepare-kbit "
        "--attn-implementation flash_attention_2 --policy full"
    ),
    "axolotl_lora_8bit": (
        "TinyLlama/TinyLlama_v1.1 --batch-size 4 --seq-length 2048 --dtype float16 --fp16 --optimizer adamw_8bit "
        "--lora 16 --lora-targets q_proj,v_proj --load-in-8bit --prepare-kbit"
    ),
    "axolotl_full": (
        "Qwen/Qwen2.5-0.5B --batch-size 1 --accumulation 8 --seq-length 1024 --max-grad-norm 0.5 --dtype bfloat16 "
        "--bf16 --optimizer adamw_fused --attn-implementation flex_attention --policy full"
    ),
    "trl_sft_lora": (
        "Qwen/Qwen2.5-0.5B-Instruct --batch-size 4 --accumulation 2 --seq-length 2048 --packing --dtype bfloat16 "
        "--bf16 --optimizer adamw_fused --lora 32 --attn-implementation sdpa --policy full"
    ),
    "trl_sft_full": (
        "HuggingFaceTB/SmolLM2-360M --batch-size 8 --seq-length 512 --bf16 --optimizer adamw --policy full"
    ),
}  # fmt: skip


def estimated(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["ckpt-ft", "estimate", *words, "--json"])
    assert cli._main() == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", SAYS)
def test_a_file_is_the_flags_that_say_the_same(name: str) -> None:
    recipe = ["--recipe", "trl"] if name.startswith("trl") else []
    found = with_file(["estimate", "--config", str(FILES / f"{name}.yaml"), *recipe, "--device", "t4"])
    assert " ".join(found) == f"estimate {SAYS[name]} --device t4"


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
        found = with_file(["estimate", f"--config={path}"])
        content = yaml.safe_load(path.read_text())
        assert found[1] in (content.get("model_name_or_path"), content.get("pretrained_model_name_or_path"))
        assert found[found.index("--policy") + 1] == content["ac_policy"]


def test_a_vision_language_recipes_file_says_its_towers_and_pixels(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model_name_or_path: m\nuse_peft: true\nmax_pixels: 100352\nac_policy: full@language\n")
    start = "m --batch-size 8 --seq-length 2048 --max-pixels 100352 --train-towers language --optimizer adamw_fused"
    found = with_file(["estimate", "--config", str(file), "--image-size", "640x480"])
    assert " ".join(found[1:]) == f"{start} --lora 16 --policy full@language --images 1 --image-size 640x480"
    found = with_file(["plan", "--config", str(file), "--dataset", "rows.jsonl"])  # whose rows have the images
    assert " ".join(found[1:]) == f"{start} --lora 16 --dataset rows.jsonl"


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
    assert "adamw_8bit" in with_file(["estimate", "--config", str(file)])
    said = "note: paged_adamw_8bit: its state is counted on the card; paging moves it to the host when memory runs out"
    assert capsys.readouterr().err == f"{said}\n"


def test_a_pair_is_two_images(capsys: pytest.CaptureFixture[str]) -> None:
    words = with_file(["estimate", "--config", str(RECIPES / "diffusion" / "sdxl_dreambooth_lora_12gb.yaml")])
    assert words[words.index("--batch-size") + 1] == "2"
    assert "note: with_prior_preservation: a batch of 1 is 2 images" in capsys.readouterr().err


def test_zeros_say_something(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model_name_or_path: m\nuse_peft: true\nlora_dropout: 0.0\nmax_grad_norm: 0\nbf16: false\n")
    words = with_file(["estimate", "--config", str(file)])
    assert words[words.index("--lora-dropout") + 1] == "0.0"
    assert words[words.index("--max-grad-norm") + 1] == "0"
    assert "--bf16" not in words


def test_what_is_not_read_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(FILES / "axolotl_full.yaml")
    with_file(["plan", "--config", path])
    assert capsys.readouterr().err == ""
    with_file(["plan", "--config", str(FILES / "axolotl_qlora.yaml")])
    assert "datasets, output_dir, lora_alpha, learning_rate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words", "says"),
    [
        ("model_name_or_path: m\nbf16: maybe", [], "bf16: 'maybe' is neither true nor false"),
        ("model_name_or_path: m\npacking: [1]", [], "packing: '[1]' is neither true nor false"),
        ("max_length: 8", [], "it names no model (model_name_or_path, pretrained"),
        ("base_model: m\noptimizer: lion", [], "optimizer lion is not modelled (adamw_torch, "),
        (
            "base_model: m",
            ["--recipe", "torchtune"],
            "--recipe torchtune: no such kind of file (llm, vlm, image_class",
        ),
        (
            "model_name_or_path: m\nbeta: 0.1",
            [],
            "a step on preferences, with its reference, is TRL's own; its recipe",
        ),
        ("- a", [], "expected 'flag: value' lines, found list"),
    ],
)
def test_bad_files(text: str, words: list[str], says: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as refused:
        with_file(["estimate", "--config", str(file), *words])
    assert says in str(refused.value)
    with pytest.raises(UserError, match="of which file"):
        with_file(["estimate", "--recipe", "llm"])
