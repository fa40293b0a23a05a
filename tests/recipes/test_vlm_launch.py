"""recipes/vlm.py on two ranks, under DDP and FSDP2: the losses of one process, and the predicted peak."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from recipe_scripts import history, load_recipe
from test_llm_launch import two_ranks

BLOCKS = '{"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer", "SiglipEncoderLayer"]}'
SMALL = [
    "--max_steps", "3", "--logging_steps", "1", "--max_length", "2048", "--eval_strategy", "no",
    "--learning_rate", "1e-3", "--train_towers", "both", "--ac_policy", "full@language", "--disable_tqdm", "true",
]  # fmt: skip
LORA = ["--use_peft", "--lora_r", "4", "--lora_dropout", "0"]


@pytest.fixture(scope="module")
def vlm() -> ModuleType:
    return load_recipe("vlm")


@pytest.mark.slow  # three processes
@pytest.mark.parametrize("trained", [[], LORA], ids=["full", "lora"])
@pytest.mark.parametrize("launch", ["ddp", "fsdp2"])
def test_two_ranks_have_the_losses_of_one_process(
    vlm: ModuleType, root: Path, tmp_path: Path, launch: str, trained: list[str]
) -> None:
    alone = ["--use_cpu", "--per_device_train_batch_size", "4", "--ac_report", "none", "--output_dir"]
    vlm.main([*SMALL, *trained, *alone, str(tmp_path / "one")])
    sharded = ["--fsdp", "--fsdp_config", BLOCKS] if launch == "fsdp2" else []
    script = "tests/recipes/fsdp_on_cpu.py recipes/vlm.py" if sharded else "recipes/vlm.py"
    report = two_ranks(root, tmp_path / "two", *SMALL, *trained, *sharded, script=script)
    assert history(tmp_path / "two") == pytest.approx(history(tmp_path / "one"), rel=1e-6)
    # the peak over all steps; with different batches, the peak of a phase may be in another step
    for rank in report["ranks"]:
        measured = max(figures["allocated"] for figures in rank["peaks"].values())
        assert rank["predicted"]["allocated"] == pytest.approx(measured, rel=1e-3)
