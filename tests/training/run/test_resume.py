"""Where a run may write, and from which checkpoint it resumes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_ft.errors import UserError
from ckpt_ft.training.checkpoints import (
    RunDirectory,
    last_complete_checkpoint,
    resume_path,
    write_manifest,
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three checkpoints, of which the newest was killed while writing its state, and an empty one."""
    for step in (2, 10, 12):
        place = make_checkpoint(tmp_path, step)
    (place / "trainer_state.json").write_text('{"global_')
    (tmp_path / "checkpoint-14").mkdir()
    (tmp_path / "checkpoint-best").mkdir()
    return tmp_path


def make_checkpoint(output_dir: Path, step: int, state: str = "optimizer.pt") -> Path:
    place = output_dir / f"checkpoint-{step}"
    place.mkdir()
    (place / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    (place / state).write_bytes(bytes(100))
    (place / "rng_state.pth").write_bytes(b"\1" * 50)
    write_manifest(place)
    return place


def test_newest_complete_checkpoint_is_resumed(run: Path) -> None:
    assert last_complete_checkpoint(str(run)) == str(run / "checkpoint-10")
    assert resume_path("latest", str(run)) == resume_path("True", str(run))
    assert resume_path("latest", str(run)) == str(run / "checkpoint-10")
    assert resume_path(str(run / "checkpoint-2"), str(run)) == str(run / "checkpoint-2")
    assert resume_path(None, str(run)) is resume_path("false", str(run)) is None


def test_path_without_a_checkpoint_is_one_line(run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    empty = str(tmp_path_factory.mktemp("empty"))
    for given in ("latest", empty):
        with pytest.raises(UserError, match=f"--resume_from_checkpoint {given}: no complete checkpoint"):
            resume_path(given, empty)
    with pytest.raises(UserError, match="give latest, or a directory checkpoint-N"):
        resume_path(str(run), str(run))
    with pytest.raises(UserError, match="no complete checkpoint .trainer_state.json has 9 bytes instead of 19"):
        resume_path(str(run / "checkpoint-12"), str(run))
    assert last_complete_checkpoint(f"{empty}/gone") is None


@pytest.mark.parametrize("file", ["optimizer.pt", "rng_state.pth", "trainer_state.json", "manifest.json"])
@pytest.mark.parametrize("fault", ["missing", "cut"])
def test_checkpoint_with_a_missing_or_changed_file_is_not_resumed(run: Path, file: str, fault: str) -> None:
    place = run / "checkpoint-10" / file
    content = place.read_bytes()
    if fault == "missing":
        place.unlink()
    else:
        place.write_bytes(content[:-1])
    assert last_complete_checkpoint(str(run)) == str(run / "checkpoint-2")
    with pytest.raises(UserError, match=f"no complete checkpoint .*{file}"):
        resume_path(str(run / "checkpoint-10"), str(run))


def test_resuming_says_from_which_step_and_why(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunDirectory(str(run), "latest").open()
    assert capsys.readouterr().out == (
        "checkpoint-14 is damaged: without a manifest.json it was not written to its end; "
        "checkpoint-12 is damaged: trainer_state.json has 9 bytes instead of 19; resuming from checkpoint-10\n"
    )


def test_checkpoint_with_weights_only_is_refused(run: Path) -> None:
    make_checkpoint(run, 20, state="model.safetensors")
    with pytest.raises(UserError, match="checkpoint-20 has weights only"):
        resume_path("latest", str(run))


def test_used_directory_is_refused_with_both_alternatives(run: Path) -> None:
    with pytest.raises(UserError) as refused:
        RunDirectory(str(run))
    said = str(refused.value)
    assert "holds checkpoint-14 of an earlier run" in said
    assert "--resume_from_checkpoint latest" in said
    assert "--overwrite_output_dir" in said
    assert "\n" not in said
    with pytest.raises(UserError, match="give only one of them"):
        RunDirectory(str(run), "latest", overwrite=True)


def test_resuming_from_elsewhere_needs_an_unused_directory(
    run: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    first = str(run / "checkpoint-2")
    assert RunDirectory(str(elsewhere), first).checkpoint == first
    make_checkpoint(elsewhere, 3)
    with pytest.raises(UserError, match="holds checkpoint-3 of an earlier run"):
        RunDirectory(str(elsewhere), first)


def test_overwriting_deletes_files_of_runs_only(run: Path) -> None:
    for name in ("adapter_config.json", "model-00001-of-00002.safetensors", "notes.txt"):
        (run / name).write_text("{}")
    (run / "samples").mkdir()
    (run / "samples" / "step-000400.png").touch()
    directory = RunDirectory(str(run), overwrite=True)
    directory.open()
    assert (run / "checkpoint-2").is_dir()  # deleted only after the input is checked
    directory.clear()
    assert sorted(path.name for path in run.iterdir()) == ["_run.lock", "checkpoint-best", "notes.txt", "samples"]
    assert not list((run / "samples").iterdir())
    make_checkpoint(run, 1)
    directory.clear()
    assert last_complete_checkpoint(run) == str(run / "checkpoint-1")


def test_second_process_in_a_directory_is_refused(tmp_path: Path) -> None:
    script = (
        "import sys; from ckpt_ft.errors import run; from ckpt_ft.training.checkpoints import RunDirectory; "
        "run(lambda: RunDirectory(sys.argv[1]).open())"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "out")]
    RunDirectory(str(tmp_path / "out")).open()
    second = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert second.returncode == 2
    assert second.stderr.count("another process trains into it") == 1
    assert "Traceback" not in second.stderr


def test_unwritable_directory_is_refused(tmp_path: Path) -> None:
    path = Path("/proc/ckpt_ft")  # unwritable for root too
    if not path.parent.is_dir():
        pytest.skip("needs Linux")
    with pytest.raises(UserError, match="--output_dir /proc/ckpt_ft cannot be written to"):
        RunDirectory(str(path)).open()


def test_output_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for given in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=f"--output_dir {given} cannot be written to"):
            RunDirectory(str(given)).open()
    with pytest.raises(UserError, match="--output_dir .*File name too long|--output_dir .* \\.\\.\\. "):
        RunDirectory(str(tmp_path / ("x" * 300))).open()
    with pytest.raises(UserError, match="--output_dir is empty; give a directory"):  # which is no current directory
        RunDirectory("")
    assert (tmp_path / "file").read_text() == "mine"


def test_dangling_checkpoint_symlink_is_deleted(tmp_path: Path) -> None:
    directory = RunDirectory(str(tmp_path))
    (tmp_path / "checkpoint-4").symlink_to(tmp_path / "gone")
    (tmp_path / "kept").mkdir()
    (tmp_path / "checkpoint-2").symlink_to(tmp_path / "kept")
    write_manifest(tmp_path / "kept")
    directory.clear()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "kept"]
    RunDirectory(str(tmp_path), overwrite=True).clear()
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
