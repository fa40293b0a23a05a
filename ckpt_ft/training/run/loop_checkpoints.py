"""Checkpoints of an Accelerate loop that are whole or not there, whenever the run is killed.

Everything is written to a hidden directory, flushed to the disk, and then renamed to `checkpoint-N`; renaming within a
directory is atomic on POSIX. Old ones are renamed away before they are deleted, and only once the new one stands.
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

from safetensors import SafetensorError

from ckpt_ft.errors import UserError, WorkFailed, one_line
from ckpt_ft.files import flush, flush_tree
from ckpt_ft.units import format_bytes

from .resume import check_output_dir, last_complete_checkpoint

if TYPE_CHECKING:
    from accelerate import Accelerator

MARK = "trainer_state.json"  # the file by which resume.py, too, knows a complete checkpoint


def open_output_dir(accelerator: Accelerator, output_dir: str, resuming: bool) -> None:
    """Make `output_dir` and clear it of what a killed run left half-written or half-deleted. Called on every rank.

    Raises:
        UserError: it is a file, or it holds checkpoints of an earlier run and this one does not resume: the two runs'
        checkpoints would be mixed, and "latest" could be either's.
    """
    check_output_dir(output_dir)
    latest = last_complete_checkpoint(output_dir)
    if latest is not None and not resuming:
        raise UserError(
            f"--output_dir {output_dir} holds {Path(latest).name} of an earlier run; continue it with "
            "--resume_from_checkpoint latest, or give another directory"
        )
    if accelerator.is_main_process:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        for left in Path(output_dir).glob(".checkpoint-*"):
            shutil.rmtree(left)
    accelerator.wait_for_everyone()


def save_checkpoint(
    accelerator: Accelerator,
    output_dir: str,
    step: int,
    samples_seen: int,
    identity: dict[str, Any],
    total_limit: int | None = None,
) -> None:
    """Write `checkpoint-{step}`: all that `accelerator` prepared or registered, and every rank's RNG states.

    Called on every rank. `identity` is what a run must share with this one to resume from it (JSON values). Of all
    complete checkpoints the newest `total_limit` are kept.

    Raises:
        WorkFailed: it could not be written, for instance because the disk is full; those before it are untouched.
    """
    root, name = Path(output_dir), f"checkpoint-{step}"
    partial = root / f".{name}.partial"

    def publish() -> None:
        state = {"global_step": step, "samples_seen": samples_seen, "identity": identity}
        (partial / MARK).write_text(json.dumps(state), encoding="utf-8")
        flush_tree(partial)
        _remove(root / name)  # there only after resuming from an older one
        os.rename(partial, root / name)
        flush(root)

    try:
        written(accelerator, root, name, lambda: accelerator.save_state(str(partial)))
        written(accelerator, root, name, publish, main_only=True)
    except WorkFailed:
        if accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)  # gives the disk back
        raise
    if accelerator.is_main_process and total_limit is not None:
        standing = sorted(root.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
        for old in standing[:-total_limit]:
            _remove(old)
    accelerator.wait_for_everyone()


def load_checkpoint(accelerator: Accelerator, checkpoint: str, identity: dict[str, Any]) -> tuple[int, int]:
    """Bring all that `accelerator` prepared or registered, and the RNGs, to where `checkpoint` was written.

    Returns:
        The optimizer steps made and the samples seen until then.

    Raises:
        UserError: its `identity` is another, or it was not written by this module.
    """
    state = json.loads((Path(checkpoint) / MARK).read_text(encoding="utf-8"))
    theirs = state.get("identity", {})
    for name, ours in identity.items():
        if theirs.get(name) != ours:
            raise UserError(
                f"--resume_from_checkpoint {checkpoint} was written with {name} {theirs.get(name)}, this run has "
                f"{ours}; resume with the flags that it was written with"
            )
    try:
        accelerator.load_state(checkpoint)
        return state["global_step"], state["samples_seen"]
    except Exception as error:  # unpickling a damaged file raises whatever its bytes lead to
        reason = one_line(f"{type(error).__name__}: {error}", 300)
        raise UserError(
            f"--resume_from_checkpoint {checkpoint} does not fit this run ({reason}); resume with the flags "
            "that it was written with"
        ) from error


def written(
    accelerator: Accelerator, root: Path, name: str, write: Callable[[], object], main_only: bool = False
) -> None:
    """Run `write` on every rank, or on the main one; when it fails on any, fail on all, so that none waits for ever.

    Raises:
        WorkFailed: naming `name` in `root`, the reason, and the space that is left there.
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
        latest = last_complete_checkpoint(str(root))
        intact = f"; {Path(latest).name} is whole: --resume_from_checkpoint latest goes on from it" if latest else ""
        free = format_bytes(shutil.disk_usage(root).free)
        raise WorkFailed(f"writing {name} to {root} failed: {problems[0]} ({free} free on the disk){intact}")


@contextmanager
def clear_when_disk_is_full() -> Iterator[None]:
    """Turn a full disk, met elsewhere than in a checkpoint, into a `WorkFailed`. Also a decorator."""
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
