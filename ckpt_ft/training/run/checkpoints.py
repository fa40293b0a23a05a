"""Complete checkpoints: how they are marked, and which one a run resumes from.

The manifest of a checkpoint has its run, and the name and size of every file. It is written last and atomically, after
all files are on the disk. A checkpoint is complete when its files match its manifest. A checkpoint that is partial,
lacks a file, was overwritten by another run or contains a foreign file is never read.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError, field_validator

from ckpt_ft.errors import UserError, one_line
from ckpt_ft.files import flush, flush_tree, make_directory, write

logger = logging.getLogger(__name__)
NAME = "manifest.json"
_NO_PLACE = (FileExistsError, FileNotFoundError, NotADirectoryError, PermissionError)


class Manifest(BaseModel):
    """The contents of a complete checkpoint.

    run: the identity of the run that wrote it. files: the size of each file, by its path below the checkpoint, without
    the manifest itself.
    """

    run: str
    files: dict[str, int]

    @field_validator("files", mode="before")
    @classmethod
    def _sizes(cls, files: dict[str, Any]) -> dict[str, Any]:
        """Earlier versions wrote a digest beside each size."""
        return {name: entry["bytes"] if isinstance(entry, dict) else entry for name, entry in files.items()}


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


def make_whole(path: Path, fill: Callable[[Path], object]) -> Path:
    """Returns the directory `path`, filled by `fill(directory)` the first time; refills a damaged one with a warning.

    Raises:
        UserError: the directory cannot be created.
        OSError: the disk is full.
    """

    def filled(directory: Path) -> None:
        fill(directory)
        write_manifest(directory, path.name)

    try:
        wrong = what_is_wrong(path) if path.is_dir() else None
        if wrong is not None:
            logger.warning("%s is made again: %s", path, wrong)
            shutil.rmtree(path)
        return make_directory(path, filled)
    except _NO_PLACE as error:
        raise UserError(
            f"{path} cannot be made ({error.strerror}: {error.filename}); CKPT_FT_CACHE names another directory for "
            "what is made once"
        ) from error


def _sizes_of(checkpoint: Path) -> dict[str, int]:
    paths = (path for path in sorted(checkpoint.rglob("*")) if not path.is_dir() and path != checkpoint / NAME)
    return {path.relative_to(checkpoint).as_posix(): path.stat().st_size for path in paths}


_NAME = re.compile(r"checkpoint-(\d{1,18})")
PIPELINE_LORA = "pytorch_lora_weights.safetensors"  # LoRA weights of a U-Net, transformer or text encoder
ADAPTER = ("adapter_config.json", PIPELINE_LORA)  # files that identify an adapter of PEFT or diffusers
WHOLE = ("config.json", "model_index.json")


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
