"""The diffusion recipes' loop, from the first step to what is left behind; both scripts read as one without it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from tqdm.auto import tqdm

from ckpt_ft.reading import library_reads
from ckpt_ft.training.fit import Fitted
from ckpt_ft.training.loop_memory import LoopMemory
from ckpt_ft.training.oom import advise_on_oom
from ckpt_ft.training.peft_flag import kind_of
from ckpt_ft.training.replan import Attempt
from ckpt_ft.training.reporting import never_fatal
from ckpt_ft.training.run.directory import RunDirectory
from ckpt_ft.training.run.first_step import FirstStep
from ckpt_ft.training.run.loop_checkpoints import written
from ckpt_ft.training.run.loss_log import LossLog
from ckpt_ft.training.run.stop import Stop, stopped
from ckpt_ft.workloads.workload import Batch, optimizer_step

from .arguments import LoopArguments
from .data import Data
from .latents import Row
from .state import TrainingState
from .trained import save_result
from .validation import Validation


def start(args: LoopArguments, directory: RunDirectory) -> Accelerator:
    """Accelerate with its trackers, the output directory for this run alone, the seed."""
    with library_reads("Accelerate cannot start with these flags"):
        accelerator = Accelerator(
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            mixed_precision=args.mixed_precision,
            log_with=None if args.report_to == "none" else args.report_to.split(","),
            project_config=ProjectConfiguration(args.output_dir, str(Path(args.output_dir, args.logging_dir))),
        )
    directory.open()
    torch.backends.cuda.matmul.allow_tf32 = args.allow_tf32
    set_seed(args.seed)
    return accelerator


def resume(
    state: TrainingState, attempt: Attempt, fitted: Fitted, memory: LoopMemory, directory: RunDirectory, *asked: Any
) -> None:
    """Seeds, what `attempt` goes on from, trackers (told all flags, `asked` among them), room on the disk."""
    args, accelerator = fitted.args, state.accelerator
    set_seed(args.seed, device_specific=True)  # each rank draws noise of its own; checkpoints hold what it has drawn
    if attempt.checkpoint is not None:
        state.load(attempt.checkpoint)
    if args.report_to != "none":
        flags = {name: value for given in (*asked, args, fitted.settings) for name, value in vars(given).items()}
        flags["policy"] = memory.policy
        accelerator.init_trackers(args.tracker_project_name, {name: str(value) for name, value in flags.items()})
    directory.check_space(state.trained, state.optimizer)
    directory.clear()


def run_steps(
    state: TrainingState,
    batches: Iterator[Row],
    data: Data,
    fitted: Fitted,
    memory: LoopMemory,
    directory: RunDirectory,
) -> int | None:
    """All steps that are left, or those until a Ctrl-C or a scheduler's SIGTERM, of which the number is returned."""
    args, accelerator = fitted.args, state.accelerator
    if state.step == 0:
        draw(data.validation, state)
    losses = LossLog(accelerator, args.output_dir, state.step)
    compute_loss = losses.noting(fitted.workload.compute_loss)
    progress = tqdm(total=state.total_steps, initial=state.step, disable=not accelerator.is_main_process, desc="steps")
    stopping = False
    with (
        progress,
        Stop() as stop,
        FirstStep("training cannot begin with these flags") as first,
        advise_on_oom(memory, "--train_batch_size"),
        memory.measure(state.model, state.optimizer, state.total_steps - state.step, args.output_dir),
    ):
        while not (state.done or stopping):
            first.begins()
            made: Iterable[Batch] = map(data.noisy, islice(batches, args.gradient_accumulation_steps))
            micro_batches = noted(made, data, memory)
            optimizer_step(
                state.model, state.optimizer, micro_batches if state.step else checked(micro_batches, memory),
                compute_loss, max_grad_norm=args.max_grad_norm, parameters=state.parameters, engine=accelerator,
            )  # fmt: skip
            memory.step()
            first.made()
            progress.update()
            progress.set_postfix(loss=f"{losses.step(state.step + 1, state.learning_rate):.4f}")
            state.advance()
            stopping = stop.agreed() and not state.done
            if state.step % args.checkpointing_steps == 0 or stopping:
                state.save(directory, args.checkpoints_total_limit)
            if state.step % args.validation_steps == 0 and not state.done:
                draw(data.validation, state)
            if not state.done:
                memory.begin_step()  # what was between is not part of a step
    return stop.signal


def noted(micro_batches: Iterable[Batch], data: Data, memory: LoopMemory) -> Iterator[Batch]:
    """`micro_batches`; of images in buckets the largest of a measured step is noted, to predict it in the report."""
    for batch in micro_batches:
        if len(data.latents.shapes) > 1 and memory.profiler is not None and memory.profiler.measuring:
            data.noisy.note(batch)
        yield batch


def checked(micro_batches: Iterable[Batch], memory: LoopMemory) -> Iterator[Batch]:
    """`micro_batches`; with --ac_check a step on each is first compared with and without the policy."""
    for batch in micro_batches:
        memory.check(batch["inputs"])
        yield batch


def draw(validation: Validation, state: TrainingState) -> None:
    """The prompts as the model draws them now, averaged where an average is kept; the other ranks wait."""
    if not validation.prompts:
        return
    if state.accelerator.is_main_process:
        with never_fatal("validation"), state.averaged():
            validation.run(state.trained, state.accelerator, state.step)
    state.accelerator.wait_for_everyone()


def leave_behind(
    state: TrainingState,
    data: Data,
    fitted: Fitted,
    memory: LoopMemory,
    directory: RunDirectory,
    signal: int | None,
) -> None:
    """Adapters or a pipeline, the sheet of samples, the memory report.

    Raises:
        Interrupted: the run was stopped before its end, by `signal`.
    """
    args, accelerator, validation = fitted.args, state.accelerator, data.validation
    sampler = validation.sampler
    if state.done:
        with state.averaged():
            written(
                accelerator, directory, "the result",
                lambda: save_result(state.trained, sampler.part, sampler.vae, sampler.args, args.output_dir),
                main_only=True,
            )  # fmt: skip
        draw(validation, state)
        if validation.prompts and accelerator.is_main_process:
            with never_fatal("drawing samples.png"):
                validation.write_sheet(Path(args.output_dir, "samples.png"))
    state.unwrap()
    memory.report(
        args.output_dir,
        workload=replace(fitted.workload, lengths=None, make_batch=lambda samples, length: data.noisy.seen()),
        model=sampler.args.pretrained_model_name_or_path, train_batch_size=args.train_batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps, resolution=sampler.size,
        rank=sampler.args.rank, peft=kind_of(sampler.args.peft_config),
    )  # fmt: skip
    accelerator.end_training()
    if not state.done:
        raise stopped(signal, directory.last_complete())
