"""Checkpoints of an Accelerate loop that are whole or not there, whenever the run is killed.

Everything is written to a hidden directory, flushed to the disk, and then renamed to `checkpoint-N`; renaming within a
directory is atomic on POSIX. Old ones are renamed away before they are deleted, and only once the new one stands.
Nothing in them runs code when it is read: numbers are JSON, tensors are safetensors or read with `weights_only`.
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
from ckpt_ft.reading import library_reads

from .directory import RunDirectory
from .manifest import write_manifest
from .resume import checkpoints, unfit

if TYPE_CHECKING:
    from accelerate import Accelerator

MARK = "trainer_state.json"  # where the run stood, under the name that a Trainer's has
_ST = ".safetensors"


class _State(BaseModel):
    """Where a run stood, and what one that resumes it must share with it."""

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
    """Write `checkpoint-{step}`: what `accelerator` prepared, what `hold_state` was given, every rank's RNG states.

    Called on every rank. `identity` is what a run must share with this one to resume from it (JSON values). Of all
    complete checkpoints the newest `total_limit` are kept.

    Raises:
        WorkFailed: it could not be written, for instance because the disk is full; those before it are untouched.
    """
    root, name = directory.path, f"checkpoint-{step}"
    partial = root / f".{name}.partial"

    def publish() -> None:
        state = _State(global_step=step, samples_seen=samples_seen, identity=identity)
        (partial / MARK).write_text(state.model_dump_json(), encoding="utf-8")
        write_manifest(partial, directory.run)
        _remove(root / name)  # there only after resuming from an older one
        os.rename(partial, root / name)
        flush(root)

    try:
        written(accelerator, directory, name, lambda: accelerator.save_state(str(partial)))
        written(accelerator, directory, name, publish, main_only=True)
    except WorkFailed:
        if accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)  # gives the disk back
        raise
    if accelerator.is_main_process and total_limit is not None:
        for old in checkpoints(root)[:-total_limit]:
            _remove(old)
    accelerator.wait_for_everyone()


def load_checkpoint(accelerator: Accelerator, checkpoint: str, identity: dict[str, Any]) -> tuple[int, int]:
    """Bring all that `save_checkpoint` writes to where it was when `checkpoint` was written.

    Returns:
        The optimizer steps made and the samples seen until then.

    Raises:
        UserError: its `identity` is another, or it was not written by this module.
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
    """Have checkpoints hold the `state_dict()` of each part: numbers in `NAME.json`, tensors in `NAME.safetensors`.

    What `accelerator.register_for_checkpointing` is given is pickled, and unpickling runs what a file says.
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
    """Run `write` on every rank, or on the main one; when it fails on any, fail on all, so that none waits for ever.

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
    """Turn a full disk, met elsewhere than in a checkpoint, into a `WorkFailed` that says how to go on. Also a
    decorator."""
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
    """Delete a checkpoint; killed halfway, what is left does not look like one."""
    if checkpoint.exists():
        hidden = checkpoint.with_name(f".{checkpoint.name}.deleted")
        os.rename(checkpoint, hidden)
        shutil.rmtree(hidden)
