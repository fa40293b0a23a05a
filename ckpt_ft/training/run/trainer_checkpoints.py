"""Makes a Trainer's checkpoints reliable: adds manifests, checks the output directory and defers stop signals.

    with keep_checkpoints(trainer, directory):
        trainer.train(resume_from_checkpoint=directory.checkpoint)

loop_checkpoints.py does the same for the loop of the diffusion recipe.

transformers saves many models (Qwen-VL, LLaVA, mixtures of experts) under the names of their published checkpoints,
and converts these in `from_pretrained` only. A Trainer that resumes, or loads the best checkpoint at the end, does not
convert them: it logs a warning and keeps its current weights. `under_any_name` loads them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from safetensors import SafetensorError, safe_open
from transformers import TrainerCallback
from transformers.trainer_utils import rotate_checkpoints

from ckpt_ft.errors import one_line
from ckpt_ft.validation import FirstStep, is_of_the_disk

from .checkpoints import checkpoints, read_manifest, unfit, write_manifest
from .directory import RunDirectory
from .stop import Stop, stopped

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments


class Finished(Exception):
    """The resumed checkpoint is the last one of its run: its weights are loaded and no training is left."""


class Checkpoints(TrainerCallback):
    """Writes each manifest before older checkpoints are deleted; saves the result before other callbacks report."""

    def __init__(self, trainer: Trainer, directory: RunDirectory, stop: Stop) -> None:
        self.trainer, self.directory, self.stop = trainer, directory, stop
        self.limit = trainer.args.save_total_limit
        trainer.args.save_total_limit = None  # a Trainer deletes older ones before the new one has a manifest
        self.stopping = False
        self.first = FirstStep(
            "training cannot begin with these flags" if directory.checkpoint is None else unfit(directory.checkpoint)
        )

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step >= state.max_steps:  # a Trainer would do one more step
            raise Finished
        self.directory.check_space(kwargs["model"], kwargs["optimizer"])

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.first.begins()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.first.made()
        if self.stop.agreed() and state.global_step < state.max_steps:
            self.stopping = control.should_save = control.should_training_stop = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.trainer.accelerator.wait_for_everyone()  # each rank writes its RNG state
        if state.is_world_process_zero:
            write_manifest(self.directory.path / f"checkpoint-{state.global_step}", self.directory.run)
            rotate_checkpoints(str(self.directory.path), self.limit, state.best_model_checkpoint)
        self.trainer.accelerator.wait_for_everyone()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
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
            _drop_torn(directory)
            reason = one_line(f"{type(error).__name__}: {error}", 300)
            raise directory.not_written("a checkpoint or the result", reason) from error
    if keeper.stopping:
        raise stopped(stop.signal, directory.last_complete())


def load_finished(trainer: Trainer) -> None:
    """Load the best weights if requested and save the model, as `trainer.train()` does at its end. For `Finished`."""
    if trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint is not None:
        trainer._load_best_model()
    trainer.save_model()


def _drop_torn(directory: RunDirectory) -> None:
    """Delete the newest checkpoint if it is incomplete, to free disk space."""
    for path in checkpoints(directory.path)[-1:]:
        if read_manifest(path) is None:
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def under_any_name(trainer: Trainer) -> Iterator[None]:
    """Context manager: if names differ, `trainer` loads its checkpoints as `from_pretrained` does."""
    own, own_best = trainer._load_from_checkpoint, trainer._load_best_model

    def load(checkpoint: str, model: Any = None) -> None:
        if _are_converted(trainer, checkpoint):
            _load(trainer.model, checkpoint)
        else:
            own(checkpoint, model)

    def load_best() -> None:
        best = trainer.state.best_model_checkpoint
        if best is not None and _are_converted(trainer, best):
            _load(trainer.model, best)
        else:
            own_best()

    with patch.object(trainer, "_load_from_checkpoint", load), patch.object(trainer, "_load_best_model", load_best):
        yield


def _are_converted(trainer: Trainer, checkpoint: str) -> bool:
    """Whether the checkpoint holds full weights under names that the model does not have."""
    from transformers import PreTrainedModel

    model: Any = trainer.model
    if not isinstance(model, PreTrainedModel) or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return False
    names: set[str] = set()
    for file in Path(checkpoint).glob("model*.safetensors"):
        with safe_open(file, "pt") as weights:
            names |= set(weights.keys())
    return not names <= model.state_dict().keys()


def _load(model: Any, checkpoint: str) -> None:
    read, info = type(model).from_pretrained(checkpoint, dtype=model.dtype, output_loading_info=True)
    if info["missing_keys"]:
        raise ValueError(f"it has no {', '.join(sorted(info['missing_keys'])[:3])}")
    model.load_state_dict(read.state_dict())
