"""A host with too little memory for offloading is refused before anything is loaded."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt_ft.errors import UserError, run
from ckpt_ft.memory.gpus import find_gpu
from ckpt_ft.training import host_memory

sys.path.insert(0, str(Path(__file__).parents[2]))
from recipe_scripts import load_recipe

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512,
}  # fmt: skip
BLOCK = 4 * (4 * 128 * 128 + 3 * 128 * 256)  # bytes of a block's matrices in fp32


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags for a model without weights, so that loading it would fail."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr(host_memory, "current_gpu", lambda: find_gpu("rtx-4090"))
    return [
        "--model_name_or_path", str(tmp_path), "--output_dir", str(tmp_path / "out"), "--max_length", "64",
        "--max_grad_norm", "0", "--use_cpu",
    ]  # fmt: skip


def set_free_memory(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    monkeypatch.setattr(host_memory, "_CGROUP", Path("/nowhere"))


@pytest.mark.parametrize(
    ("more", "environment", "least"),
    [
        (["--ac_policy", "full,swap:4", "--use_peft", "--lora_r", "4"], {}, 4 * BLOCK),
        (["--ac_policy", "offload"], {}, 1),
        (["--offload_optimizer", "states"], {}, 4 * 4 * 4 * BLOCK // 4),
        ([], {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}, 4 * 4 * BLOCK),
    ],
    ids=["swap", "offload", "optimizer", "zero"],
)
def test_too_little_host_memory_is_refused(
    more: list[str], environment: dict[str, str], least: int, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    said = host_memory.check_host_memory
    flags = [*flags, *more]
    set_free_memory(10**9, monkeypatch)
    said(flags, "llm")  # there is enough memory
    set_free_memory(least - 1, monkeypatch)
    with pytest.raises(UserError, match=r"GiB|MiB|KiB|bytes") as error:
        said(flags, "llm")
    assert "of host memory are needed" in str(error.value)
    assert "\n" not in str(error.value)


def test_recipe_exits_with_code_2(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_free_memory(BLOCK, monkeypatch)
    recipe = load_recipe("llm")
    with pytest.raises(SystemExit) as ended:
        run(lambda: recipe.main([*flags, "--ac_policy", "full,swap:4", "--use_peft", "--lora_r", "4"]))
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert "--ac_policy full,swap:4" in said
    assert said.count("\n") == 1


def test_cgroup_limits_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_free_memory(10**12, monkeypatch)
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
    assert host_memory.free_host_bytes() == 10**12
    files: dict[str, Any] = {"memory.max": 1000, "memory.current": 700, "memory.stat": "anon 300\ninactive_file 400\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(str(text))
    assert host_memory.free_host_bytes() == 700  # the file cache can be reclaimed
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory.free_host_bytes() == 10**12


def test_value_that_is_no_yaml_is_text() -> None:
    values = host_memory._values(["--dataset_name", "*", "--learning_rate", "1.0e-3", "--sep==", "--bf16"])
    assert values == {"dataset_name": "*", "learning_rate": 1e-3, "sep": "=", "bf16": True}
