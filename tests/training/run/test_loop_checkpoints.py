"""Checkpoints of a loop: complete or ignored, pruned, and clear errors for what cannot be resumed."""

from __future__ import annotations

import copy
import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel

from ckpt_ft.errors import UserError, WorkFailed
from ckpt_ft.training import checkpoints
from ckpt_ft.training.checkpoints import (
    RunDirectory,
    last_complete_checkpoint,
    load_checkpoint,
    resume_path,
    save_checkpoint,
    write_manifest,
)
from ckpt_ft.training.diffusion.loop import LossLog, read_losses

IDENTITY = {"rank": None}
STATE: dict[str, Any] = {"identity": IDENTITY}


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    AcceleratorState._reset_state()
    PartialState._reset_state()
    accelerator = Accelerator()
    model = torch.nn.Linear(4, 4)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    yield accelerator
    AcceleratorState._reset_state()
    PartialState._reset_state()


def directory(path: Path) -> RunDirectory:
    """Returns the run in `path`, or a new one."""
    return RunDirectory(str(path), "latest" if last_complete_checkpoint(str(path)) else None)


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def test_checkpoints_are_saved_pruned_and_loaded(accelerator: Accelerator, tmp_path: Path) -> None:
    model = accelerator._models[0]
    for step in (1, 2, 3, 10):
        with torch.no_grad():
            model.weight.fill_(step)
        save_checkpoint(accelerator, directory(tmp_path), step, {**STATE, "step": step}, limit=2)
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-3"]
    drawn = torch.rand(3)
    latest = last_complete_checkpoint(str(tmp_path))
    assert latest == str(tmp_path / "checkpoint-10")
    with torch.no_grad():
        model.weight.zero_()
    assert load_checkpoint(accelerator, latest, IDENTITY)["step"] == 10
    assert (model.weight == 10).all()
    assert torch.equal(torch.rand(3), drawn)  # the random state is that of the checkpoint


@pytest.mark.parametrize("moment", ["save", "write_manifest"])
def test_kill_while_writing_keeps_the_last_complete_checkpoint(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    save_checkpoint(accelerator, directory(tmp_path), 1, STATE)
    # The run reached step 2 and was resumed from step 1, so that writing replaces a complete checkpoint.
    save_checkpoint(accelerator, directory(tmp_path), 2, STATE)

    def killed(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(*((checkpoints, moment, killed) if moment == "write_manifest" else (torch, moment, killed)))
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(accelerator, directory(tmp_path), 2, STATE)
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2"]
    assert last_complete_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-1")
    directory(tmp_path).clear()
    assert names(tmp_path) == ["checkpoint-1"]


def test_kill_while_pruning(accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partly deleted checkpoint is not resumed, and the next pruning removes it."""
    save_checkpoint(accelerator, directory(tmp_path), 1, STATE)
    rmtree = shutil.rmtree

    def killed(path: str, **kwargs: Any) -> None:
        if Path(path).name == "checkpoint-1":
            (Path(path) / "model.safetensors").unlink()
            raise KeyboardInterrupt
        rmtree(path, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(accelerator, directory(tmp_path), 2, STATE, limit=1)
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2"]
    with pytest.raises(UserError, match="no complete checkpoint"):
        resume_path(str(tmp_path / "checkpoint-1"), str(tmp_path))
    save_checkpoint(accelerator, directory(tmp_path), 3, STATE, limit=1)
    assert names(tmp_path) == ["checkpoint-3"]


def test_full_disk_keeps_the_last_checkpoint(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(accelerator, directory(tmp_path), 1, STATE)

    def full(output_dir: str) -> None:
        Path(output_dir).mkdir()
        (Path(output_dir) / "half").write_bytes(b"0" * 100)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(accelerator, "save_state", full)
    with pytest.raises(WorkFailed, match=r"checkpoint-2 .*No space left.* on the disk\); checkpoint-1 is complete"):
        save_checkpoint(accelerator, directory(tmp_path), 2, STATE)
    assert last_complete_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-1")


def test_write_error_of_the_kernel_keeps_the_last_checkpoint(accelerator: Accelerator, tmp_path: Path) -> None:
    """The kernel refuses to write beyond a file-size limit, as on a full disk; torch raises its own error."""
    resource = pytest.importorskip("resource")
    signal = pytest.importorskip("signal")
    save_checkpoint(accelerator, directory(tmp_path), 1, STATE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
    try:
        with pytest.raises(WorkFailed, match="writing checkpoint-2"):
            save_checkpoint(accelerator, directory(tmp_path), 2, STATE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert last_complete_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-1")
    load_checkpoint(accelerator, str(tmp_path / "checkpoint-1"), IDENTITY)


def test_checkpoint_of_another_run_is_refused(accelerator: Accelerator, tmp_path: Path) -> None:
    save_checkpoint(accelerator, directory(tmp_path), 1, {"identity": {"rank": 4}})
    with pytest.raises(UserError, match="was written with rank 4, this run has None"):
        load_checkpoint(accelerator, str(tmp_path / "checkpoint-1"), IDENTITY)
    (tmp_path / "checkpoint-1" / "optimizer.bin").write_bytes(b"rubbish")
    with pytest.raises(UserError, match="does not fit this run"):
        load_checkpoint(accelerator, str(tmp_path / "checkpoint-1"), {"rank": 4})


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("exploded",)


@pytest.mark.parametrize(
    "file", ["optimizer.bin", "random_states_0.pkl", "custom_checkpoint_0.pkl", "training_state.pt"]
)
def test_checkpoint_never_runs_code(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """Not even if its manifest lists the foreign file."""
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    run = directory(out)
    save_checkpoint(accelerator, run, 1, {**STATE, "ema": torch.zeros(99)})
    torch.save(Bomb(), out / "checkpoint-1" / file)
    write_manifest(out / "checkpoint-1")
    with suppress(UserError):  # accelerate logs unreadable random states and continues
        load_checkpoint(accelerator, str(out / "checkpoint-1"), IDENTITY)
    assert not Path("exploded").exists()


def test_schedule_and_average_are_restored_exactly(accelerator: Accelerator, tmp_path: Path) -> None:
    model = accelerator._models[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1 / 3)
    schedule, ema = (
        get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=9),
        EMAModel(model.parameters()),
    )
    for _ in range(3):
        with torch.no_grad():
            model.weight.mul_(1.7)
        ema.step(model.parameters())
        optimizer.step()
        schedule.step()
    held = copy.deepcopy({"schedule": schedule.state_dict(), "ema": ema.state_dict()})
    save_checkpoint(accelerator, directory(tmp_path), 3, {**STATE, **held})
    schedule.step()
    ema.step(model.parameters())
    read = load_checkpoint(accelerator, str(tmp_path / "checkpoint-3"), IDENTITY)
    assert read["schedule"] == held["schedule"]
    theirs, ours = held["ema"].pop("shadow_params"), read["ema"].pop("shadow_params")
    assert len(ours) == 2
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert read["ema"] == held["ema"]


def test_directory_with_another_checkpoint_name_is_ignored(accelerator: Accelerator, tmp_path: Path) -> None:
    (tmp_path / "checkpoint-best").mkdir()
    run = directory(tmp_path)
    for step in (1, 2):
        save_checkpoint(accelerator, run, step, STATE, limit=1)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-best"]


def test_loss_log_is_truncated_at_the_resumed_step(accelerator: Accelerator, tmp_path: Path) -> None:
    log = LossLog(accelerator, str(tmp_path), 0)
    for step in (1, 2, 3):
        for loss in (step, step + 1):
            log.recording(lambda model, batch, loss=loss: torch.tensor(float(loss)))(None, {})
        assert log.step(step, 0.1) == step + 0.5
    with (tmp_path / "losses.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # killed here
    LossLog(accelerator, str(tmp_path), 2)
    assert [(line["step"], line["loss"]) for line in read_losses(str(tmp_path))] == [(1, 1.5), (2, 2.5)]
    assert json.loads((tmp_path / "losses.jsonl").read_text().splitlines()[-1]) == {"step": 2, "loss": 2.5, "lr": 0.1}
