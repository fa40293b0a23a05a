"""recipes/llm.py on the built-in sample, run in this process."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest
import torch
from peft import PeftModel
from recipe_scripts import history
from transformers import AutoModelForCausalLM, Trainer

from ckpt_ft.errors import UserError, run

SMALL = [
    "--use_cpu", "--max_steps", "4", "--max_length", "64", "--per_device_train_batch_size", "2", "--logging_steps",
    "1",
]  # fmt: skip
BNB = "bitsandbytes"
QUIET = ["--disable_tqdm", "true", "--ac_report", "none"]


def train(llm: ModuleType, out: Path, *flags: str, quiet: bool = True) -> Path:
    llm.main([*SMALL, *(QUIET if quiet else []), "--output_dir", str(out), *flags])
    return out


@pytest.mark.slow
def test_built_in_run_learns(llm: ModuleType, tmp_path: Path) -> None:
    out = train(
        llm, tmp_path / "out", "--max_steps", "30", "--per_device_train_batch_size", "8", "--max_length", "128"
    )
    losses = history(out)
    assert losses[0] > 7.5  # ln 2048 = 7.62 for an untrained model
    assert sum(losses[-5:]) / 5 < 6.4


def test_policy_keeps_the_losses_of_a_language_model(llm: ModuleType, tmp_path: Path) -> None:
    flags = ["--use_peft", "--lora_r", "4", "--lora_dropout", "0.1", "--lora_target_modules", "all-linear"]
    plain = history(train(llm, tmp_path / "plain", *flags))
    assert len(plain) == 4
    for policy in ("full", "save:attention+matmul"):
        assert history(train(llm, tmp_path / policy, *flags, "--ac_policy", policy, "--ac_check")) == plain


def test_offloaded_optimizer_keeps_the_losses_of_a_language_model(
    llm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU it is AdamW; a resumed run continues with it."""
    monkeypatch.setattr("ckpt_ft.training.flags.require_package", lambda *args: None)
    flags = ["--max_grad_norm", "0", "--save_steps", "2"]
    plain = history(train(llm, tmp_path / "plain", *flags))
    away = [*flags, "--offload_optimizer", "states"]
    assert history(train(llm, tmp_path / "away", *away, "--max_steps", "2")) == plain[:2]
    assert history(train(llm, tmp_path / "away", *away, "--resume_from_checkpoint", "latest")) == plain


def test_saved_weights_and_adapters_load(llm: ModuleType, sample: tuple[Path, Path], tmp_path: Path) -> None:
    full = AutoModelForCausalLM.from_pretrained(train(llm, tmp_path / "full", "--ac_policy", "full"))
    base = AutoModelForCausalLM.from_pretrained(sample[0])
    assert full.state_dict().keys() == base.state_dict().keys()
    assert not torch.equal(full.model.layers[0].mlp.up_proj.weight, base.model.layers[0].mlp.up_proj.weight)

    out = train(
        llm, tmp_path / "lora", "--ac_policy", "full", "--use_peft", "--lora_target_modules", "q_proj", "v_proj"
    )
    adapted = PeftModel.from_pretrained(base, out)
    trained = [name for name, value in adapted.state_dict().items() if "lora_B" in name and value.abs().max() > 0]
    assert len(trained) == 8  # q_proj and v_proj of four layers


@pytest.mark.slow  # tests/planning/test_max_length.py proves lengths by real steps
@pytest.mark.parametrize(("policy", "longest"), [("none", 64), ("auto", 256)])
def test_longest_sequence_is_proved_and_trained(
    llm: ModuleType, tmp_path: Path, policy: str, longest: int,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Rows are packed to the found length; on a CPU, the budget is enforced in training too."""
    step, shapes = Trainer.training_step, []

    def noted(self: Trainer, model: torch.nn.Module, inputs: dict[str, torch.Tensor], *args: object) -> torch.Tensor:
        shapes.append(inputs["input_ids"].shape)
        return step(self, model, inputs, *args)

    monkeypatch.setattr(Trainer, "training_step", noted)
    limits = ["--ac_policy", policy, "--ac_budget", "28MiB", "--packing", "--max_length", "512"]
    train(llm, tmp_path, *limits, "--max_steps", "1", "--find_max_length")
    said = capsys.readouterr().out
    assert f"proved {longest} (2 steps, 0 out of memory)" in said
    assert shapes == [(2, longest)]


def test_evaluation_and_model_card(llm: ModuleType, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": f"Row {i} is text."}) + "\n" for i in range(20)))
    flags = ["--dataset_name", str(data), "--eval_strategy", "steps", "--eval_steps", "2", "--test_split_size", "0.25"]
    out = train(llm, tmp_path / "out", *flags, "--ac_policy", "every:2")
    assert len(history(out, "eval_loss")) >= 2
    assert json.loads((out / "eval_results.json").read_text())["eval_loss"] < 8
    card = (out / "README.md").read_text()
    assert "library_name: transformers" in card


def test_resumed_language_model_run_has_the_same_losses(llm: ModuleType, tmp_path: Path) -> None:
    flags = ["--save_steps", "2", "--ac_policy", "save:attention"]
    losses = history(train(llm, tmp_path / "whole", *flags))
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    (tmp_path / "cut" / "checkpoint-4" / "trainer_state.json").unlink()  # as after a kill during writing
    assert history(train(llm, tmp_path / "cut", *flags, "--resume_from_checkpoint", "latest")) == losses


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ac_policy", "save:atention"], "did you mean 'attention'?"),
        (["--ac_policy", "stages"], "no stages"),
        (["--ac_policy", "full", "--fsdp"], "--fsdp on one process"),
        (["--max_length", "0"], "--max_length 0"),
        (["--max_length", "4096"], "the model has 512 positions"),
        (["--dataset_name", "{tmp}/columns.csv"], "the dataset has the columns body"),
        (["--dataset_name", "{tmp}/empty.jsonl"], "the file is empty"),
        (["--dataset_name", "{tmp}/corrupt.jsonl"], "corrupt.jsonl: "),
        (["--dataset_name", "{tmp}/gone.jsonl"], "no such file"),
        (["--output_dir", "{tmp}/columns.csv"], "cannot be written to"),
        (["--output_dir", "{tmp}/adapter"], "holds adapter_config.json"),
        (["--resume_from_checkpoint", "{tmp}"], "no complete checkpoint"),
        (["--resume_from_checkpoint", "latest"], "no complete checkpoint"),
        (["--model_name_or_path", "{tmp}/nothing", "--dataset_name", "x.txt"], "no tokenizer can be loaded"),
        (["--load_in_4bit"], "add --use_peft for QLoRA"),
        (["--use_peft", "--lora_r", "0"], "--lora_r 0"),
        (["--use_peft", "--lora_target_modules", "nothing"], "--lora_target_modules nothing"),
        (["--find_max_length", "--find_max_batch_size"], "--find_max_length is for a given batch"),
        (
            ["--find_max_length", "--ac_budget", "1MiB", "--ac_policy", "full"],
            "--find_max_length: not even 8 tokens fit",
        ),
        (["--learning_rat", "1"], "did you mean '--learning_rate'?"),
    ],
)
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing:FutureWarning")
def test_invalid_input_of_the_llm_recipe_is_one_line_and_exit_code_2(
    llm: ModuleType, tmp_path: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "columns.csv").write_text("body,other\nx,y\n")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "corrupt.jsonl").write_text('{"text": "a"}\n{"text": "b\n')
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    before = sorted(path.name for path in tmp_path.iterdir())
    argv = [
        *SMALL,
        *QUIET,
        "--output_dir",
        str(tmp_path / "out"),
        *(flag.replace("{tmp}", str(tmp_path)) for flag in flags),
    ]
    with pytest.raises(SystemExit) as caught:
        run(lambda: llm.main(argv))
    assert caught.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert message in line
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "out") == before
    assert not list((tmp_path / "out").rglob("*.safetensors"))


def test_package_of_4_bit_weights_is_named(llm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: find(name, *more) if name != BNB else None)
    with pytest.raises(UserError, match=f"--load_in_4bit needs {BNB}, which is not installed: pip install {BNB}"):
        train(llm, tmp_path, "--load_in_4bit", "--use_peft")


def test_dataset_is_required_with_a_model(llm: ModuleType, sample: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--dataset_name is missing"):
        llm.main([*SMALL, *QUIET, "--output_dir", str(tmp_path), "--model_name_or_path", str(sample[0])])


def test_out_of_memory_prints_suggestions_and_keeps_the_checkpoint(
    llm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = Trainer.training_step

    def third_fails(self: Trainer, *args: object, **kwargs: object) -> torch.Tensor:
        if self.state.global_step == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return step(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "training_step", third_fails)
    with pytest.raises(SystemExit) as caught:
        run(
            lambda: train(
                llm, tmp_path / "out", "--save_steps", "2", "--ac_policy", "save:attention+matmul", quiet=False
            )
        )
    assert caught.value.code == 1
    said = capsys.readouterr().err
    assert "error: out of memory: CUDA out of memory. Tried to allocate 2.00 GiB" in said
    assert "What held the peak:\n" in said
    assert "--ac_policy full\n" in said
    assert "--ac_policy pointwise" not in said  # it saves as much as the current policy
    assert "Traceback" not in said
    monkeypatch.undo()
    flags = ["--save_steps", "2", "--ac_policy", "full", "--resume_from_checkpoint", "latest"]
    assert len(history(train(llm, tmp_path / "out", *flags))) == 4


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[2] / "recipes" / "llm").glob("*.yaml")), ids=lambda p: p.stem
)
def test_llm_yaml_files_parse_and_contain_their_command(llm: ModuleType, root: Path, path: Path) -> None:
    model_args, data_args, ac_args, training_args = llm.parse(["--config", str(path), "--use_cpu"])
    assert model_args.model_name_or_path.count("/") == data_args.dataset_name.count("/") == 1
    assert ac_args.policy is not None
    assert training_args.bf16
    header = "".join(line[1:] for line in path.read_text().splitlines(keepends=True) if line.startswith("#"))
    command = re.sub(r"\\\s+", "", header[header.index("accelerate launch") :]).split()
    config = {
        "llama3.1_8b_full_24gb": ["accelerate_configs/deepspeed_zero3_offload.yaml", "--num_processes", "1"],
        "qwen3_30b_a3b_full_8x80gb": ["accelerate_configs/fsdp2.yaml"],
    }.get(path.stem, ["accelerate_configs/single_gpu.yaml"])
    assert command[2:] == [
        "-q",
        "--config_file", *config,
        "recipes/llm.py",
        "--config", str(path.relative_to(root)),
    ]  # fmt: skip
