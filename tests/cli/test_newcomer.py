"""First use of the command: short model names, the default dtype, and progress with the time left."""

from __future__ import annotations

import json
import re
import sys
import time
from itertools import chain, repeat
from pathlib import Path

import pytest
from model_configs import LLAMA, write_config
from transformers import ResNetConfig

from ckpt_ft.cli import console, params
from ckpt_ft.cli import main as cli
from ckpt_ft.errors import UserError
from ckpt_ft.export.holders import Holder, holders_table
from ckpt_ft.memory.gpus import GPUS
from ckpt_ft.planning.estimate import estimate
from ckpt_ft.planning.results import Estimate
from ckpt_ft.spec.flags import fields_of, flags
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.workloads.model_config import hub_id, read_config


def test_short_names_of_models_and_dtypes() -> None:
    assert hub_id("sdxl") == "stabilityai/stable-diffusion-xl-base-1.0"
    assert hub_id("Llama-3.1-8B") == "meta-llama/Llama-3.1-8B"
    assert hub_id("Qwen2.5-VL-7B") == "Qwen/Qwen2.5-VL-7B-Instruct"
    assert TrainingSpec.of("gpt2", **fields_of({"dtype": "bf16"})).precision.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"), ({"torch_dtype": "float16"}, "float16"), ({"dtype": "float32"}, ""),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"), ({"dtype": "float8_e4m3fn"}, ""), ({}, ""),
    ],
)  # fmt: skip
def test_directory_and_file_have_the_dtype_that_transformers_loads(
    config: dict[str, object], dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", **config}))
    for name in (str(tmp_path), str(file)):
        assert params._published_precision(name, False) == ({"dtype": dtype} if dtype else {})
        said = f"note: the weights are {dtype}, as transformers loads {name}; --dtype float32 takes twice the bytes\n"
        assert capsys.readouterr().err == (said if dtype else "")


def test_unknown_model_without_the_hub_says_how_to_give_it() -> None:
    with pytest.raises(
        UserError,
        match="no model 'some/new-model': .* the Hub cannot be reached; .*its config.json .`hf download some/n",
    ):
        read_config("some/new-model")


def test_default_precision_is_the_published_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert params._published_precision("meta-llama/Llama-3.1-8B", False) == {"dtype": "bfloat16"}
    assert "the weights are bfloat16" in capsys.readouterr().err
    assert params._published_precision("openai-community/gpt2", False) == {}
    assert capsys.readouterr().err == ""
    assert params._published_precision("flux", True) == {"dtype": "bfloat16", "mixed_precision": "bf16"}
    assert params._published_precision("sdxl", False) == {"mixed_precision": "bf16"}
    assert "the weights are float32, under bf16 autocast" in capsys.readouterr().err


def test_progress_repeats_its_line_and_the_time_left_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line is repeated although no new progress arrives."""
    monkeypatch.setattr(console, "PAUSE", 0.05)
    clock = chain((0.0, 2.0), repeat(12.0))  # the clock starts after one-time work
    monkeypatch.setattr(console, "now", lambda: next(clock))
    with console.progress() as say:
        say("1 of about 9: tracing")
        say("3 of about 9: tracing")
        time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 2
    assert set(lines) == {"12 s: about 30 s left; 3 of about 9: tracing"}
    time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_holders_without_a_module_are_named_by_role() -> None:
    holders = [Holder("", "op", "optimizer", 5, 1), Holder("", "nll_loss", "activations", 4, 1)]
    holders.append(Holder("", "nll_loss_backward", "temporary", 3, 1))
    assert [row[0] for row in holders_table(holders, 12).rows] == ["optimizer state", "loss", "loss"]


def test_several_gpus_are_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ckpt_ft.cli.main import app

    model = write_config(tmp_path, {**LLAMA, "hidden_size": 512, "intermediate_size": 2048})
    words = ["estimate", model, "--device", "t4,h100", "--batch-size", "8", "--seq-length", "512", "--policy", "full"]
    app(words, standalone_mode=False)
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    seconds = {row[1]: float(row[-2]) for row in shown if row[2:3] == ["yes"]}
    assert seconds["t4"] > 2 * seconds["h100"]
    app([*words, "--json"], standalone_mode=False)
    found = json.loads(capsys.readouterr().out)
    assert [one["device"] for one in found] == ["t4", "h100"]
    assert found[0]["capacity"] == GPUS["t4"].memory
    app([*words, "--json", "--dtype", "bfloat16"], standalone_mode=False)
    said = [any("bfloat16 by way of float32" in note for note in one["notes"])
            for one in json.loads(capsys.readouterr().out)]  # fmt: skip
    assert said == [True, False]


def test_if_no_gpu_fits_the_command_to_ask_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ckpt_ft.cli.main import app

    config = tmp_path / "config.json"
    sizes = {"vocab_size": 2048, "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 4096}
    config.write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes}))
    words = ["estimate", str(config), "--device", "t4,l4", "--batch-size", "4096", "--seq-length", "256"]
    app(words, standalone_mode=False)
    shown = capsys.readouterr().out
    asks = f"other methods and policies on these cards: ckpt-ft where {config} --seq-length 256 --device t4,l4\n"
    assert shown.index("fits on none of these cards") < shown.index(asks)


def test_dtype_that_image_recipes_refuse_has_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    from ckpt_ft.cli.estimate import print_advice

    found = Estimate("sdxl", "none", "l4", 1, 1, {"resolution": 64}, 1, 1, {}, {}, [], 1.0, {}, "", 2, 0, "", [])
    print_advice(found, TrainingSpec.of("sdxl", dtype="bfloat16"))
    assert "leave --dtype out for a command" in " ".join(capsys.readouterr().out.split())


def test_batch_of_one_with_batch_norm_has_no_command(tmp_path: Path) -> None:
    """The recipe refuses a batch of 1, which is the default of an estimate."""
    shape = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    ResNetConfig(**shape, architectures=["ResNetForImageClassification"]).save_pretrained(tmp_path)
    alone, pair = (estimate(TrainingSpec.of(str(tmp_path), resolution=32, batch_size=size)) for size in (1, 2))
    assert alone.command == ""
    assert any("--batch-size 2 prints a command" in note for note in alone.notes)
    assert "--per_device_train_batch_size 2" in pair.command
    assert not any("BatchNorm" in note for note in pair.notes)


def test_frozen_weights_are_bfloat16_with_every_lora_flag() -> None:
    seen = []
    command = params.takes_spec()(lambda spec: seen.append(spec.precision.dtype))
    for words in ({"use_peft": True}, {"lora_r": 8}, {}):
        command(model="flux", config="", recipe="", **dict.fromkeys(flags()) | words)
    assert seen == ["bfloat16", "bfloat16", "float32"]


def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    """What `ckpt-ft` prints on both streams."""
    monkeypatch.setattr(sys, "argv", ["ckpt-ft", *words])
    assert cli._main() == 0
    return capsys.readouterr()


def test_words_of_beginners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CKPT_FT_CACHE", str(tmp_path))
    short = ("--seq-length", "16", "--json")
    (tmp_path / "b").mkdir()
    tiny, wider = write_config(tmp_path, LLAMA), write_config(tmp_path / "b", {**LLAMA, "hidden_size": 512})
    two, said = told(monkeypatch, capsys, "estimate", tiny, "--device", "2x RTX 4090", *short)
    assert said.startswith("note: 2 cards share the model by FSDP2; --launch ddp, zero2 or zero3 are others\n")
    same, _ = told(
        monkeypatch, capsys, "estimate", tiny, "--device", "rtx-4090", "--launch", "fsdp", "--processes", "2", *short
    )
    found, named = json.loads(two), json.loads(same)
    assert found["launch"] == named["launch"] == "fsdp2, on 2 GPUs"
    assert found["peak_reserved"] == named["peak_reserved"]
    sized = json.loads(told(monkeypatch, capsys, "estimate", tiny, "--device", "8GB", *short)[0])
    assert (sized["capacity"], sized["seconds"]) == (8 * 10**9, None)
    several = json.loads(told(monkeypatch, capsys, "estimate", f"{tiny},{wider}", "--device", "8GB", *short)[0])
    assert several[0]["peak_reserved"] == sized["peak_reserved"] < several[1]["peak_reserved"]
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"input_ids": [1, 2, 3, 4, 5, 6, 7]}\n{"input_ids": [1, 2]}\n')
    shape = told(monkeypatch, capsys, "estimate", tiny, "--device", "t4", "--dataset", str(rows), "--json")[0]
    assert json.loads(shape)["shape"] == {"seq_length": 7}
    for words, error in (
        (["plan", "gpt2,Qwen3-0.6B"], "one model at a time"),
        (["explain", "gpt2", "--device", "2xt4"], "about one card"),
        (["estimate", "gpt2", "--trainer", "ppo"], r"trainer 'ppo' \(sft, dpo"),
    ):
        monkeypatch.setattr(sys, "argv", ["ckpt-ft", *words])
        with pytest.raises(UserError, match=error):
            cli._main()


def test_help_begins_with_ten_options_and_has_all_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short, whole = (told(monkeypatch, capsys, "estimate", word)[0] for word in ("--help", "--help-all"))
    names = [re.findall(r"^  (--[a-z0-9-]+)", text, re.MULTILINE) for text in (short, whole)]
    assert names[0] == names[1][:11]
    assert {"--device", "--policy", "--lora", "--batch-size"} < {*names[0]}
    assert f"{len(names[1]) - 11} more options" in short
    assert "\nPrecision:\n" in whole


def test_warnings_of_libraries_to_each_other_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    cli._show_warning("old name", FutureWarning, "file", 1)
    cli._show_warning("slow", UserWarning, "file", 1)
    assert capsys.readouterr().err == "warning: slow\n"
