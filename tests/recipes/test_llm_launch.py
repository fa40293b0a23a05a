"""Launches of recipes/llm.py: by accelerate, on two ranks, under FSDP2 and DeepSpeed, and after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from recipe_scripts import free_port, history
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM
from versions import is_older

from ckpt_ft.errors import UserError
from ckpt_ft.training import models
from ckpt_ft.training.checkpoints import why_incomplete
from ckpt_ft.training.samples.language import make_reference

SMALL = ["--max_steps", "3", "--max_length", "64", "--per_device_train_batch_size", "2", "--logging_steps", "1"]
BIN = Path(sys.executable).parent
pytestmark = pytest.mark.usefixtures("sample")


def start(root: Path, command: list[str], **env: str) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | env
    return subprocess.Popen(
        command, cwd=root, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def finish(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return said


def report(out: Path) -> dict[str, Any]:
    return json.loads((out / "memory_report.json").read_text())


def two_ranks(root: Path, out: Path, *flags: str, script: str = "recipes/llm.py") -> dict[str, Any]:
    torchrun = [str(BIN / "torchrun"), "--nproc_per_node", "2", "--master_port", free_port()]
    said = finish(
        start(root, [*torchrun, *script.split(), *SMALL, "--output_dir", str(out), *flags], ACCELERATE_USE_CPU="1")
    )
    assert said.count("Memory: policy") == 1  # printed by one rank only
    return report(out)


def test_accelerate_launch_writes_reports_and_a_model(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    launch = [str(BIN / "accelerate"), "launch", "--config_file", "accelerate_configs/cpu.yaml", "recipes/llm.py"]
    said = finish(start(root, [*launch, "--ac_policy", "save:attention+matmul", *SMALL, "--output_dir", str(out)]))
    assert "Memory: policy save:attention+matmul" in said
    assert (out / "memory_report.png").stat().st_size > 10_000
    assert "policy save:attention+matmul" in (out / "memory_report.md").read_text()
    (rank,) = report(out)["ranks"]
    model = AutoModelForCausalLM.from_pretrained(out)
    assert rank["at_peak"]["parameters"] == 4 * model.num_parameters()
    assert rank["at_peak"]["optimizer"] >= 2 * 4 * model.num_parameters()  # AdamW's two averages


@pytest.mark.slow
def test_reports_of_two_ranks_under_ddp_and_fsdp2(root: Path, tmp_path: Path) -> None:
    fsdp = ["--fsdp", "--fsdp_config", '{"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}']
    copied = two_ranks(root, tmp_path / "ddp", "--ac_policy", "full")
    script = "tests/recipes/fsdp_on_cpu.py recipes/llm.py"
    automatic = ["--ac_policy", "auto", "--ac_budget", "15MiB"]  # the step of one process would need 19 MiB
    sharded = two_ranks(root, tmp_path / "fsdp", *automatic, *fsdp, script=script)
    assert history(tmp_path / "fsdp") == pytest.approx(history(tmp_path / "ddp"), rel=1e-5)
    for ranks in (copied["ranks"], sharded["ranks"]):
        assert [rank["rank"] for rank in ranks] == [0, 1]
        assert all(rank["peaks"]["backward"]["allocated"] > 2**20 for rank in ranks)
    for whole, half in zip(copied["ranks"], sharded["ranks"], strict=True):
        for category in ("parameters", "optimizer"):
            assert half["at_peak"][category] == pytest.approx(whole["at_peak"][category] / 2, rel=0.01)
    for rank in (*copied["ranks"], *sharded["ranks"]):
        measured = max(figures["allocated"] for figures in rank["peaks"].values())
        assert rank["predicted"]["allocated"] == pytest.approx(measured, rel=1e-3)
    for rank in copied["ranks"]:  # Trainer's DDP searches for unused parameters and copies the logits for that
        measured_peaks = {phase: figures["allocated"] for phase, figures in rank["peaks"].items()}
        assert rank["predicted"]["peaks"] == pytest.approx(measured_peaks, rel=2e-3)
    assert measured <= 15 * 2**20
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "fsdp").num_parameters() > 10**6


@pytest.mark.slow
def test_killed_run_continues_from_its_last_checkpoint(root: Path, llm: ModuleType, tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    flags = ["--use_cpu", *SMALL, "--max_steps", "30", "--save_steps", "3", "--ac_policy", "save:attention"]
    flags += ["--ac_report", "none", "--disable_tqdm", "true", "--output_dir"]
    process = start(root, [sys.executable, "recipes/llm.py", *flags, str(killed)])
    deadline = time.monotonic() + 200
    while not (killed / "checkpoint-3" / "manifest.json").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (killed / "trainer_state.json").exists()  # it did not reach its end
    llm.main([*flags, str(killed), "--resume_from_checkpoint", "latest"])
    llm.main([*flags, str(whole)])
    assert len(history(whole)) == 30
    assert history(killed) == history(whole)


@pytest.mark.slow
def test_signal_to_one_rank_stops_all_ranks_at_one_step(root: Path, tmp_path: Path) -> None:
    """No rank waits in a collective for a stopped one; a resumed run ends like an undisturbed one."""
    launch = [str(BIN / "accelerate"), "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", free_port()]
    flags = [*SMALL, "--max_steps", "6", "--save_steps", "100", "--disable_tqdm", "true", "--ac_report", "none"]
    command = [*launch, "tests/recipes/stopped_rank.py", "recipes/llm.py", str(tmp_path), *flags]
    said = finish(start(root, command, ACCELERATE_USE_CPU="1"))
    assert said.count("stopped by SIGTERM") == 1
    assert [(tmp_path / f"code-{rank}").read_text() for rank in (0, 1)] == ["143", "143"]
    stopped = json.loads((tmp_path / "stopped" / "checkpoint-3" / "trainer_state.json").read_text())
    # the signal arrives in step 2, and the ranks learn of it one step later, without waiting
    assert stopped["global_step"] == 3
    assert why_incomplete(tmp_path / "stopped" / "checkpoint-3") is None
    assert history(tmp_path / "stopped") == history(tmp_path / "whole")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("stopped", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def under_deepspeed(root: Path, stage: int, *runs: list[str]) -> subprocess.Popen[str]:
    config = f"accelerate_configs/deepspeed_zero{stage}.yaml"
    command = [str(BIN / "accelerate"), "launch", "--config_file", config, "--num_processes", "2"]
    command += ["--mixed_precision", "no", "--main_process_port", free_port()]
    command += ["tests/recipes/deepspeed_on_cpu.py", "recipes/llm.py"]
    flags = [*SMALL, "--max_steps", "4", "--disable_tqdm", "true", "--ac_report", "json"]
    for run in runs:
        command += [*flags, *run, "--"]
    return start(root, command)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_trains_and_resumes_to_the_same_weights(root: Path, tmp_path: Path, stage: int) -> None:
    pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install -e '.[deepspeed]'")
    outs = {name: tmp_path / name for name in ("plain", "treated", "resumed")}
    policy = ["--ac_policy", "full,pointwise", "--save_steps", "2", "--output_dir"]
    resume = ["--resume_from_checkpoint", str(outs["treated"] / "checkpoint-2")]
    runs = [["--output_dir", str(outs["plain"])], [*policy, str(outs["treated"])]]
    runs.append([*policy, str(outs["resumed"]), *resume])
    finish(under_deepspeed(root, stage, *runs))
    assert all(len(history(out)) == 4 for out in outs.values())
    plain, *others = (AutoModelForCausalLM.from_pretrained(out).state_dict() for out in outs.values())
    assert len(plain) > 10
    for other in others:
        assert all(torch.equal(other[name], plain[name]) for name in plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "size", "script"),
    [
        ("context_parallel", ["--parallelism_config_cp_size", "2"], "fsdp_on_cpu"),
        ("tensor_parallel", [], "fsdp_on_cpu"),
        ("ulysses", ["--parallelism_config_sp_size", "2"], "deepspeed_on_cpu"),
    ],
)
def test_parallel_ranks_have_the_losses_of_one_process(
    root: Path, llm: ModuleType, tmp_path: Path, config: str, size: list[str], script: str
) -> None:
    """Peaks equal the predictions, except under DeepSpeed's engine."""
    if config == "ulysses":
        pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install -e '.[deepspeed]'")
    command = [str(BIN / "accelerate"), "launch", "--config_file", f"accelerate_configs/{config}.yaml", *size]
    command += ["--num_processes", "2", "--mixed_precision", "no", "--main_process_port", free_port()]
    flags = [*SMALL, "--ac_policy", "full,head", "--packing", "false", "--save_only_model", "true", "--output_dir"]
    flags = ["--disable_tqdm", "true", "--ac_report", "json", *flags]
    gloo = {} if config == "ulysses" else {"ACCELERATE_USE_CPU": "1"}
    command += [f"tests/recipes/{script}.py", "recipes/llm.py", "--find_max_length", "--ac_budget", "2GiB"]
    said = finish(start(root, [*command, *flags, str(tmp_path / "two")], **gloo))
    assert said.count("--find_max_length: longest sequence in 2.00 GiB: predicted 64 tokens") == 1
    llm.main(["--use_cpu", *flags, str(tmp_path / "one")])
    assert len(history(tmp_path / "one")) == 3
    assert history(tmp_path / "two") == pytest.approx(history(tmp_path / "one"), rel=1e-5)
    if config != "ulysses":
        for rank in report(tmp_path / "two")["ranks"]:
            measured = max(figures["allocated"] for figures in rank["peaks"].values())
            assert rank["predicted"]["allocated"] == pytest.approx(measured, rel=2e-3)


def test_expert_parallelism_names_the_transformers_that_has_it(
    llm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "parallel_plans", None)  # as transformers before 5.23
    with pytest.raises(UserError, match="--ep_size 2: expert parallelism needs transformers 5.23 or newer"):
        llm.main(["--use_cpu", *SMALL, "--ep_size", "2", "--output_dir", str(tmp_path)])


@pytest.mark.slow
@pytest.mark.skipif(is_older("transformers", "5.23"), reason="it is refused, as the test above says")
def test_expert_parallel_ranks_have_the_weights_of_one_process(root: Path, llm: ModuleType, tmp_path: Path) -> None:
    """The weights equal those of one process with the whole batch, and each rank's peak is predicted."""
    built_in, corpus = make_reference()
    tokenizer = AutoTokenizer.from_pretrained(built_in)
    tokenizer.save_pretrained(tmp_path / "model")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_local_experts": 4}
    config = MixtralConfig(vocab_size=len(tokenizer), num_attention_heads=4, num_key_value_heads=2, **sizes)
    torch.manual_seed(0)
    MixtralForCausalLM(config).save_pretrained(tmp_path / "model")
    flags = [
        *SMALL,
        "--model_name_or_path",
        str(tmp_path / "model"),
        "--dataset_name",
        str(corpus),
        "--packing",
        "false",
    ]
    flags += ["--ac_policy", "full,head", "--save_only_model", "true", "--disable_tqdm", "true", "--ac_report", "json"]
    command = [str(BIN / "torchrun"), "--nproc_per_node", "2", "--master_port", free_port()]
    command += ["tests/recipes/fsdp_on_cpu.py", "recipes/llm.py", *flags, "--ep_size", "2"]
    finish(start(root, [*command, "--output_dir", str(tmp_path / "two")], ACCELERATE_USE_CPU="1"))
    llm.main(["--use_cpu", *flags, "--per_device_train_batch_size", "4", "--output_dir", str(tmp_path / "one")])
    # the loss of each half of the batch
    assert history(tmp_path / "two") == pytest.approx(history(tmp_path / "one"), rel=1e-3)
    ours, whole = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "one"))
    assert all(torch.allclose(ours[name], whole[name], rtol=1e-4, atol=1e-7) for name in whole)
    for rank in report(tmp_path / "two")["ranks"]:
        measured = max(figures["allocated"] for figures in rank["peaks"].values())
        assert rank["predicted"]["allocated"] == pytest.approx(measured, rel=2e-3)
    refused = start(
        root, [sys.executable, "recipes/llm.py", *flags, "--ep_size", "2", "--output_dir", str(tmp_path / "no")]
    )
    assert "ep 2: give a multiple of tp that divides the processes" in refused.communicate()[0]
