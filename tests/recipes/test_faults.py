"""recipes/llm.py under faults: a failing report, signals, a second run, a full disk, and secrets in its command."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from recipe_scripts import assert_same_weights, history
from transformers import Trainer

from ckpt_ft.errors import Interrupted, UserError, WorkFailed, run
from ckpt_ft.memory.measure.report import MemoryReport
from ckpt_ft.training.checkpoints import last_complete_checkpoint, write_manifest

SMALL = ["--use_cpu", "--max_steps", "4", "--max_length", "32", "--per_device_train_batch_size", "1"]
SMALL += ["--logging_steps", "1", "--save_steps", "2", "--disable_tqdm", "true", "--report_to", "none"]
QUIET = ["--ac_report", "none"]
WEIGHTS = "model.safetensors"


def train(llm: ModuleType, out: Path, *flags: str) -> Path:
    llm.main([*SMALL, "--output_dir", str(out), *flags])
    return out


@pytest.fixture(scope="module")
def whole(llm: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of an undisturbed run."""
    return train(llm, tmp_path_factory.mktemp("whole") / "out", *QUIET)


def at_step(number: int, do: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls `do()` within training step `number`."""
    step = Trainer.training_step

    def meets(self: Trainer, *args: object, **kwargs: object) -> torch.Tensor:
        if self.state.global_step == number - 1:
            do()  # type: ignore[operator]
        return step(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "training_step", meets)


def test_failed_report_is_a_warning(
    llm: ModuleType, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise UnicodeEncodeError("ascii", "\u00b7", 0, 1, "ordinal not in range(128)")

    monkeypatch.setattr(MemoryReport, "print", broken)
    monkeypatch.setattr(MemoryReport, "plot", broken)
    out = tmp_path / "out"
    (out / "memory_report.md").mkdir(parents=True)
    with caplog.at_level(logging.WARNING, "ckpt_ft"):
        train(llm, out)
    assert_same_weights(out / WEIGHTS, whole / WEIGHTS)
    assert (out / "memory_report.json").is_file()
    said = [record.message for record in caplog.records if record.name == "ckpt_ft.errors"]
    assert [line.partition(" failed")[0] for line in said] == [
        "printing the memory report", "writing memory_report.md", "writing memory_report.png",
    ]  # fmt: skip


def test_weights_are_saved_before_the_report(
    llm: ModuleType, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(MemoryReport, "print", killed)
    with pytest.raises(KeyboardInterrupt):
        train(llm, tmp_path / "out")
    assert_same_weights(tmp_path / "out" / WEIGHTS, whole / WEIGHTS)


def test_finished_run_makes_no_more_steps(llm: ModuleType, whole: Path, tmp_path: Path) -> None:
    """A run that was killed after its last step saves its weights."""
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    (out / WEIGHTS).unlink()
    metrics = (out / "train_results.json").read_bytes()
    for _ in range(2):
        train(llm, out, *QUIET, "--resume_from_checkpoint", "latest")
        assert json.loads((out / "trainer_state.json").read_text())["global_step"] == 4
        assert_same_weights(out / WEIGHTS, whole / WEIGHTS)
        assert_same_weights(out / WEIGHTS, out / "checkpoint-4" / WEIGHTS)
    assert (out / "train_results.json").read_bytes() == metrics


def test_another_run_does_not_change_a_finished_one(llm: ModuleType, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"holds checkpoint-4 of an earlier run; .* latest, .*--overwrite_output_dir"):
        train(llm, out, *QUIET)
    with pytest.raises(UserError, match="does not fit this run; resume with the flags that it was written with"):
        train(llm, out, *QUIET, "--use_peft", "--resume_from_checkpoint", "latest")
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    train(llm, out, *QUIET, "--overwrite_output_dir", "--use_peft", "--max_steps", "1")
    assert (out / "adapter_model.safetensors").is_file()
    assert not (out / WEIGHTS).exists()
    assert not (out / "checkpoint-4").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_is_deferred_to_the_end_of_the_step(
    llm: ModuleType,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    number: int,
) -> None:
    """The run finishes its step, a checkpoint and the report; a resumed run ends like an undisturbed one."""
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        at_step(3, lambda: os.kill(os.getpid(), number), patch)
        with pytest.raises(SystemExit) as stopped:
            run(lambda: train(llm, out))
    assert stopped.value.code == 128 + number
    said = capfd.readouterr().err
    assert f"stopped by {signal.Signals(number).name}; {out / 'checkpoint-3'} is complete" in said
    assert said.rstrip().endswith("the same command with --resume_from_checkpoint latest continues from it")
    assert (out / "memory_report.json").is_file()
    assert not (out / WEIGHTS).exists()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    train(llm, out, *QUIET, "--resume_from_checkpoint", "latest")
    assert history(out) == history(whole)
    assert_same_weights(out / WEIGHTS, whole / WEIGHTS)


def test_second_signal_stops_at_once(llm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt_ft.training.checkpoints._FORWARDED_WITHIN", -1.0)

    def send_two_signals() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("went on")

    at_step(1, send_two_signals, monkeypatch)
    with pytest.raises(Interrupted, match="stopped at once") as stopped:
        train(llm, tmp_path / "out", *QUIET)
    assert stopped.value.number == signal.SIGTERM


def test_failed_checkpoint_write_keeps_the_previous_one(
    llm: ModuleType, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel refuses to write beyond a file-size limit; the run resumes."""
    resource = pytest.importorskip("resource")
    out = tmp_path / "out"
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with monkeypatch.context() as patch:
            at_step(4, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1])), patch)
            with pytest.raises(WorkFailed, match=r"free on the disk\); checkpoint-2 is complete") as failed:
                train(llm, out, *QUIET)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert "\n" not in str(failed.value)
    assert last_complete_checkpoint(out) == str(out / "checkpoint-2")
    train(llm, out, *QUIET, "--resume_from_checkpoint", "latest")
    assert history(out) == history(whole)


def test_old_checkpoints_are_deleted_after_the_new_one_is_complete(
    llm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckpt_ft.training import checkpoints

    out, write = tmp_path / "out", checkpoints.write_manifest

    def killed(checkpoint: Path) -> None:
        if checkpoint.name == "checkpoint-3":
            raise KeyboardInterrupt
        write(checkpoint)

    monkeypatch.setattr(checkpoints, "write_manifest", killed)
    with pytest.raises(KeyboardInterrupt):
        train(llm, out, *QUIET, "--save_steps", "1", "--save_total_limit", "1")
    assert sorted(path.name for path in out.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3"]
    monkeypatch.undo()
    train(llm, out, *QUIET, "--save_steps", "1", "--save_total_limit", "1", "--resume_from_checkpoint", "latest")
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-4"]


def test_kill_while_a_step_is_made_again_leaves_no_mixed_checkpoint(
    llm: ModuleType, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that continues from an older checkpoint writes into the directory of a newer one."""
    out = tmp_path / "out"
    shutil.copytree(whole, out)

    def killed(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "_save_checkpoint", killed)
    with pytest.raises(KeyboardInterrupt):
        train(llm, out, *QUIET, "--resume_from_checkpoint", str(out / "checkpoint-2"))
    assert last_complete_checkpoint(str(out)) == str(out / "checkpoint-2")


def test_output_of_a_run_contains_no_secret(
    llm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sample: tuple[Path, Path]
) -> None:
    home = tmp_path / "home" / "jane"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("HF_TOKEN", "")  # restored after the test
    out = home / "out"
    flags = ["--hub_token", "qZ81secret", "--run_name", "hf_alsoSecret1", "--output_dir", str(out)]
    flags += ["--max_steps", "1", "--report_to", "tensorboard"]
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(out / "logs"))
    monkeypatch.setattr("sys.argv", ["llm.py", *SMALL, *flags])
    llm.main()
    assert os.environ["HF_TOKEN"] == "qZ81secret"  # huggingface_hub reads it there
    left = {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert {"memory_report.json", "memory_report.md", "README.md", "training_args.bin"} <= left.keys()
    assert [name for name, content in left.items() if b"qZ81secret" in content] == []
    for name in ("memory_report.json", "memory_report.md"):
        assert b"--hub_token" in left[name]
        assert b"hf_alsoSecret1" not in left[name]
        assert str(home).encode() not in left[name]


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        (WEIGHTS, lambda content: content[: len(content) // 2]),
        ("optimizer.pt", lambda content: content[:-1]),
        ("rng_state.pth", lambda content: b""),
        ("trainer_state.json", lambda content: b"null"),
    ],
)
def test_checkpoint_that_was_damaged_before_its_manifest_is_refused(
    llm: ModuleType, whole: Path, tmp_path: Path, file: str, damage: Callable[[bytes], bytes]
) -> None:
    """Its manifest has the sizes of the damaged files, so the damage shows only when they are read."""
    out = tmp_path / "out"
    shutil.copytree(whole / "checkpoint-2", out / "checkpoint-2")
    place = out / "checkpoint-2" / file
    place.write_bytes(damage(place.read_bytes()))
    write_manifest(out / "checkpoint-2")
    with pytest.raises(UserError, match=r"--resume_from_checkpoint .*checkpoint-2 does not fit this run") as refused:
        train(llm, out, *QUIET, "--resume_from_checkpoint", "latest")
    assert "\n" not in str(refused.value)
    assert sorted(path.name for path in out.iterdir()) == ["_run.lock", "checkpoint-2"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--push_to_hub", "--hub_model_id", "a/b/c"], "no Trainer can be made of these flags: HFValidationError"),
        (["--lr_scheduler_kwargs", '{"a": 1}'], "training cannot begin with these flags: TypeError: .* argument 'a'"),
    ],
)
def test_failure_before_any_step_is_one_line(llm: ModuleType, tmp_path: Path, flags: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says) as refused:
        train(llm, tmp_path / "out", *QUIET, *flags)
    assert "\n" not in str(refused.value)


def test_failed_first_step_is_one_line_and_later_ones_keep_their_traceback(
    llm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the first step fails, the input cannot be trained; a later failure is unexpected."""

    def fails() -> None:
        raise ZeroDivisionError("by\nnought")

    with monkeypatch.context() as patch:
        at_step(1, fails, patch)
        with pytest.raises(UserError) as refused:
            train(llm, tmp_path / "one", *QUIET)
    said = "the first step failed (CKPT_FT_TRACEBACK=1 shows where): ZeroDivisionError: by nought"
    assert str(refused.value) == said
    at_step(2, fails, monkeypatch)
    with pytest.raises(ZeroDivisionError):
        train(llm, tmp_path / "two", *QUIET)


@pytest.mark.parametrize(
    ("written_with", "resumed_with"),
    [
        (["--use_peft", "--lora_r", "2"], ["--use_peft", "--lora_r", "4"]),
        (["--use_peft"], []),
        ([], ["--use_peft"]),
    ],
)
def test_checkpoint_of_other_adapters_is_refused(
    llm: ModuleType, tmp_path: Path, written_with: list[str], resumed_with: list[str]
) -> None:
    out = train(llm, tmp_path / "out", *QUIET, *written_with, "--max_steps", "2")
    flags = [*resumed_with, "--max_steps", "3", "--resume_from_checkpoint", "latest"]
    with pytest.raises(UserError, match="does not fit this run; resume with the flags that it was written with"):
        train(llm, out, *QUIET, *flags)
