"""Writes complete checkpoints, of a Trainer and of the diffusion recipes' loop, also when a signal stops the run.

    with keep_checkpoints(trainer, directory):
        trainer.train(resume_from_checkpoint=directory.checkpoint)

SIGINT (Ctrl-C) and SIGTERM (sent by schedulers) are deferred until the step and a checkpoint are finished. A second
signal stops the process immediately. Loading a loop's checkpoint runs no code: tensors are safetensors, the rest is
read with `weights_only`.

transformers saves many models (Qwen-VL, LLaVA, mixtures of experts) under the names of their published checkpoints,
and converts these in `from_pretrained` only. A Trainer that resumes, or loads the best checkpoint at the end, does not
convert them: it logs a warning and keeps its current weights. `under_any_name` loads them.
"""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from safetensors import SafetensorError, safe_open
from transformers import TrainerCallback

from ckpt_ft.errors import Interrupted, UserError, WorkFailed, one_line
from ckpt_ft.redact import redacted
from ckpt_ft.validation import FirstStep, is_of_the_disk, library_reads

from .checkpoints import RunDirectory, unfit

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_OF_THE_START = ("resume_from_checkpoint", "overwrite_output_dir")  # flags that a resumed run must not repeat
_SAME = 1.0  # seconds: a launcher forwards a signal that the terminal has already sent to its ranks
_STATE = "training_state.pt"  # of a loop


class Stop:
    """Context manager that defers SIGINT and SIGTERM to the end of the step.

    Attributes:
        signal: the number of the received signal, or None.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._came = 0.0
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
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if self.signal is None:
            self.signal, self._came = number, time.monotonic()
            name = signal.Signals(number).name
            os.write(2, f"\n{name}: finishing this step and a checkpoint; once more stops at once\n".encode())
        elif time.monotonic() - self._came > _SAME:
            raise Interrupted(
                "stopped at once; --resume_from_checkpoint latest goes on from the last checkpoint", number
            )


def stopped(number: int | None, checkpoint: str | None) -> Interrupted:
    """Returns the error for a run that stopped and left `checkpoint`; the main process says how to resume."""
    number = signal.SIGTERM if number is None else number  # another rank got the signal
    said = f"stopped by {signal.Signals(number).name}; {checkpoint} is whole. To go on:\n{resuming_command()}"
    return Interrupted(said if PartialState().is_main_process else "", number)


def resuming_command() -> str:
    """Returns this process's command, changed to resume from the last checkpoint, without secrets."""
    kept: list[str] = []
    stays = True  # whether to keep a flag and its values
    for token in sys.argv[1:]:
        if token.startswith("--"):
            stays = token.partition("=")[0][2:].replace("-", "_") not in _OF_THE_START
        if stays:
            kept.append(token)
    launcher = ["accelerate", "launch", "-q"] if PartialState().num_processes > 1 else ["python"]
    return shlex.join([*launcher, sys.argv[0], *redacted(kept), "--resume_from_checkpoint", "latest"])


class Finished(Exception):
    """The resumed checkpoint is the last one of its run: its weights are loaded and no training is left."""


class Checkpoints(TrainerCallback):
    """Writes each manifest before older checkpoints are deleted; saves the result before other callbacks report."""

    def __init__(self, trainer: Trainer, directory: RunDirectory, stop: Stop) -> None:
        self.trainer, self.directory, self.stop = trainer, directory, stop
        self.limit = trainer.args.save_total_limit
        trainer.args.save_total_limit = None  # `RunDirectory.finish` deletes them
        self.stopping = False
        self.first = FirstStep(
            "training cannot begin with these flags" if directory.checkpoint is None else unfit(directory.checkpoint)
        )

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps:  # a Trainer would do one more step
            raise Finished
        self.directory.check_space(kwargs["model"], kwargs["optimizer"])

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.first.begins()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.first.made()
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
    """Context manager for `trainer.train()` that adds `Checkpoints`. Resuming a finished run trains nothing.

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
            with keeper.first, under_any_name(trainer):
                yield
        except (OSError, RuntimeError, SafetensorError) as error:
            if not is_of_the_disk(error):
                raise
            directory.drop_unfinished()
            reason = one_line(f"{type(error).__name__}: {error}", 300)
            raise directory.not_written("a checkpoint or the result", reason) from error
    if keeper.stopping:
        raise stopped(stop.signal, directory.last_complete())


def load_finished(trainer: Trainer) -> None:
    """Load the best weights if requested and save the model, as `trainer.train()` does at its end. For `Finished`."""
    if trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint is not None:
        trainer._load_best_model()
    trainer.save_model()


@contextmanager
def under_any_name(trainer: Trainer) -> Iterator[None]:
    """Context manager: if names differ, `trainer` loads its checkpoints as `from_pretrained` does."""
    own, own_best = trainer._load_from_checkpoint, trainer._load_best_model

    def load(checkpoint: str, model: Any = None) -> None:
        if not _load_converted(trainer, checkpoint):
            own(checkpoint, model)

    def load_best() -> None:
        best = trainer.state.best_model_checkpoint
        if best is None or not _load_converted(trainer, best):
            own_best()

    with patch.object(trainer, "_load_from_checkpoint", load), patch.object(trainer, "_load_best_model", load_best):
        yield


def _load_converted(trainer: Trainer, checkpoint: str) -> bool:
    """Loads full weights that are saved under names that the model does not have; returns whether they are."""
    from transformers import PreTrainedModel

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
        torch.save(state, target / _STATE)
        directory.finish(step, limit)

    try:
        # One with this name exists only after resuming from an older one.
        written(accelerator, directory, target.name, lambda: shutil.rmtree(target, ignore_errors=True), main_only=True)
        written(accelerator, directory, target.name, lambda: accelerator.save_state(str(target)))
        written(accelerator, directory, target.name, finish, main_only=True)
    except WorkFailed:
        if accelerator.is_main_process:
            directory.drop_unfinished()
        raise


def load_checkpoint(accelerator: Accelerator, checkpoint: str, identity: dict[str, Any]) -> dict[str, Any]:
    """Restore what `accelerator` prepared and the RNG states; returns the `state` of `save_checkpoint`, on the CPU.

    Raises:
        UserError: its `identity` differs, or another program wrote it.
    """
    with library_reads(unfit(checkpoint)):
        state: dict[str, Any] = torch.load(Path(checkpoint) / _STATE, map_location="cpu", weights_only=True)
        for name, ours in identity.items():
            theirs = state["identity"].get(name)
            if theirs != ours:
                raise UserError(
                    f"--resume_from_checkpoint {checkpoint} was written with {name} {theirs}, this run has {ours}; "
                    "resume with the flags that it was written with"
                )
        accelerator.load_state(checkpoint)
    return state


def written(
    accelerator: Accelerator, directory: RunDirectory, what: str, write: Callable[[], object], main_only: bool = False
) -> None:
    """Run `write` on every rank, or on the main one; if it fails on one rank, fail on all, so that none waits forever.

    Raises:
        WorkFailed: `what` could not be written (see `RunDirectory.not_written`).
    """
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
