"""Damaged plan.json, memory_report.json and config.json are read, or refused in one line."""

from __future__ import annotations

import html
import json
from pathlib import Path

import pytest
from fuzz import assert_one_line, damaged
from model_configs import write_config
from rich.console import Console

from ckpt_ft.errors import UserError
from ckpt_ft.export.holders import Holder
from ckpt_ft.export.timeline import Timeline
from ckpt_ft.memory.measure.report import MaxBatch, MemoryReport, Prediction, RankMemory
from ckpt_ft.planning.budget import Candidate, MemoryBudget
from ckpt_ft.planning.results import Plan
from ckpt_ft.spec.peft_file import read_peft
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.training.arguments import ACArguments
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.model_config import read_config

HOLDER = Holder("layers.0.mlp", "aten.mm", "activations", 2**20, 3)
PLAN = Plan(
    [Candidate("full", 4, 2**30, 2**30 + 5, 0.5), Candidate("none", 1, 2**29, 2**29, 0.25, 2)],
    MemoryBudget(2**31, 2**20, 2**20), "Llama", "a100-40gb", "throughput", "0123", holders=[HOLDER],
    rejected={"sqrt": "no"},
)  # fmt: skip
PEAKS = {"forward": {"allocated": 2**20}, "backward": {"allocated": 2**21, "reserved": 2**22, "active": 2**21}}
REPORT = MemoryReport(
    {"command": "llm.py", "policy": "full", "shapes": {"input_ids": [2, 32]}, "versions": {"torch": "2.13.0"}},
    [
        RankMemory(
            0,
            "cpu",
            10,
            3,
            PEAKS,
            {"activations": 2**20, "parameters": 2**20},
            [HOLDER],
            0.1,
            predicted=Prediction("cpu", 2**21, {"forward": 2**20}),
        )
    ],
    MaxBatch("cpu", 8, 7),
    Timeline([1, 2], {"activations": [3, 4]}, [(1, "backward")], 2, [HOLDER], "measured"),
    ["a note"],
)

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64, "hidden_act": "silu",
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "pad_token_id": 0,
    "attention_dropout": 0.1, "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip


def test_undamaged_files_are_read(tmp_path: Path) -> None:
    assert Plan.from_json(PLAN.to_json()) == PLAN
    REPORT.to_json(tmp_path / "memory_report.json")
    assert MemoryReport.from_json(tmp_path / "memory_report.json") == REPORT


def test_damaged_plans(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    refused = 0
    for number, content in enumerate(damaged(json.loads(PLAN.to_json()))):
        path.write_bytes(content)
        try:
            settings = ACArguments(ac_policy=str(path))
            assert str(settings.policy) in ("full", "none")
            assert settings.plan is not None
            settings.plan.table()
            assert settings.plan.why
            assert html.escape(settings.plan.why) in settings.plan._repr_html_()
        except UserError as error:
            refused += 1
            assert_one_line(error, number)
    assert refused > 30


def test_damaged_reports(tmp_path: Path) -> None:
    path = tmp_path / "memory_report.json"
    console = Console(quiet=True)
    refused = 0
    for number, content in enumerate(damaged(json.loads(REPORT.to_json()), seed=1)):
        path.write_bytes(content)
        try:
            report = MemoryReport.from_json(path)
            report.print(console)
            report.to_markdown()
            assert html.escape(report.ranks[0].device) in report._repr_html_()
            report.to_html(tmp_path / "report.html")
        except UserError as error:
            refused += 1
            assert_one_line(error, number)
    assert refused > 30


def test_error_names_the_place_in_the_file(tmp_path: Path) -> None:
    document = json.loads(PLAN.to_json())
    document["candidates"][1]["seconds"] = 0
    place = r"plan: not a plan.* \(candidates\.1\.seconds: Input should be greater than 0\)"
    with pytest.raises(UserError, match=place):
        Plan.from_json(json.dumps(document))


def test_damaged_configs(tmp_path: Path) -> None:
    """Each is built or refused quickly; no model of an excessive size is started."""
    path = tmp_path / "config.json"
    refused = 0
    for number, content in enumerate(damaged(LLAMA, seed=2)):
        path.write_bytes(content)
        try:
            load(TrainingSpec.of(str(path), seq_length=16), "cpu")
        except UserError as error:
            refused += 1
            assert_one_line(error, number)
    assert refused > 30


def test_damaged_adapter_configs(tmp_path: Path) -> None:
    path, config = tmp_path / "adapter_config.json", tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA))
    given = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM",
             "rank_pattern": {"q_proj": 2}, "modules_to_save": None, "bias": "none"}  # fmt: skip
    refused = 0
    for number, content in enumerate(damaged(given, seed=6)):
        path.write_bytes(content)
        try:
            load(TrainingSpec.of(str(config), seq_length=16, peft=read_peft(str(path), "--peft-config")), "cpu")
        except UserError as error:
            refused += 1
            assert_one_line(error, number)
    assert refused > 20


@pytest.mark.parametrize("key", ["num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size"])
def test_sizes_are_checked_before_anything_is_built(tmp_path: Path, key: str) -> None:
    path = write_config(tmp_path, {**LLAMA, key: 10**15})
    with pytest.raises(UserError, match=f"{key} 1000000000000000 is no size of a model"):
        load(TrainingSpec.of(path, seq_length=16), "cpu")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"vocab_size": 0}, "vocab_size 0 is no size of a model; at least 1"),
        ({"num_hidden_layers": -1}, "num_hidden_layers -1 is no size of a model; at least 1"),
        ({"head_dim": -1}, "head_dim -1 is no size of a model; at least 0"),
        ({"num_key_value_heads": 3}, "its forward refuses a batch of input_ids, labels: .*size of tensor"),
        ({"attention_dropout": 3}, "its forward refuses a batch of input_ids, labels: .*dropout probability"),
    ],
)
def test_inconsistent_sizes_are_refused(changes: dict[str, int], says: str, tmp_path: Path) -> None:
    path = write_config(tmp_path, LLAMA | changes)
    with pytest.raises(UserError, match=says):
        load(TrainingSpec.of(path, seq_length=16), "cpu").trace(1)


def test_image_sizes_and_numbers_of_experts(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "vit", "architectures": ["ViTModel"], "image_size": "x"}))
    with pytest.raises(UserError, match="image_size 'x' of the model's config is no number of pixels"):
        load(TrainingSpec.of(str(path)), "cpu")
    path.write_text(json.dumps({"num_experts": 16384}))  # Doge has as many
    assert read_config(str(path)) == {"num_experts": 16384}
