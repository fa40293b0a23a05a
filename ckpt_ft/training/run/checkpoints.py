"""The output directory of a run, and which of its checkpoints are complete.

The manifest of a checkpoint has its run, and the name and size of every file. It is written last and atomically, after
all files are on the disk. A checkpoint is complete when its files match its manifest. A checkpoint that is partial,
lacks a file, was overwritten by another run or contains a foreign file is never read.

    directory = RunDirectory.of(args, lora=...)     # validates, writes nothing
    directory.open()                                # locks it for this process
    ...                                             # load data and model: the input is valid
    directory.clear()                               # deletes an earlier run if it is to be overwritten
"""

from __future__ import annotations

import re
import shutil
import uuid
from functools import cache
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from filelock import FileLock, Timeout
from pydantic import BaseModel, ValidationError
from torch import nn
from transformers.trainer_utils import rotate_checkpoints

from ckpt_ft.errors import UserError, WorkFailed, one_line
from ckpt_ft.files import flush, flush_tree, sweep, write
from ckpt_ft.units import format_bytes

NAME = "manifest.json"
LOCK = "_run.lock"  # `--push_to_hub` does not upload files named _*
_NAME = re.compile(r"checkpoint-(\d{1,18})")
PIPELINE_LORA = "pytorch_lora_weights.safetensors"  # LoRA weights of a U-Net, transformer or text encoder
ADAPTER = ("adapter_config.json", PIPELINE_LORA)  # files that identify an adapter of PEFT or diffusers
WHOLE = ("config.json", "model_index.json")
_RESULT = (*ADAPTER, *WHOLE, "adapter_model.safetensors", "model*.safetensors*", "losses.jsonl")


class Manifest(BaseModel):
    """The contents of a complete checkpoint.

    run: the identity of the run that wrote it. files: the size of each file, by its path below the checkpoint, without
    the manifest itself.
    """

    run: str
    files: dict[str, int]


def write_manifest(checkpoint: Path, run: str) -> None:
    """Mark `checkpoint` as complete: flushes all its files to the disk, then writes the manifest.

    Raises:
        OSError: the manifest cannot be written.
    """
    flush_tree(checkpoint)
    write(checkpoint / NAME, Manifest(run=run, files=_sizes_of(checkpoint)).model_dump_json(indent=1))
    flush(checkpoint)
    flush(checkpoint.parent)


def read_manifest(checkpoint: Path) -> Manifest | None:
    """Returns the manifest of `checkpoint`, or None if it cannot be read; its files are not checked."""
    try:
        return Manifest.model_validate_json((checkpoint / NAME).read_bytes())
    except (OSError, ValidationError):
        return None


def what_is_wrong(checkpoint: Path) -> str | None:
    """Returns why `checkpoint` is not complete, or None if it is."""
    manifest = read_manifest(checkpoint)
    if manifest is None:
        return f"without a {NAME} it was not written to its end"
    try:
        found = _sizes_of(checkpoint)
    except OSError as error:
        return one_line(error)
    for name in found.keys() - manifest.files.keys():
        return f"{name} in it is none of its files"
    for name, size in manifest.files.items():
        if name not in found:
            return f"{name} is missing"
        if found[name] != size:
            return f"{name} has {found[name]} bytes and not {size}"
    return None


def _sizes_of(checkpoint: Path) -> dict[str, int]:
    paths = (path for path in sorted(checkpoint.rglob("*")) if not path.is_dir() and path != checkpoint / NAME)
    return {path.relative_to(checkpoint).as_posix(): path.stat().st_size for path in paths}


def checkpoints(output_dir: str | Path) -> list[Path]:
    """Returns the directories `checkpoint-N` in `output_dir`, complete or not, oldest first; no `checkpoint-best`."""
    if not Path(output_dir).is_dir():
        return []
    found = [(int(match[1]), path) for path in Path(output_dir).iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def last_complete_checkpoint(output_dir: str, run: str | None = None) -> str | None:
    """Returns the newest complete checkpoint, of the given `run` if there is one."""
    for path in reversed(checkpoints(output_dir)):
        manifest = read_manifest(path)
        if manifest is not None and run in (None, manifest.run) and what_is_wrong(path) is None:
            return str(path)
    return None


def resume_path(resume_from_checkpoint: str | None, output_dir: str) -> str | None:
    """Returns the checkpoint for `--resume_from_checkpoint`: "latest" (or "true") or a path; None for a new run.

    Raises:
        UserError: there is no complete checkpoint, or it holds weights only.
    """
    if resume_from_checkpoint is None or resume_from_checkpoint.lower() == "false":
        return None
    given = f"--resume_from_checkpoint {resume_from_checkpoint}"
    if resume_from_checkpoint.lower() in ("latest", "true"):
        chosen = last_complete_checkpoint(output_dir)
        if chosen is None:
            torn = [f"{path.name}: {what_is_wrong(path)}" for path in checkpoints(output_dir)[-1:]]
            raise UserError(
                f"{given}: no complete checkpoint in {output_dir}"
                + "".join(f" ({why}; --overwrite_output_dir starts anew)" for why in torn)
            )
    else:
        chosen = resume_from_checkpoint
        wrong = what_is_wrong(Path(chosen)) if Path(chosen).is_dir() else "no such directory"
        if wrong is not None:
            inside = last_complete_checkpoint(chosen)
            hint = f"; did you mean {inside}?" if inside else "; give a checkpoint-N directory, or latest"
            raise UserError(f"{given}: no complete checkpoint there ({wrong}){hint}")
    manifest = read_manifest(Path(chosen))
    assert manifest is not None
    if not any(name.startswith(("optimizer", "global_step")) for name in manifest.files):  # of a Trainer, of DeepSpeed
        raise UserError(
            f"{given}: {chosen} holds weights alone (--save_only_model), without what training goes on with"
        )
    return chosen


def unfit(checkpoint: str) -> str:
    """Returns the start of the error for a checkpoint that does not match this run."""
    return (
        f"--resume_from_checkpoint {checkpoint} does not fit this run; resume with the flags that it was written with"
    )


def check_output_dir(output_dir: str) -> None:
    """Raises UserError if `output_dir` or a parent of it is a file, or if it is not a valid path."""
    if not output_dir.strip():
        raise UserError("--output_dir is empty; give a directory ('.' for the one that you are in)")
    path = Path(output_dir)
    try:
        first = next((place for place in (path, *path.parents) if place.exists()), None)
    except OSError as error:  # such as a name that is too long
        raise UserError(f"--output_dir {output_dir}: {one_line(error, 100)}; give a directory") from error
    if first is not None and not first.is_dir():
        raise UserError(f"--output_dir {output_dir}: {first} is a file; give a directory")


def check_same_kind(output_dir: str, lora: bool) -> None:
    """Raises UserError when `output_dir` holds the weights of a full run and this one trains adapters, or the reverse.

    With both in one folder, the old adapter would be loaded onto the new weights.
    """
    names, theirs, ours = (WHOLE, "a whole model", "LoRA") if lora else (ADAPTER, "LoRA adapters", "all weights")
    for place in (Path(output_dir), *checkpoints(output_dir)):
        for name in names:
            if (place / name).is_file():
                raise UserError(
                    f"--output_dir {output_dir} holds {theirs} of an earlier run ({place / name}) and this one trains "
                    f"{ours}: the folder would load as a mixture; give another directory, or move that one away"
                )


class RunDirectory:
    """The directory that a run writes to and resumes from; it belongs to one run and one process at a time.

    Nothing is written before `open`.

    Attributes:
        path: the directory.
        checkpoint: the checkpoint to resume from, None for a new run.
        run: the identity of the run: that of the checkpoint, or a new one.

    Raises:
        UserError: `output_dir` is a file or holds another run, or there is no complete checkpoint to resume from.
    """

    def __init__(self, output_dir: str, resume: str | None = None, overwrite: bool = False, *, lora: bool) -> None:
        check_output_dir(output_dir)
        self.path, self.overwrite, self.lora, self.run = Path(output_dir), overwrite, lora, uuid.uuid4().hex
        self.checkpoint = resume_path(resume, output_dir)
        if overwrite and self.checkpoint is not None:
            raise UserError(
                "--overwrite_output_dir throws the earlier run away and --resume_from_checkpoint goes on with it: "
                "give one of them"
            )
        if overwrite:
            return
        check_same_kind(output_dir, lora)
        if self.checkpoint is None:
            self._refuse_a_used_one()
            return
        check_same_kind(self.checkpoint, lora)
        manifest = read_manifest(Path(self.checkpoint))
        assert manifest is not None
        self.run = manifest.run
        for path in checkpoints(self.path):
            other = read_manifest(path)
            if other is not None and other.run != self.run:
                raise UserError(
                    f"--output_dir {self.path} holds {path.name} of another run than {self.checkpoint}; give another "
                    "directory, or the --resume_from_checkpoint of that run"
                )

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
        """Delete unfinished checkpoints of killed runs, and dangling symlinks to checkpoints.

        With `overwrite`, the first call also deletes the earlier run's checkpoints and result.
        """
        state = PartialState()
        if state.is_main_process:
            left = [path for path in checkpoints(self.path) if self.overwrite or not (path / NAME).exists()]
            if self.overwrite:
                left += [file for name in _RESULT for file in self.path.glob(name)]
            for path in left:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
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
        needed = sum(p.numel() * p.element_size() for p in [*saved, *moments * trained])
        free = shutil.disk_usage(self.path).free
        if PartialState().num_processes == 1 and free < needed:
            raise WorkFailed(
                f"--output_dir {self.path}: a checkpoint takes {format_bytes(needed)}, {format_bytes(free)} are free; "
                "nothing was trained: make room, or give a directory on another disk"
            )

    def finish(self, step: int, limit: int | None, best: str | None = None) -> None:
        """Mark `checkpoint-{step}` as complete, then delete older ones beyond `limit`, except the `best` one.

        A Trainer that deletes them itself does so before the new one has a manifest.
        """
        write_manifest(self.path / f"checkpoint-{step}", self.run)
        rotate_checkpoints(str(self.path), limit, best)

    def drop_unfinished(self) -> None:
        """Delete the newest checkpoint if it has no manifest, to free disk space."""
        for path in checkpoints(self.path)[-1:]:
            if not (path / NAME).exists():
                shutil.rmtree(path, ignore_errors=True)

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
