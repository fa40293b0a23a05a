"""Where a run may write, and which checkpoint it goes on from."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_ft.errors import UserError
from ckpt_ft.training.run.resume import check_output_dir, check_same_kind, last_complete_checkpoint, resume_path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three checkpoints, of which the newest was cut off while its state was written."""
    for step, state in ((2, "{}"), (10, '{"global_step": 10}'), (12, '{"global_')):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    (tmp_path / "checkpoint-14").mkdir()
    return tmp_path


def test_the_newest_whole_checkpoint_is_resumed(run: Path) -> None:
    assert last_complete_checkpoint(str(run)) == str(run / "checkpoint-10")
    assert resume_path("latest", str(run)) == resume_path("True", str(run)) == str(run / "checkpoint-10")
    assert resume_path(str(run / "checkpoint-2"), str(run)) == str(run / "checkpoint-2")
    assert resume_path(None, str(run)) is None
    assert resume_path("false", str(run)) is None


def test_a_path_without_a_checkpoint_is_one_line(run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    empty = str(tmp_path_factory.mktemp("empty"))
    for given in ("latest", empty):
        with pytest.raises(UserError, match=f"--resume_from_checkpoint {given}: no complete checkpoint"):
            resume_path(given, empty)
    with pytest.raises(UserError, match=r"did you mean .*checkpoint-10\?"):
        resume_path(str(run), str(run))
    with pytest.raises(UserError, match="no complete checkpoint there"):
        resume_path(str(run / "checkpoint-12"), str(run))
    assert last_complete_checkpoint(f"{empty}/gone") is None


def test_an_output_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for given in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match="file is a file; give a directory"):
            check_output_dir(str(given))
    check_output_dir(str(tmp_path / "new" / "deep"))
    assert (tmp_path / "file").read_text() == "mine"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("place", [".", "checkpoint-2"])
@pytest.mark.parametrize(
    ("file", "lora", "says"),
    [
        ("adapter_config.json", True, "LoRA adapters of an earlier run"),
        ("pytorch_lora_weights.safetensors", True, "LoRA adapters of an earlier run"),
        ("config.json", False, "a whole model of an earlier run"),
        ("model_index.json", False, "a whole model of an earlier run"),
    ],
)
def test_lora_and_full_runs_do_not_share_a_directory(
    tmp_path: Path, place: str, file: str, lora: bool, says: str
) -> None:
    check_same_kind(str(tmp_path / "new"), lora)
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place / file).write_text("{}")
    check_same_kind(str(tmp_path), lora)  # as the run that wrote it
    with pytest.raises(UserError, match=f"holds {says} .*give another directory") as error:
        check_same_kind(str(tmp_path), not lora)
    assert "\n" not in str(error.value)
