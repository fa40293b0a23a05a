"""The commands `ckpt-ft plan` and `max-batch`: answers, cache, written files, and one-line errors."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from model_configs import write_config

from ckpt_ft.cli import main as cli
from ckpt_ft.cli import planning as planning_commands
from ckpt_ft.errors import NothingFits, UserError, WorkFailed
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.planning import plan as planning
from ckpt_ft.planning.budget import Candidate, MemoryBudget
from ckpt_ft.planning.results import Plan
from ckpt_ft.spec.command import launch_words
from ckpt_ft.spec.launch import Launch, launches_on
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.training.arguments import ACArguments
from ckpt_ft.training.models import ModelArguments
from ckpt_ft.training.run_arguments import RunArguments, parse_args
from ckpt_ft.training.text import DataArguments
from ckpt_ft.units import GIB, parse_bytes
from ckpt_ft.workloads.sample_sizes import Lengths
from ckpt_ft.workloads.workload import Workload

pytestmark = pytest.mark.usefixtures("own_cache")

TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 32,
    "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> str:
    return write_config(tmp_path, TINY)


def run_cli(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["ckpt-ft", *words])
    return cli._main()


def test_plan_prints_the_same_from_the_cache(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", config, "--device", "t4", "--budget", "300MiB", "--seq-length", "65", "--batch-size", "4"]
    assert run_cli(monkeypatch, *words, "--jobs", "1", "--output", str(tmp_path / "plan.json")) == 0
    shown = capsys.readouterr().out
    assert "pick: " in shown
    assert "--max_length 65 --rope_scaling none" in shown  # longer than the configuration's 64 positions
    assert shown.splitlines()[-1].startswith("train it: ckpt-ft recipe llm --model_name_or_path ")
    assert planning.Plan.from_json((tmp_path / "plan.json").read_text()).best.batch == 4

    def refuse_to_plan(*args: object, **kwargs: object) -> None:
        raise AssertionError("the plan is in the cache")

    monkeypatch.setattr(planning, "traced_plan", refuse_to_plan)
    assert run_cli(monkeypatch, *words) == 0
    assert capsys.readouterr().out == shown


def test_cached_plan_of_another_model_name_is_not_used(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two models have equal configurations; a plan names its own model."""
    other = tmp_path / "other.json"
    other.write_text(Path(config).read_text())
    words = [
        "--device", "t4", "--budget", "300MiB", "--seq-length", "16", "--batch-size", "1", "--jobs", "1", "--json",
    ]  # fmt: skip
    monkeypatch.setattr(planning.PlanRequest, "chosen", ["none"])
    for name in (config, str(other)):
        assert run_cli(monkeypatch, "plan", name, *words) == 0
        assert json.loads(capsys.readouterr().out)["model"] == name


def test_max_batch(config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["max-batch", config, "--device", "t4", "--seq-length", "32", "--budget", "200MiB"]
    assert run_cli(monkeypatch, *words, "--policy", "full", "--json") == 0
    full = json.loads(capsys.readouterr().out)
    assert run_cli(monkeypatch, *words, "--json") == 0
    assert full["batch"] > json.loads(capsys.readouterr().out)["batch"] > 0
    assert run_cli(monkeypatch, *words, "--seq-length", "65") == 0
    assert "--max_length 65 --rope_scaling none" in capsys.readouterr().out  # as the recipe expects


def test_max_batch_names_the_smallest_budget_if_no_sample_fits(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command exits with code 1 and names the smallest sufficient budget; 2 MiB less is not enough."""
    words = ["max-batch", config, "--device", "t4", "--seq-length", "32", "--policy", "full"]
    with pytest.raises(
        WorkFailed, match=r"not one sample fits in 140.0 MiB; the smallest budget that would do is"
    ) as e:
        run_cli(monkeypatch, *words, "--budget", "140MiB")
    enough = str(e.value).partition("would do is ")[2].partition(";")[0]
    assert run_cli(monkeypatch, *words, "--budget", enough, "--json") == 0
    assert json.loads(capsys.readouterr().out)["batch"] >= 1
    less = parse_bytes(enough) - 2 * 2**20  # the allocator's segments have 2 MiB
    with pytest.raises(WorkFailed):
        run_cli(monkeypatch, *words, "--budget", str(less))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "t4", "--budget", "100GiB"], r"a budget of 100\.00 GiB: t4 has 14\.56 GiB"),
        (["--device", "t5"], "no GPU 't5'"),
        (["--budget", "many"], "'many' is not an amount of memory"),
        (["--batch-size", "few"], "--batch-size few: give a whole number"),
        (["--device", "cpu"], "the CPU needs a budget"),
        (["--target", "speed", "--budget", "1GiB"], "target 'speed': choose one of"),
    ],
)
def test_bad_plan_flag_fails(words: list[str], message: str, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=message):
        run_cli(monkeypatch, "plan", config, "--seq-length", "32", *words)


def test_dataset_decides_the_lengths(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"input_ids": [1] * length}) + "\n" for length in (8, 8, 8, 90)))
    words = ["plan", config, "--device", "t4", "--budget", "300MiB", "--seq-length", "48", "--batch-size", "4"]
    monkeypatch.setattr(planning.PlanRequest, "chosen", ["none", "full"])
    assert run_cli(monkeypatch, *words, "--jobs", "1", "--json") == 0
    without_dataset = json.loads(capsys.readouterr().out)
    assert run_cli(monkeypatch, *words, "--jobs", "1", "--json", "--dataset", str(data)) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows["data"].startswith("4 rows of 8 to 48 tokens, 18 on average: bytes are those of a batch with the long")
    assert without_dataset["data"] == ""
    none = {
        plan["data"]: next(row for row in plan["candidates"] if row["policy"] == "none")
        for plan in (without_dataset, rows)
    }
    assert none[rows["data"]]["peak"] >= none[""]["peak"]  # the longest row, and an attention mask
    assert "padded to 35 at batch 4" in rows["data"]
    # Other rows of equal count, minimum, maximum and mean length are still another question.
    asked: list[Lengths] = []

    make = planning.traced_plan

    def counted(workload: Workload, *args: Any) -> tuple[planning.Plan, StepTrace]:
        assert workload.lengths is not None
        asked.append(workload.lengths)
        return make(workload, *args)

    monkeypatch.setattr(planning, "traced_plan", counted)
    for lengths in ((8, 8, 9, 48), (8, 8, 8, 90), (8, 8, 9, 48)):
        data.write_text("".join(json.dumps({"input_ids": [1] * length}) + "\n" for length in lengths))
        assert run_cli(monkeypatch, *words, "--jobs", "1", "--json", "--dataset", str(data)) == 0
    assert asked == [Lengths.of((8, 8, 9, 48))]
    assert str(asked[0]) == str(Lengths.of((8, 8, 8, 48)))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"image": "a.png"}, "its rows have images, and only text has lengths; `ckpt-ft dry-run --rows all`"),
        ({"text": "of what"}, "its rows have no length: model .*: no tokenizer can be loaded"),
        ({"input_ids": 7}, "the dataset's 'input_ids' are Value.*; expected a list of tokens in each row"),
        ({"input_ids": []}, "its 'input_ids' are empty; expected a list of tokens"),
    ],
)
def test_dataset_without_lengths_is_refused(
    line: dict[str, object], message: str, config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps(line))
    with pytest.raises(UserError, match=message):
        run_cli(monkeypatch, "plan", config, "--seq-length", "32", "--dataset", str(data))


def test_dataset_of_an_image_classifier_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"input_ids": [1, 2]}))
    with pytest.raises(
        UserError,
        match="padded rows: the batches of microsoft/resnet-50, of kind 'image-classification', hold no text",
    ):
        run_cli(monkeypatch, "plan", "microsoft/resnet-50", "--dataset", str(data))


def test_plan_chooses_the_launch_and_prints_its_command(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(planning.PlanRequest, "chosen", ["none"])
    words = ["plan", config, "--device", "h100", "--seq-length", "32", "--batch-size", "2", "--gpus", "16", "--bf16"]
    assert run_cli(monkeypatch, *words, "--jobs", "1", "--launch", "fsdp2") == 0
    shown = capsys.readouterr().out
    launch = Launch("fsdp2", 16, 2, "bf16")
    words = " ".join(launch_words(replace(launch, reshard_after_forward="reshard_after_forward true" in shown)))
    assert f'accelerate launch -q {words} --machine_rank RANK --main_process_ip HOST "$(ckpt-ft recipe' in shown
    assert "--ac_policy none --max_length 32 --per_device_train_batch_size 2 --dtype float32 --bf16" in shown


def test_recipe_command_has_every_planned_setting(config: str) -> None:
    asked = {"lora_r": 8, "use_dora": True, "rows": "packed", "max_grad_norm": 0.5, "lora_dropout": 0.0}
    settings = TrainingSpec.of(config, **asked, load_in_4bit=True, double_quant=True, seq_length=32)
    launch = Launch("ddp", 2)
    candidate = Candidate("full", 2, 1, 1, 1.0, 4, launch)
    plan = Plan([candidate], MemoryBudget(GIB), config, "t4", "throughput", "", kind="causal-lm")
    words = shlex.split(planning_commands._command(plan, settings, "rows.jsonl").partition('--path llm)"')[2])
    model, data, memory, run = parse_args((ModelArguments, DataArguments, ACArguments, RunArguments), words)
    assert (model.lora_r, model.use_dora, model.lora_dropout, data.max_length, data.packing) == (
        8,
        True,
        0.0,
        32,
        True,
    )
    assert (model.load_in_4bit, model.use_bnb_nested_quant, data.dataset_name) == (True, True, "rows.jsonl")
    assert (run.per_device_train_batch_size, run.gradient_accumulation_steps, run.max_grad_norm) == (2, 4, 0.5)
    assert memory.ac_policy == "full"
    for other in (settings.edit(load_in_4bit=False, double_quant=False, load_in_8bit=True), TrainingSpec.of(ema=True)):
        assert "YOUR_SCRIPT.py --ac_policy full" in planning_commands._command(
            plan, other.edit(model=config), "rows.jsonl"
        )


def test_launch_flags_are_read_by_accelerate_as_they_are_meant() -> None:
    parser = launch_command_parser()
    for launch in (*launches_on(8, mixed_precision="bf16"), Launch("zero3", 4, mixed_precision="bf16")):
        given = _validate_launch_command(parser.parse_args([*launch_words(launch), "script.py"]))[0]
        assert (given.num_processes, given.mixed_precision) == (launch.processes, "bf16")
        kinds = given.multi_gpu, given.use_fsdp, given.use_deepspeed
        assert kinds == (launch.strategy == "ddp", launch.strategy == "fsdp2", bool(launch.stage))
        if launch.strategy == "fsdp2":
            assert str(given.fsdp_reshard_after_forward).lower() == str(launch.reshard_after_forward).lower()
            assert str(given.fsdp_version) == "2"
        if launch.stage:
            assert given.zero_stage == launch.stage


def test_page_of_a_launch_names_it(config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning.PlanRequest, "chosen", ["none"])
    words = ["plan", config, "--device", "t4", "--seq-length", "32", "--batch-size", "2", "--jobs", "1", "--json"]
    file = tmp_path / "plan.html"
    assert run_cli(monkeypatch, *words, "--gpus", "2", "--launch", "ddp", "--html", str(file)) == 0
    assert "each GPU of ddp, on 2 GPUs" in file.read_text()


def test_plans_of_different_links_are_cached_apart(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The words of a launch do not name its link, so the cache key must contain it."""
    monkeypatch.setattr(planning.PlanRequest, "chosen", ["none"])
    words = ["plan", config, "--device", "t4", "--seq-length", "32", "--batch-size", "2", "--jobs", "1", "--json"]
    words += ["--launch", "ddp", "--processes", "2", "--link"]
    seconds = []
    for link in ("20MB", "2GB"):
        assert run_cli(monkeypatch, *words, link) == 0
        seconds.append(json.loads(capsys.readouterr().out)["candidates"][0]["seconds"])
    assert seconds[0] > seconds[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "1"], "1 GPUs: a launch is for at least 2"),
        (["--gpus", "8", "--launch", "fsdp3"], "no strategy 'fsdp3'; did you mean 'fsdp2'"),
        (["--gpus", "8", "--launch", "fsdp2.yaml"], "--gpus 8 and --launch fsdp2.yaml: --gpus chooses among"),
        (["--gpus", "8", "--processes", "8"], "--gpus 8 and --processes 8: --gpus chooses among"),
        (["--gpus", "8", "--machines", "3"], "8 processes on 3 machines"),
        (["--gpus", "8", "--link", "fast"], "--link fast: give the bytes that a GPU sends in a second"),
        (
            ["--launch", "ddp", "--processes", "2", "--link", "0"],
            "--link 0: give the bytes that a GPU sends in a second",
        ),
        (["--launch", "ddp", "--processes", "3", "--machines", "2"], "3 processes on 2 machines"),
        (["--launch", "fsdp2"], "--launch fsdp2: on how many GPUs. give --processes"),
        (["--launch", "fsdp3"], "--launch fsdp3: neither a strategy"),
    ],
)
def test_bad_launch_fails(words: list[str], message: str, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=message):
        run_cli(monkeypatch, "plan", config, "--device", "t4", "--seq-length", "32", *words)


def test_optimizer_offload_is_planned_if_nothing_else_fits(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def make(spec: TrainingSpec, *args: object) -> Plan:
        asked.append(spec.optimizer.name)
        if spec.optimizer.name == "adamw_fused":
            raise NothingFits("no policy fits")
        candidate = Candidate("full", 2, GIB, GIB, 1.0)
        return Plan([candidate], MemoryBudget(GIB), config, "t4", "throughput", "", kind="causal-lm")

    monkeypatch.setattr(planning_commands, "_make", make)
    assert run_cli(monkeypatch, "plan", config, "--device", "t4", "--accumulation", "4") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert asked == ["adamw_fused", "ao_adamw_offload"]
    flags = "--optimizer ao_adamw_offload --max-grad-norm 0"
    assert f"note: nothing fits with the optimizer on the card: this is with {flags}" in out
    assert "--offload_optimizer states" in out.partition("train it: ")[2]
