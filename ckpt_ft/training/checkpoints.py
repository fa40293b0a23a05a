"""Checkpoints of a Trainer and of the diffusion recipes' loop: complete or absent, also when a signal stops the run.

    directory = RunDirectory.of(args)               # validates, writes nothing
    directory.open()                                # locks it for this process
    ...                                             # load data and model: the input is valid
    with keep_checkpoints(trainer, directory):      # deletes an earlier run if it is to be overwritten
        trainer.train(resume_from_checkpoint=directory.checkpoint)

The manifest of a checkpoint has the name and the size of every file. It is written last and atomically, after all
files are on the disk, and deleted before the files are written again. A checkpoint is complete when its files have the
sizes in its manifest. One that is partial or lacks a file is never read.

SIGINT (Ctrl-C) and SIGTERM (sent by schedulers) are deferred until the step and a checkpoint are finished. A second
signal stops the process immediately. Loading a loop's checkpoint runs no code: tensors are safetensors, the rest is
read with `weights_only`.

transformers saves many models (Qwen-VL, LLaVA, mixtures of experts) under the names of their published checkpoints,
and converts these in `from_pretrained` only. A Trainer that resumes, or loads the best checkpoint at the end, does not
convert them: it logs a warning and keeps its current weights. `published_names_loaded` loads them.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import gather_object
from filelock import FileLock, Timeout
from pydantic import BaseModel
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import rotate_checkpoints

from ckpt_ft.compat.libraries import LOAD_BEST, LOAD_WEIGHTS
from ckpt_ft.errors import Interrupted, UserError, WorkFailed, one_line
from ckpt_ft.files import flush, flush_tree, sweep, write
from ckpt_ft.units import format_bytes
from ckpt_ft.validation import FirstStep, is_of_the_disk, library_reads
from ckpt_ft.workloads.adapters import without_adapters

MANIFEST = "manifest.json"
LOCK_FILE = "_run.lock"  # `--push_to_hub` does not upload files named _*
_CHECKPOINT = re.compile(r"checkpoint-(\d{1,18})")
PIPELINE_LORA = "pytorch_lora_weights.safetensors"  # LoRA weights of a U-Net, transformer or text encoder
ADAPTER_FILES = ("adapter_config.json", PIPELINE_LORA)  # files that identify an adapter of PEFT or diffusers
MODEL_FILES = ("config.json", "model_index.json")
_RESULT_FILES = (
    *ADAPTER_FILES,
    *MODEL_FILES,
    "adapter_model.safetensors",
    "model*.safetensors*",
    "losses.jsonl",
    "samples/step-*.png",
)
_STATE_FILE = "training_state.pt"  # of a loop
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_FORWARDED_WITHIN = 1.0  # seconds: a launcher forwards a signal that the terminal has already sent to its ranks


class Manifest(BaseModel):
    """The contents of a complete checkpoint: the size of each file but this one, by its path below the checkpoint."""

    files: dict[str, int]


def write_manifest(checkpoint: Path) -> None:
    """Marks `checkpoint` as complete: flushes all its files to the disk, then writes the manifest.

    Raises:
        OSError: the manifest cannot be written.
    """
    flush_tree(checkpoint)
    files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path.name != MANIFEST]
    sizes = {path.relative_to(checkpoint).as_posix(): path.stat().st_size for path in files}
    write(checkpoint / MANIFEST, Manifest(files=sizes).model_dump_json(indent=1))
    flush(checkpoint)
    flush(checkpoint.parent)


def read_manifest(checkpoint: Path) -> Manifest | None:
    """Returns the manifest of `checkpoint`, or None if it cannot be read; its files are not checked."""
    try:
        return Manifest.model_validate_json((checkpoint / MANIFEST).read_bytes())
    except (OSError, ValueError):  # no file, no name of a file, or no manifest
        return None


def why_incomplete(checkpoint: Path) -> str | None:
    """Returns why `checkpoint` is not complete, or None if it is."""
    if not os.path.isdir(checkpoint):
        return "no such directory"
    manifest = read_manifest(checkpoint)
    if manifest is None:
        return f"without a {MANIFEST} it was not written to its end"
    for name, size in manifest.files.items():
        path = checkpoint / name
        if not os.path.isfile(path):  # `Path.is_file` raises for a name that is too long
            return f"{name} is missing"
        if (found := os.path.getsize(path)) != size:
            return f"{name} has {found} bytes instead of {size}"
    return None


def print_on_main(text: str) -> None:
    """Prints `text` on the main process, at once: output may go to a log file."""
    if PartialState().is_main_process:
        print(text, flush=True)


def checkpoints(output_dir: str | Path) -> list[Path]:
    """Returns the directories `checkpoint-N` in `output_dir`, complete or not, oldest first; no `checkpoint-best`."""
    if not os.path.isdir(output_dir):
        return []
    paths = Path(output_dir).iterdir()
    found = [(int(match[1]), path) for path in paths if (match := _CHECKPOINT.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def last_complete_checkpoint(output_dir: str | Path) -> str | None:
    """Returns the newest complete checkpoint; None if there is none."""
    return next((str(path) for path in reversed(checkpoints(output_dir)) if why_incomplete(path) is None), None)


def damaged(output_dir: str | Path, chosen: str | None = None) -> list[str]:
    """Returns a sentence for each checkpoint that is not complete, newest first, down to the `chosen` one."""
    newer = takewhile(lambda path: str(path) != chosen, reversed(checkpoints(output_dir)))
    found = ((path.name, why_incomplete(path)) for path in newer)
    return [f"{name} is damaged: {why}" for name, why in found if why is not None]


def resume_path(resume_from_checkpoint: str | None, output_dir: str) -> str | None:
    """The checkpoint for `--resume_from_checkpoint`: "latest" (or "true") or a path; None for a new run.

    Raises:
        UserError: there is no complete checkpoint, or it holds weights only.
    """
    if resume_from_checkpoint is None or resume_from_checkpoint.lower() == "false":
        return None
    given = f"--resume_from_checkpoint {resume_from_checkpoint}"
    chosen: str | None = resume_from_checkpoint
    if resume_from_checkpoint.lower() in ("latest", "true"):
        chosen = last_complete_checkpoint(output_dir)
    manifest = None if chosen is None else read_manifest(Path(chosen))
    why = why_incomplete(Path(chosen)) if chosen else "; ".join([f"none in {output_dir}", *damaged(output_dir)])
    if why is not None or manifest is None:
        raise UserError(f"{given}: no complete checkpoint ({why}); give latest, or a directory checkpoint-N")
    if not any(name.startswith(("optimizer", "global_step")) for name in manifest.files):  # of a Trainer, of DeepSpeed
        raise UserError(
            f"{given}: {chosen} has weights only (--save_only_model), and resuming needs the optimizer state"
        )
    return chosen


def mismatch(checkpoint: str) -> str:
    return (
        f"--resume_from_checkpoint {checkpoint} does not fit this run; resume with the flags that it was written with"
    )


class RunDirectory:
    """The directory that a run writes to and resumes from; it belongs to one run and one process at a time.

    Nothing is written before `open`.

    Attributes:
        checkpoint: the checkpoint to resume from, None for a new run.

    Raises:
        UserError: `output_dir` holds another run, or there is no complete checkpoint to resume from.
    """

    def __init__(self, output_dir: str, resume: str | None = None, overwrite: bool = False) -> None:
        if not output_dir.strip():
            raise UserError("--output_dir is empty; give a directory ('.' for the current one)")
        self.path, self.overwrite = Path(output_dir), overwrite
        self.checkpoint = resume_path(resume, output_dir)
        if overwrite and self.checkpoint is not None:
            raise UserError(
                "--overwrite_output_dir deletes the earlier run and --resume_from_checkpoint continues it; "
                "give only one of them"
            )
        continues = self.checkpoint is not None and Path(self.checkpoint).parent.resolve() == self.path.resolve()
        there = [*reversed(checkpoints(self.path)), *(self.path / name for name in (*ADAPTER_FILES, *MODEL_FILES))]
        used = next((path.name for path in there if os.path.exists(path)), None)  # a name may be too long for `stat`
        if used is not None and not overwrite and not continues:
            raise UserError(
                f"--output_dir {self.path} holds {used} of an earlier run; continue it with --resume_from_checkpoint "
                "latest, replace it with --overwrite_output_dir, or give another directory"
            )

    def open(self) -> None:
        """Create the directory and lock it until this process ends. Called on every rank.

        Raises:
            UserError: another process has locked it, or it cannot be a directory that this process writes to.
        """
        state = PartialState()
        if state.is_main_process:
            _lock(self.path.absolute())
            if self.checkpoint is not None:
                resuming = f"resuming from {Path(self.checkpoint).name}"
                print("; ".join([*damaged(self.path, self.checkpoint), resuming]), flush=True)
        state.wait_for_everyone()

    def clear(self) -> None:
        """Deletes unfinished checkpoints of killed runs, and links to none.

        With `overwrite`, the first call also deletes the earlier run's checkpoints and result.
        """
        state = PartialState()
        if state.is_main_process:
            for path in checkpoints(self.path):
                if not self.overwrite and (path / MANIFEST).exists():
                    continue
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            for pattern in _RESULT_FILES if self.overwrite else ():
                for file in self.path.glob(pattern):
                    file.unlink()
            sweep(self.path)
        self.overwrite = False
        state.wait_for_everyone()

    def finish(self, step: int, limit: int | None, best: str | None = None) -> None:
        """Mark `checkpoint-{step}` as complete, then delete older ones beyond `limit`, except the `best` one.

        A Trainer that deletes them itself does so before the new one has a manifest.
        """
        write_manifest(self.path / f"checkpoint-{step}")
        rotate_checkpoints(str(self.path), limit, best)

    def write_failure(self, what: str, reason: str) -> WorkFailed:
        """Returns an error that says why `what` was not written, the free space, and the last complete checkpoint."""
        latest = last_complete_checkpoint(self.path)
        intact = (
            f"; {Path(latest).name} is complete: --resume_from_checkpoint latest continues from it" if latest else ""
        )
        free = format_bytes(shutil.disk_usage(self.path).free)
        return WorkFailed(f"writing {what} to {self.path} failed: {reason} ({free} free on the disk){intact}")


@cache
def _lock(path: Path) -> FileLock:
    """Lock the directory until this process ends, however it ends."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path / LOCK_FILE)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UserError(f"--output_dir {path}: another process trains into it; give another directory") from error
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise UserError(f"--output_dir {path} cannot be written to ({one_line(error)})") from error
    return lock


class Stop:
    """Context manager that defers SIGINT and SIGTERM to the end of the step.

    Attributes:
        signal: the number of the received signal, or None.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._received_at = 0.0
        self._process = os.getpid()
        self._before: dict[int, Any] = {}
        self._sum: torch.Tensor | None = None

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers in the main thread only
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, *raised: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def agreed(self) -> bool:
        """Whether to stop after this step. Called on every rank after every step; all get the same answer.

        With several ranks, returns the previous step's answer, whose all-reduce is already done, so no rank waits.
        """
        state = PartialState()
        if state.num_processes == 1:
            return self.signal is not None
        answer = self._sum is not None and bool(self._sum.item())
        self._sum = torch.tensor(float(self.signal is not None), device=state.device)
        torch.distributed.all_reduce(self._sum)
        return answer

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a data loader worker, which inherits the handler
            if number == signal.SIGTERM:
                os._exit(128 + number)
            return
        if self.signal is None:
            self.signal, self._received_at = number, time.monotonic()
            name = signal.Signals(number).name
            os.write(2, f"\n{name}: finishing this step and a checkpoint; a second signal stops at once\n".encode())
        elif time.monotonic() - self._received_at > _FORWARDED_WITHIN:
            raise Interrupted(
                "stopped at once; --resume_from_checkpoint latest continues from the last checkpoint", number
            )


def stopped(number: int | None, checkpoint: str | None) -> Interrupted:
    """Returns the error for a run that stopped and left `checkpoint`; the main process says how to resume."""
    number = signal.SIGTERM if number is None else number  # another rank got the signal
    said = (
        f"stopped by {signal.Signals(number).name}; {checkpoint} is complete: the same command with "
        "--resume_from_checkpoint latest continues from it"
    )
    return Interrupted(said if PartialState().is_main_process else "", number)


class _Finished(Exception):
    """The resumed checkpoint is the last one of its run: its weights are loaded and no training is left."""


class Checkpoints(TrainerCallback):
    """Writes each manifest before older checkpoints are deleted; saves the result before other callbacks report."""

    def __init__(self, trainer: Trainer, directory: RunDirectory, stop: Stop) -> None:
        self.trainer, self.directory, self.stop = trainer, directory, stop
        self.limit = trainer.args.save_total_limit
        trainer.args.save_total_limit = None  # `RunDirectory.finish` deletes them
        self.stopping = False
        resumed = directory.checkpoint
        self.first = FirstStep(mismatch(resumed) if resumed else "training cannot begin with these flags")

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        model, resumed = kwargs["model"], self.directory.checkpoint
        adapters = without_adapters(model) is not model
        # Of a run that is finished nothing else fails: no step is made, and the result is saved.
        if resumed and Path(resumed, MODEL_FILES[0] if adapters else ADAPTER_FILES[0]).is_file():
            raise UserError(mismatch(resumed))
        if state.global_step >= state.max_steps:  # a Trainer would do one more step
            raise _Finished

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.first.begins()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.first.made()
        if state.is_world_process_zero:  # a newer one, which this run, resumed from an older one, replaces
            (self.directory.path / f"checkpoint-{state.global_step}" / MANIFEST).unlink(missing_ok=True)
        if self.stop.agreed() and state.global_step < state.max_steps:
            self.stopping = control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.trainer.accelerator.wait_for_everyone()  # each rank writes its RNG state
        if state.is_world_process_zero:
            self.directory.finish(state.global_step, self.limit, state.best_model_checkpoint)
        self.trainer.accelerator.wait_for_everyone()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        if not self.stopping:
            self.trainer.save_model()  # before the reporting callbacks, whose errors must not cost the weights


@contextmanager
def keep_checkpoints(trainer: Trainer, directory: RunDirectory) -> Iterator[None]:
    """Context manager for `trainer.train()` that adds `Checkpoints`.

    If the resumed run is finished, nothing is trained, and its weights are saved.

    Raises:
        Interrupted: SIGINT or SIGTERM was received; the last step has a checkpoint.
        UserError: the checkpoint is of another model or not a Trainer's, or the first step fails with these flags and
            data.
        WorkFailed: a checkpoint or the result could not be written; earlier checkpoints are complete.
    """
    directory.clear()
    with Stop() as stop:
        keeper = Checkpoints(trainer, directory, stop)
        trainer.callback_handler.callbacks.insert(0, keeper)
        try:
            with keeper.first, published_names_loaded(trainer):
                try:
                    yield
                except _Finished:
                    print_on_main(f"{directory.checkpoint} is the last of a finished run: nothing is left to train")
                    if trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint is not None:
                        getattr(trainer, LOAD_BEST)()
                    trainer.save_model()
        except (OSError, RuntimeError, SafetensorError) as error:
            if not is_of_the_disk(error):
                raise
            reason = one_line(f"{type(error).__name__}: {error}", 300)
            raise directory.write_failure("a checkpoint or the result", reason) from error
    if keeper.stopping:
        raise stopped(stop.signal, last_complete_checkpoint(directory.path))


@contextmanager
def published_names_loaded(trainer: Trainer) -> Iterator[None]:
    """Context manager: if names differ, `trainer` loads its checkpoints as `from_pretrained` does."""
    own, own_best = getattr(trainer, LOAD_WEIGHTS), getattr(trainer, LOAD_BEST)

    def load(checkpoint: str, model: Any = None) -> None:
        if not _load_converted(trainer, checkpoint):
            own(checkpoint, model)

    def load_best() -> None:
        best = trainer.state.best_model_checkpoint
        if best is None or not _load_converted(trainer, best):
            own_best()

    with patch.object(trainer, LOAD_WEIGHTS, load), patch.object(trainer, LOAD_BEST, load_best):
        yield


def _load_converted(trainer: Trainer, checkpoint: str) -> bool:
    """Loads full weights that are saved under names that the model does not have; returns whether they are."""
    model: Any = trainer.model
    if not isinstance(model, PreTrainedModel) or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return False
    names: set[str] = set()
    for file in Path(checkpoint).glob("model*.safetensors"):
        with safe_open(file, "pt") as weights:
            names |= set(weights.keys())
    if names <= model.state_dict().keys():
        return False
    read, info = type(model).from_pretrained(checkpoint, dtype=model.dtype, output_loading_info=True)
    if info["missing_keys"]:
        raise ValueError(f"it has no {', '.join(sorted(info['missing_keys'])[:3])}")
    model.load_state_dict(read.state_dict())
    return True


def save_checkpoint(
    accelerator: Accelerator, directory: RunDirectory, step: int, state: dict[str, Any], limit: int | None = None
) -> None:
    """Write `checkpoint-{step}` of a loop: the objects that `accelerator` prepared, all RNG states, and `state`.

    Called on every rank. `state` has numbers, texts and tensors; its "identity" holds the settings that a resumed run
    must share. The newest `limit` checkpoints are kept.

    Raises:
        WorkFailed: writing failed, for instance because the disk is full; earlier checkpoints are untouched.
    """
    target = directory.path / f"checkpoint-{step}"

    def finish() -> None:
        torch.save(state, target / _STATE_FILE)
        directory.finish(step, limit)

    if accelerator.is_main_process:  # one with this name exists only after resuming from an older one
        shutil.rmtree(target, ignore_errors=True)
    accelerator.wait_for_everyone()
    write_on_ranks(accelerator, directory, target.name, lambda: accelerator.save_state(str(target)))
    write_on_ranks(accelerator, directory, target.name, finish, main_only=True)


def load_checkpoint(accelerator: Accelerator, checkpoint: str, identity: dict[str, Any]) -> dict[str, Any]:
    """Restore what `accelerator` prepared and the RNG states; returns the `state` of `save_checkpoint`, on the CPU.

    Raises:
        UserError: its `identity` differs, or another program wrote it.
    """
    with library_reads(mismatch(checkpoint)):
        state: dict[str, Any] = torch.load(Path(checkpoint) / _STATE_FILE, map_location="cpu", weights_only=True)
        for name, ours in identity.items():
            theirs = state["identity"].get(name)
            if theirs != ours:
                raise UserError(
                    f"--resume_from_checkpoint {checkpoint} was written with {name} {theirs}, this run has {ours}; "
                    "resume with the flags that it was written with"
                )
        accelerator.load_state(checkpoint)
    return state


def write_on_ranks(
    accelerator: Accelerator, directory: RunDirectory, what: str, write: Callable[[], object], main_only: bool = False
) -> None:
    """Run `write` on every rank, or on the main one; if it fails on one rank, fail on all, so that none waits forever.

    Raises:
        WorkFailed: `what` could not be written (see `RunDirectory.write_failure`).
    """
    problems: list[str] = []
    if accelerator.is_main_process or not main_only:
        try:
            write()
        except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors wrap a full disk's OSError
            problems = [one_line(f"{type(error).__name__}: {error}")]
    problems = gather_object(problems)
    if problems:
        raise directory.write_failure(what, problems[0])
