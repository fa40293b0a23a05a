"""What every Trainer recipe does beside its own code: start, train, evaluate, and the model card."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from transformers import Trainer, TrainingArguments, set_seed

from ckpt_ft.errors import UserError, WorkFailed, never_fatal, one_line
from ckpt_ft.redact import redacted_text
from ckpt_ft.training.arguments import ACArguments
from ckpt_ft.training.callback import ACCallback
from ckpt_ft.training.checkpoints import RunDirectory, keep_checkpoints
from ckpt_ft.training.fit import parallelism_of
from ckpt_ft.training.flags import SplitArguments
from ckpt_ft.training.models import ModelArguments
from ckpt_ft.training.session import advise_on_oom

Model = TypeVar("Model", bound=ModelArguments)
Data = TypeVar("Data", bound=SplitArguments)


def start(
    args: Any, settings: ACArguments, *, packing: bool = False, metrics: Sequence[str] = ("loss",)
) -> RunDirectory:
    """Checks flags against each other, opens the output directory and sets the seed.

    Args:
        packing: whether rows are packed; attention with a KV cache ignores their positions.
        metrics: what an evaluation gives.

    Raises:
        UserError: flags contradict each other, or the output directory cannot be used.
    """
    args.swaps = settings.policy is not None and bool(settings.policy.swap)
    check_best_metric(args, metrics)
    if packing and parallelism_of(args).cp_size > 1:
        raise UserError(
            "--packing under context parallelism, which drops masks: rows would see one another; add --packing false"
        )
    if packing and args.use_cache:
        raise UserError(
            "--packing with --use_cache: with a KV cache packed rows see one another; leave one of them out"
        )
    directory = RunDirectory(args.output_dir, args.resume_from_checkpoint, args.overwrite_output_dir)
    directory.open()
    set_seed(args.seed)
    return directory


def with_sample(
    model_args: Model, data_args: Data, args: TrainingArguments, make: Callable[[], tuple[str, str]]
) -> tuple[Model, Data]:
    """Returns the flags with the built-in model and dataset in them if no model is given.

    make: makes both on first use, and returns where they are. One process calls it before the others.
    """
    if model_args.model_name_or_path is not None:
        return model_args, data_args
    with args.main_process_first(desc="making the built-in sample"):
        model, dataset = make()
    return (
        replace(model_args, model_name_or_path=model),
        replace(data_args, dataset_name=data_args.dataset_name or dataset),
    )


def check_best_metric(args: TrainingArguments, metrics: Sequence[str]) -> None:
    """Raises UserError if an evaluation does not return `--metric_for_best_model`; a Trainer only fails after it."""
    name = args.metric_for_best_model
    if name is not None and name.removeprefix("eval_") not in metrics:
        raise UserError(f"--metric_for_best_model {name}: an evaluation gives {', '.join(metrics)}; name one of them")


def train(trainer: Trainer, memory: ACCallback, directory: RunDirectory) -> None:
    """Trains from `directory.checkpoint`, and saves the weights or adapters, the trainer's state and its metrics.

    Raises:
        Interrupted: SIGINT or SIGTERM was received; the last step has a checkpoint.
        UserError: the checkpoint does not match, or the first step fails with these flags and data.
        WorkFailed: memory ran out, or a file could not be written.
    """
    metrics: dict[str, float] = {}
    with advise_on_oom(memory.session), keep_checkpoints(trainer, directory):
        metrics = trainer.train(resume_from_checkpoint=directory.checkpoint).metrics
    trainer.save_state()
    if metrics:
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)


def evaluate(trainer: Trainer) -> None:
    if trainer.eval_dataset is not None:
        results = trainer.evaluate()
        trainer.log_metrics("eval", results)
        trainer.save_metrics("eval", results)


def write_model_card(trainer: Trainer) -> None:
    """Writes Trainer's own `README.md` into the output directory; with `push_to_hub`, uploads the directory.

    The reports lie beside the card. If the card cannot be written, a warning is logged.

    Raises:
        WorkFailed: the upload failed; the weights are in the output directory.
    """
    if not trainer.args.push_to_hub:
        with never_fatal("writing the model card"):
            trainer.create_model_card()
        return
    try:
        trainer.push_to_hub()
    except Exception as error:  # network, Hub or repository errors
        out, why = trainer.args.output_dir, redacted_text(one_line(f"{type(error).__name__}: {error}", 300))
        raise WorkFailed(
            f"--push_to_hub: the upload failed ({why}); all that was "
            f"trained is in {out}: `hf upload {trainer.hub_model_id} {out}` sends it"
        ) from error
