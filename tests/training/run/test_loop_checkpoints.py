"""Checkpoints of a loop: whole or not there, pruned, and clear about what they cannot resume."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState

from ckpt_ft.errors import UserError, WorkFailed
from ckpt_ft.training.run import loop_checkpoints
from ckpt_ft.training.run.loop_checkpoints import (
    clear_when_disk_is_full,
    load_checkpoint,
    open_output_dir,
    save_checkpoint,
)
from ckpt_ft.training.run.loss_log import LossLog, read_losses
from ckpt_ft.training.run.resume import last_complete_checkpoint

IDENTITY = {"rank": None}


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


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def test_saved_pruned_and_loaded(accelerator: Accelerator, tmp_path: Path) -> None:
    model = accelerator._models[0]
    for step in (1, 2, 3, 10):
        with torch.no_grad():
            model.weight.fill_(step)
        save_checkpoint(accelerator, str(tmp_path), step, 8 * step, IDENTITY, total_limit=2)
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-3"]
    drawn = torch.rand(3)
    latest = last_complete_checkpoint(str(tmp_path))
    assert latest == str(tmp_path / "checkpoint-10")
    with torch.no_grad():
        model.weight.zero_()
    assert load_checkpoint(accelerator, latest, IDENTITY) == (10, 80)
    assert (model.weight == 10).all()
    assert torch.equal(torch.rand(3), drawn)  # the RNG is where it was when the checkpoint was written


@pytest.mark.parametrize("moment", ["flush_tree", "rename"])
def test_killed_while_writing(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    save_checkpoint(accelerator, str(tmp_path), 1, 1, IDENTITY)

    def killed(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(
            *((loop_checkpoints, "flush_tree", killed) if moment == "flush_tree" else (os, "rename", killed))
        )
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(accelerator, str(tmp_path), 2, 2, IDENTITY)
    assert names(tmp_path) == [".checkpoint-2.partial", "checkpoint-1"]
    assert last_complete_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-1")
    open_output_dir(accelerator, str(tmp_path), resuming=True)
    assert names(tmp_path) == ["checkpoint-1"]


def test_killed_while_pruning(accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(accelerator, str(tmp_path), 1, 1, IDENTITY)

    def killed(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loop_checkpoints.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(accelerator, str(tmp_path), 2, 2, IDENTITY, total_limit=1)
    assert names(tmp_path) == [".checkpoint-1.deleted", "checkpoint-2"]
    open_output_dir(accelerator, str(tmp_path), resuming=True)
    assert names(tmp_path) == ["checkpoint-2"]


def test_disk_full(accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(accelerator, str(tmp_path), 1, 1, IDENTITY)

    def full(output_dir: str) -> None:
        Path(output_dir).mkdir()
        (Path(output_dir) / "half").write_bytes(b"0" * 100)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(accelerator, "save_state", full)
    with pytest.raises(WorkFailed, match=r"checkpoint-2 .*No space left.* free on the disk\); checkpoint-1 is whole"):
        save_checkpoint(accelerator, str(tmp_path), 2, 2, IDENTITY)
    assert names(tmp_path) == ["checkpoint-1"]


def test_a_real_write_error(accelerator: Accelerator, tmp_path: Path) -> None:
    """The kernel refuses to write past a file size, as it would past the end of the disk: what torch makes of it."""
    resource = pytest.importorskip("resource")
    signal = pytest.importorskip("signal")
    save_checkpoint(accelerator, str(tmp_path), 1, 1, IDENTITY)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
    try:
        with pytest.raises(WorkFailed, match="writing checkpoint-2"):
            save_checkpoint(accelerator, str(tmp_path), 2, 2, IDENTITY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert names(tmp_path) == ["checkpoint-1"]
    load_checkpoint(accelerator, str(tmp_path / "checkpoint-1"), IDENTITY)


def test_disk_full_elsewhere() -> None:
    @clear_when_disk_is_full()
    def work(number: int) -> None:
        raise OSError(number, os.strerror(number), "losses.jsonl")

    with pytest.raises(WorkFailed, match=r"the disk is full: .*losses\.jsonl"):
        work(errno.ENOSPC)
    with pytest.raises(OSError, match="Permission"):
        work(errno.EACCES)


def test_what_cannot_be_resumed(accelerator: Accelerator, tmp_path: Path) -> None:
    save_checkpoint(accelerator, str(tmp_path), 1, 1, {"rank": 4})
    with pytest.raises(UserError, match="was written with rank 4, this run has None"):
        load_checkpoint(accelerator, str(tmp_path / "checkpoint-1"), IDENTITY)
    (tmp_path / "checkpoint-1" / "optimizer.bin").write_bytes(b"rubbish")
    with pytest.raises(UserError, match="does not fit this run"):
        load_checkpoint(accelerator, str(tmp_path / "checkpoint-1"), {"rank": 4})


def test_output_dirs(accelerator: Accelerator, tmp_path: Path) -> None:
    open_output_dir(accelerator, str(tmp_path / "new" / "deep"), resuming=False)
    assert (tmp_path / "new" / "deep").is_dir()
    save_checkpoint(accelerator, str(tmp_path), 5, 5, IDENTITY)
    with pytest.raises(UserError, match="holds checkpoint-5 of an earlier run"):
        open_output_dir(accelerator, str(tmp_path), resuming=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        open_output_dir(accelerator, str(tmp_path / "file"), resuming=False)


def test_the_loss_log_is_cut_where_a_run_resumes(accelerator: Accelerator, tmp_path: Path) -> None:
    log = LossLog(accelerator, str(tmp_path), 0)
    for step in (1, 2, 3):
        log.add(torch.tensor(float(step)))
        log.add(torch.tensor(float(step + 1)))
        assert log.step(step, 0.1) == step + 0.5
    with (tmp_path / "losses.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # killed here
    LossLog(accelerator, str(tmp_path), 2)
    assert [(line["step"], line["loss"]) for line in read_losses(str(tmp_path))] == [(1, 1.5), (2, 2.5)]
    assert json.loads((tmp_path / "losses.jsonl").read_text().splitlines()[-1]) == {"step": 2, "loss": 2.5, "lr": 0.1}
