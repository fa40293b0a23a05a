"""Fine-tune the U-Net of a Stable Diffusion 1.x, 2.x or XL pipeline, whole or by LoRA, under a checkpointing policy.

    accelerate launch -q recipes/diffusion_unet.py
        a tiny pipeline on drawn shapes, offline, on a CPU; what it learned is in out/diffusion_unet/samples.png

    accelerate launch -q recipes/diffusion_unet.py --config recipes/diffusion/sdxl_lora_24gb.yaml --train_data_dir DIR
        a real one on a folder of images with metadata.jsonl; what is on the command line wins over the file

Flags: DiffusionModelArguments, ImageArguments, LoopArguments (named as in diffusers' scripts) and ACArguments.
"""

from __future__ import annotations

from ckpt_ft.training.arguments import ACArguments
from ckpt_ft.training.diffusion.arguments import DiffusionModelArguments, LoopArguments
from ckpt_ft.training.images.captioned import ImageArguments
from ckpt_ft.training.run.help import CONFIG, answer_help

if __name__ == "__main__":  # before the libraries are imported, which takes seconds
    answer_help(
        __doc__,
        {
            "model": DiffusionModelArguments,
            "data": ImageArguments,
            "memory": ACArguments,
            "training": LoopArguments,
            "run": CONFIG,
        },
    )

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from accelerate.utils.memory import clear_device_cache
from tqdm.auto import tqdm

from ckpt_ft.errors import run
from ckpt_ft.reading import library_reads
from ckpt_ft.training.diffusion.data import endless_batches, load_samples
from ckpt_ft.training.diffusion.encoders import (
    Encoders,
    frozen_dtype,
    load_scheduler,
    load_unet,
    own_side,
    unet_config,
)
from ckpt_ft.training.diffusion.latents import CachedLatents, FramedImages, Row
from ckpt_ft.training.diffusion.noise import NoisyBatches
from ckpt_ft.training.diffusion.state import TrainingState
from ckpt_ft.training.diffusion.tiny_pipeline import tiny_pipeline_dir
from ckpt_ft.training.diffusion.unet import prepare_unet, save_result
from ckpt_ft.training.diffusion.unet_workload import fit_unet, unet_workload
from ckpt_ft.training.diffusion.validation import Validation
from ckpt_ft.training.fit import Fitted
from ckpt_ft.training.loop_memory import LoopMemory
from ckpt_ft.training.oom import advise_on_oom
from ckpt_ft.training.replan import Attempt, run_within
from ckpt_ft.training.reporting import never_fatal
from ckpt_ft.training.run.directory import RunDirectory
from ckpt_ft.training.run.first_step import FirstStep
from ckpt_ft.training.run.loop_checkpoints import clear_when_disk_is_full, written
from ckpt_ft.training.run.loss_log import LossLog
from ckpt_ft.training.run.parser import parse_args
from ckpt_ft.training.run.stop import Stop, stopped
from ckpt_ft.workloads.workload import Batch, optimizer_step

# What runs when no pipeline is named.
BUILT_IN = {
    "train_batch_size": 16,
    "max_train_steps": 800,
    "learning_rate": 1.5e-3,
    "lr_scheduler": "cosine",
    "lr_warmup_steps": 50,
    "proportion_empty_prompts": 0.1,
    "use_ema": True,
    "validation_steps": 400,
    "validation_inference_steps": 20,
    "validation_guidance_scale": 3.0,
    "validation_prompt": [
        "a large red circle at the top left on white",
        "a large orange square at the top on black",
        "a large yellow triangle at the top right on white",
        "a large green star at the left on black",
        "a large cyan cross at the centre on white",
        "a large blue ring at the right on black",
        "a large purple diamond at the bottom left on white",
        "a large pink heart at the bottom on black",
    ],
}


class Data(NamedTuple):
    """What the U-Net learns from: rows, what makes micro-batches of them, prompts that show what it has learned."""

    samples: FramedImages | CachedLatents
    noisy: NoisyBatches
    validation: Validation
    latent_side: int


def main(argv: Sequence[str] | None = None) -> None:
    model_args, image_args, args, ac_args = parse_args(
        (DiffusionModelArguments, ImageArguments, LoopArguments, ACArguments),
        argv,
        builtin=BUILT_IN,
        unless="pretrained_model_name_or_path",
        description=__doc__,
    )
    directory = RunDirectory.of(args, lora=model_args.rank is not None)
    run_within(lambda attempt: train(model_args, image_args, directory, attempt), args, ac_args, directory)


@clear_when_disk_is_full()
def train(
    model_args: DiffusionModelArguments, image_args: ImageArguments, directory: RunDirectory, attempt: Attempt
) -> None:
    """One run, from the checkpoint of `attempt` on."""
    accelerator = start(attempt.args, directory)
    if model_args.pretrained_model_name_or_path is None:
        with accelerator.main_process_first():
            model_args = replace(model_args, pretrained_model_name_or_path=tiny_pipeline_dir())

    # 1. Images and captions: encoded once, after which VAE and text encoders leave the device
    data = load_data(model_args, image_args, attempt.args, accelerator)
    clear_device_cache(garbage_collection=True)

    # 2. The U-Net, under the policy; what --ac_policy auto and --find_max_batch_size leave open is settled first
    unet = load_unet(model_args)
    dtype = frozen_dtype(accelerator)
    parameters = prepare_unet(unet, model_args, dtype)
    unet.to(accelerator.device)
    workload = unet_workload(unet, attempt.args, accelerator, data.noisy.scheduler, data.latent_side, dtype)
    fitted = fit_unet(workload, accelerator, attempt)
    args = fitted.args
    memory = LoopMemory(fitted, accelerator)
    memory.apply(unet)

    # 3. Optimizer, schedule, moving average: what changes from step to step, from the checkpoint on
    state = TrainingState(unet, parameters, len(data.samples), model_args, args, accelerator)
    set_seed(args.seed, device_specific=True)  # each rank draws noise of its own; checkpoints hold what it has drawn
    if attempt.checkpoint is not None:
        state.load(attempt.checkpoint)
    if args.report_to != "none":
        flags = vars(model_args) | vars(image_args) | vars(args) | vars(fitted.settings) | {"policy": memory.policy}
        accelerator.init_trackers(args.tracker_project_name, {name: str(value) for name, value in flags.items()})
    directory.check_space(state.trained, state.optimizer)
    directory.clear()

    # 4. The loop
    if state.step == 0:
        draw(data.validation, state)
    batches = endless_batches(data.samples, args, image_args.dataloader_num_workers, accelerator, state.samples_seen)
    signal = run_steps(state, batches, data, fitted, memory, directory)

    # 5. What is left behind: adapters or a pipeline, the sheet of samples, the memory report
    if state.done:
        with state.averaged():
            written(
                accelerator, directory.path, "the result",
                lambda: save_result(state.trained, data.validation.vae, model_args, args.output_dir), main_only=True,
            )  # fmt: skip
        draw(data.validation, state)
        if data.validation.prompts and accelerator.is_main_process:
            with never_fatal("drawing samples.png"):
                data.validation.write_sheet(Path(args.output_dir, "samples.png"))
    state.unwrap()
    memory.report(
        args.output_dir,
        workload=replace(fitted.workload, make_batch=lambda samples, length: dict(data.noisy.last)),
        model=model_args.pretrained_model_name_or_path, train_batch_size=args.train_batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps, resolution=data.validation.size,
        rank=model_args.rank,
    )  # fmt: skip
    accelerator.end_training()
    if not state.done:
        raise stopped(signal, directory.last_complete())


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


def load_data(
    model_args: DiffusionModelArguments, image_args: ImageArguments, args: LoopArguments, accelerator: Accelerator
) -> Data:
    """The images as the pipeline's U-Net is shown them; of what is frozen only what is still needed is kept."""
    config = unet_config(model_args)  # what it is, before any weights are read
    sdxl = config["addition_embed_type"] == "text_time"
    frozen = Encoders(model_args, sdxl, accelerator.device, frozen_dtype(accelerator))
    resolution = image_args.resolution or own_side(config) * frozen.vae_scale_factor
    return Data(
        load_samples(frozen, resolution, image_args, args, accelerator),
        NoisyBatches(frozen, load_scheduler(model_args), image_args, args),
        Validation(model_args, args, frozen, resolution, Path(args.output_dir, "samples")),
        resolution // frozen.vae_scale_factor,
    )


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
    losses = LossLog(accelerator, args.output_dir, state.step)
    compute_loss = losses.noting(fitted.workload.compute_loss)
    progress = tqdm(total=state.total_steps, initial=state.step, disable=not accelerator.is_main_process, desc="steps")
    stopping = False
    with (
        progress,
        Stop() as stop,
        FirstStep("training cannot begin with these flags") as first,
        advise_on_oom(memory, "--train_batch_size"),
        memory.measure(state.unet, state.optimizer, state.total_steps - state.step, args.output_dir),
    ):
        while not (state.done or stopping):
            first.begins()
            micro_batches: Iterable[Batch] = map(data.noisy, islice(batches, args.gradient_accumulation_steps))
            optimizer_step(
                state.unet, state.optimizer, micro_batches if state.step else checked(micro_batches, memory),
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


def checked(micro_batches: Iterable[Batch], memory: LoopMemory) -> Iterator[Batch]:
    """`micro_batches`; with --ac_check a step on each is first compared with and without the policy."""
    for batch in micro_batches:
        memory.check(batch["inputs"])
        yield batch


def draw(validation: Validation, state: TrainingState) -> None:
    """The prompts as the U-Net draws them now, averaged where an average is kept; the other ranks wait."""
    if not validation.prompts:
        return
    if state.accelerator.is_main_process:
        with never_fatal("validation"), state.averaged():
            validation.run(state.trained, state.accelerator, state.step)
    state.accelerator.wait_for_everyone()


if __name__ == "__main__":
    run(main)
