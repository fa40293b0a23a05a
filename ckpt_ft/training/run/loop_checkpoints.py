"""Atomic checkpoints for an Accelerate loop: a killed run never leaves a partial `checkpoint-N`.

Files are written to a hidden directory, flushed to the disk, and then renamed to `checkpoint-N`; renaming within a
directory is atomic on POSIX. Old checkpoints are deleted after the new one is in place, and renamed first.
Loading a checkpoint runs no code: numbers are JSON, tensors are safetensors or are read with `weights_only`.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, NonNegativeInt
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ckpt_ft.errors import UserError, WorkFailed, one_line
from ckpt_ft.files import flush
from ckpt_ft.validation import library_reads

from .checkpoints import checkpoints, unfit, write_manifest
from .directory import RunDirectory

if TYPE_CHECKING:
    from accelerate import Accelerator

MARK = "trainer_state.json"  # training progress, under the file name that a Trainer uses
_ST = ".safetensors"


class _State(BaseModel):
    """Training progress, and the settings that a resumed run must share."""

    global_step: NonNegativeInt
    samples_seen: NonNegativeInt
    identity: dict[str, Any]


def save_checkpoint(
    accelerator: Accelerator,
    directory: RunDirectory,
    step: int,
    samples_seen: int,
    identity: dict[str, Any],
    total_limit: int | None = None,
) -> None:
    """Write `checkpoint-{step}`: the objects that `accelerator` prepared, the parts of `hold_state`, all RNG states.

    Called on every rank. `identity` holds the settings that a resumed run must share (JSON values). The newest
    `total_limit` complete checkpoints are kept.

    Raises:
        WorkFailed: writing failed, for instance because the disk is full; earlier checkpoints are untouched.
    """
    root, name = directory.path, f"checkpoint-{step}"
    partial = root / f".{name}.partial"

    def publish() -> None:
        state = _State(global_step=step, samples_seen=samples_seen, identity=identity)
        (partial / MARK).write_text(state.model_dump_json(), encoding="utf-8")
        write_manifest(partial, directory.run)
        _remove(root / name)  # exists only after resuming from an older checkpoint
        os.rename(partial, root / name)
        flush(root)

    try:
        written(accelerator, directory, name, lambda: accelerator.save_state(str(partial)))
        written(accelerator, directory, name, publish, main_only=True)
    except WorkFailed:
        if accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)  # frees the space
        raise
    if accelerator.is_main_process and total_limit is not None:
        for old in checkpoints(root)[:-total_limit]:
            _remove(old)
    accelerator.wait_for_everyone()


def load_checkpoint(accelerator: Accelerator, checkpoint: str, identity: dict[str, Any]) -> tuple[int, int]:
    """Restore everything that `save_checkpoint` wrote.

    Returns:
        The number of optimizer steps done and of samples seen.

    Raises:
        UserError: its `identity` differs, or another program wrote it.
    """
    with library_reads(unfit(checkpoint)):
        state = _State.model_validate_json((Path(checkpoint) / MARK).read_bytes())
        for name, ours in identity.items():
            theirs = state.identity.get(name)
            if theirs != ours:
                raise UserError(
                    f"--resume_from_checkpoint {checkpoint} was written with {name} {theirs}, this run has {ours}; "
                    "resume with the flags that it was written with"
                )
        accelerator.load_state(checkpoint)
    return state.global_step, state.samples_seen


def hold_state(accelerator: Accelerator, **parts: Any) -> None:
    """Save the `state_dict()` of each part in checkpoints: numbers in `NAME.json`, tensors in `NAME.safetensors`.

    `accelerator.register_for_checkpointing` would pickle them, and unpickling can run code from the file.
    """

    def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        if accelerator.is_main_process:
            for name, part in parts.items():
                _save_state(part.state_dict(), Path(output_dir) / name)

    def load(models: list[Any], input_dir: str) -> None:
        for name, part in parts.items():
            part.load_state_dict(_load_state(Path(input_dir) / name))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def _save_state(state: dict[str, Any], base: Path) -> None:
    lists = {name: value for name, value in state.items() if isinstance(value, list) and _are_tensors(value)}
    base.with_suffix(".json").write_text(
        json.dumps({name: len(lists[name]) if name in lists else value for name, value in state.items()}),
        encoding="utf-8",
    )
    tensors = {f"{name}.{place}": tensor for name, values in lists.items() for place, tensor in enumerate(values)}
    if tensors:
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, base.with_suffix(_ST)
        )


def _load_state(base: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(base.with_suffix(".json").read_text(encoding="utf-8"))
    tensors = load_file(base.with_suffix(_ST)) if base.with_suffix(_ST).exists() else {}
    for name in {place.rpartition(".")[0] for place in tensors}:
        state[name] = [tensors[f"{name}.{place}"] for place in range(state[name])]
    return state


def _are_tensors(values: list[Any]) -> bool:
    return bool(values) and all(isinstance(value, Tensor) for value in values)


def written(
    accelerator: Accelerator, directory: RunDirectory, what: str, write: Callable[[], object], main_only: bool = False
) -> None:
    """Run `write` on every rank, or on the main one; if it fails on one rank, fail on all, so that none waits forever.

    Raises:
        WorkFailed: `what` could not be written (see `RunDirectory.not_written`).
    """
    from accelerate.utils import gather_object

    problems: list[str] = []
    if accelerator.is_main_process or not main_only:
        try:
            write()
        except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors wrap a full disk's OSError
            problems = [one_line(f"{type(error).__name__}: {error}")]
    problems = gather_object(problems)
    if problems:
        raise directory.not_written(what, problems[0])


@contextmanager
def explained_full_disk() -> Iterator[None]:
    """Turn a full-disk error outside of checkpoints into a `WorkFailed` that says how to resume. Also a decorator."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise WorkFailed(
            f"the disk is full: {error}; checkpoints written before are whole: make room, then "
            "--resume_from_checkpoint latest"
        ) from error


def _remove(checkpoint: Path) -> None:
    """Rename a checkpoint, then delete it, so that an interrupted deletion leaves no partial checkpoint."""
    if checkpoint.exists():
        hidden = checkpoint.with_name(f".{checkpoint.name}.deleted")
        os.rename(checkpoint, hidden)
        shutil.rmtree(hidden)
