"""The output directory of a run: it belongs to one run and one process at a time.

    directory = RunDirectory.of(args, lora=...)     # validates, writes nothing
    directory.open()                                # locks it for this process
    ...                                             # load data and model: the input is valid
    directory.clear()                               # deletes an earlier run if it is to be overwritten

The manifest of each checkpoint stores the identity of its run.
"""

from __future__ import annotations

import shutil
import uuid
from functools import cache
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from filelock import FileLock, Timeout
from torch import nn

from ckpt_ft.errors import UserError, WorkFailed, one_line
from ckpt_ft.files import sweep
from ckpt_ft.units import format_bytes

from .checkpoints import (
    ADAPTER,
    WHOLE,
    check_output_dir,
    check_same_kind,
    checkpoints,
    last_complete_checkpoint,
    read_manifest,
    resume_path,
)

LOCK = "_run.lock"  # `--push_to_hub` does not upload files named _*
_RESULT = (*ADAPTER, *WHOLE, "adapter_model.safetensors", "model*.safetensors*", "losses.jsonl")


class RunDirectory:
    """The directory that a run writes to and resumes from; nothing is written before `open`.

    Attributes:
        path: the directory.
        checkpoint: the checkpoint to resume from, None for a new run.
        run: the identity of the run: that of the checkpoint, or a new one.

    Raises:
        UserError: `output_dir` is a file or holds another run, or there is no complete checkpoint to resume from.
    """

    def __init__(self, output_dir: str, resume: str | None = None, overwrite: bool = False, *, lora: bool) -> None:
        check_output_dir(output_dir)
        self.path, self.overwrite, self.lora = Path(output_dir), overwrite, lora
        self.checkpoint = resume_path(resume, output_dir)
        if overwrite and self.checkpoint is not None:
            raise UserError(
                "--overwrite_output_dir throws the earlier run away and --resume_from_checkpoint goes on with it: "
                "give one of them"
            )
        if not overwrite:
            check_same_kind(output_dir, lora)
        if self.checkpoint is None:
            self.run = uuid.uuid4().hex
            if not overwrite:
                self._refuse_a_used_one()
        else:
            check_same_kind(self.checkpoint, lora)
            manifest = read_manifest(Path(self.checkpoint))
            assert manifest is not None
            self.run = manifest.run
            self._refuse_other_runs()

    @classmethod
    def of(cls, args: Any, *, lora: bool) -> RunDirectory:
        """Returns the directory that RunArguments or LoopArguments name."""
        return cls(args.output_dir, args.resume_from_checkpoint, args.overwrite_output_dir, lora=lora)

    def open(self) -> None:
        """Create the directory and lock it until this process ends. Called on every rank.

        Raises:
            UserError: another process has locked it, or it is not writable.
        """
        state = PartialState()
        if state.is_main_process:
            _lock(self.path.absolute())
        state.wait_for_everyone()
        [self.run] = broadcast_object_list([self.run])

    def clear(self) -> None:
        """Delete incomplete checkpoints of killed runs, and dangling symlinks to checkpoints.

        With `overwrite`, the first call also deletes the earlier run's checkpoints and result.
        """
        state = PartialState()
        if state.is_main_process:
            left = list(self.path.glob(".checkpoint-*"))
            left += [path for path in checkpoints(self.path) if not path.exists()]  # dangling symlinks
            if self.overwrite:
                left += [*checkpoints(self.path), *(file for name in _RESULT for file in self.path.glob(name))]
            for path in left:
                _remove(path)
            sweep(self.path)
        self.overwrite = False
        state.wait_for_everyone()

    def check_space(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Check before training that the disk has room for a checkpoint of `model`.

        With adapters, only trainable weights are counted. Optimizer state is counted for Adam only; sharded runs are
        skipped.

        Raises:
            WorkFailed: there is not enough free space.
        """
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        saved = trained if self.lora else list(model.parameters())
        inner = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
        moments = 2 if isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)) else 0
        needed = sum(p.numel() * p.element_size() for p in saved)
        needed += moments * sum(p.numel() * p.element_size() for p in trained)
        free = shutil.disk_usage(self.path).free
        if PartialState().num_processes == 1 and free < needed:
            raise WorkFailed(
                f"--output_dir {self.path}: a checkpoint takes {format_bytes(needed)}, {format_bytes(free)} are free; "
                "nothing was trained: make room, or give a directory on another disk"
            )

    def last_complete(self) -> str | None:
        """Returns the newest complete checkpoint of this run."""
        return last_complete_checkpoint(str(self.path), self.run)

    def not_written(self, what: str, reason: str) -> WorkFailed:
        """Returns an error with the reason why `what` was not written, the free space and the last complete
        checkpoint."""
        latest = self.last_complete()
        intact = f"; {Path(latest).name} is whole: --resume_from_checkpoint latest goes on from it" if latest else ""
        free = format_bytes(shutil.disk_usage(self.path).free)
        return WorkFailed(f"writing {what} to {self.path} failed: {reason} ({free} free on the disk){intact}")

    def _refuse_a_used_one(self) -> None:
        there = [*reversed(checkpoints(self.path)), *(self.path / name for name in (*ADAPTER, *WHOLE))]
        used = next((path.name for path in there if path.exists()), None)
        if used is not None:
            raise UserError(
                f"--output_dir {self.path} holds {used} of an earlier run; continue it with --resume_from_checkpoint "
                "latest, replace it with --overwrite_output_dir, or give another directory"
            )

    def _refuse_other_runs(self) -> None:
        for path in checkpoints(self.path):
            manifest = read_manifest(path)
            if manifest is not None and manifest.run != self.run:
                raise UserError(
                    f"--output_dir {self.path} holds {path.name} of another run than {self.checkpoint}; give another "
                    "directory, or the --resume_from_checkpoint of that run"
                )


@cache
def _lock(path: Path) -> FileLock:
    """Lock the directory until this process ends, however it ends."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path / LOCK)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UserError(f"--output_dir {path}: another process trains into it; give another directory") from error
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise UserError(f"--output_dir {path} cannot be written to ({one_line(error)})") from error
    return lock


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
