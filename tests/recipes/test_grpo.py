"""recipes/grpo.py on the built-in sums, run in this process."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from recipe_scripts import history, load_recipe

from ckpt_ft.errors import UserError

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")
FLAGS = ["--use_cpu", "--save_strategy", "no", "--ac_report", "json", "--disable_tqdm", "true"]


@pytest.fixture(scope="module")
def grpo(sample: tuple[Path, Path]) -> ModuleType:
    return load_recipe("grpo")


def rewards(grpo: ModuleType, out: Path, *flags: str) -> list[float]:
    grpo.main([*FLAGS, "--output_dir", str(out), *flags])
    return history(out, "reward")


def test_report_has_the_generation_and_predicted_phases(grpo: ModuleType, tmp_path: Path) -> None:
    flags = ["--max_steps", "2", "--per_device_train_batch_size", "16", "--logging_steps", "1"]
    assert len(rewards(grpo, tmp_path, *flags, "--max_completion_length", "4", "--ac_policy", "full")) == 2
    (rank,) = json.loads((tmp_path / "memory_report.json").read_text())["ranks"]
    for phase in ("backward", "generation"):
        assert rank["predicted"]["peaks"][phase] == pytest.approx(rank["peaks"][phase]["allocated"], rel=2e-3)


@pytest.mark.slow
def test_grpo_learns_to_add(grpo: ModuleType, tmp_path: Path) -> None:
    found = rewards(grpo, tmp_path)
    assert found[0] < 0.4
    assert min(found[-3:]) > 0.85


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "1 + 1 ="}, "no column 'answer'"),
        ({"prompt": "", "answer": 2}, "row 1 has no 'prompt'"),
        ({"prompt": "1 + 1 =", "answer": "two"}, "row 1: the answer 'two' has no number"),
    ],
)
def test_rows_without_an_answer_are_refused(grpo: ModuleType, row: dict[str, Any], says: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=says):
        rewards(grpo, tmp_path / "out", "--dataset_name", str(tmp_path / "rows.jsonl"))


def test_reward_compares_the_last_number() -> None:
    from ckpt_ft.training.preferences import right_number

    said = ["so it is 1,234.", "7 or 8", [{"role": "assistant", "content": "-2"}], "none"]
    assert right_number(said, ["1234", 7, "-2.0", "0"]) == [1.0, 0.0, 1.0, 0.0]
