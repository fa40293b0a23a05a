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

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils.memory import clear_device_cache

from ckpt_ft.errors import run
from ckpt_ft.training.diffusion.class_images import draw_class_images
from ckpt_ft.training.diffusion.data import Data, endless_batches, load_samples
from ckpt_ft.training.diffusion.encoders import (
    Encoders,
    draw_latents,
    load_denoiser,
    load_scheduler,
    own_side,
    unet_config,
)
from ckpt_ft.training.diffusion.inpainting import MaskedImages, blank, pictures
from ckpt_ft.training.diffusion.latent_shapes import LatentShapes
from ckpt_ft.training.diffusion.latents import FramedImages
from ckpt_ft.training.diffusion.loop import leave_behind, resume, run_steps, start
from ckpt_ft.training.diffusion.loop_workload import fit_loop, unet_workload
from ckpt_ft.training.diffusion.noise import Denoising, NoisyBatches
from ckpt_ft.training.diffusion.parts import frozen_dtype
from ckpt_ft.training.diffusion.sampling import Sampler
from ckpt_ft.training.diffusion.state import TrainingState
from ckpt_ft.training.diffusion.trained import UNET, UNET_XL, prepare
from ckpt_ft.training.diffusion.validation import Validation
from ckpt_ft.training.loop_memory import LoopMemory
from ckpt_ft.training.replan import Attempt, run_within
from ckpt_ft.training.run.directory import RunDirectory
from ckpt_ft.training.run.loop_checkpoints import explained_full_disk
from ckpt_ft.training.run.parser import parse_args
from ckpt_ft.training.samples.pipelines import tiny_pipeline_dir
from ckpt_ft.workloads.pipeline_parts import inpaints

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


def main(argv: Sequence[str] | None = None) -> None:
    model_args, image_args, args, ac_args = parse_args(
        (DiffusionModelArguments, ImageArguments, LoopArguments, ACArguments),
        argv,
        builtin=BUILT_IN,
        unless="pretrained_model_name_or_path",
        description=__doc__,
    )
    directory = RunDirectory.of(args, lora=model_args.adapts)
    run_within(lambda attempt: train(model_args, image_args, directory, attempt), args, ac_args, directory)


@explained_full_disk()
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
    dtype = frozen_dtype(accelerator)
    unet = prepare(load_denoiser(model_args, dtype), model_args, dtype)
    unet.to(accelerator.device)
    asked = model_args.snr_gamma, data.latents, dtype, image_args.prior
    workload = unet_workload(unet, attempt.args, accelerator, data.noisy, *asked)
    fitted = fit_loop(workload, accelerator, attempt)
    memory = LoopMemory(fitted, accelerator)
    memory.apply(unet)

    # 3. Optimizer, schedule, moving average: what changes from step to step, from the checkpoint on
    part = data.validation.sampler.part
    state = TrainingState(unet, len(data.samples), part, model_args, fitted.args, accelerator)
    resume(state, attempt, fitted, memory, directory, model_args, image_args)

    # 4. The loop
    workers = image_args.dataloader_num_workers
    batches = endless_batches(data.samples, fitted.args, workers, accelerator, state.samples_seen)
    signal = run_steps(state, batches, data, fitted, memory, directory)

    # 5. What is left behind: adapters or a pipeline, the sheet of samples, the memory report
    leave_behind(state, data, fitted, memory, directory, signal)


def load_data(
    model_args: DiffusionModelArguments, image_args: ImageArguments, args: LoopArguments, accelerator: Accelerator
) -> Data:
    """The images as the pipeline's U-Net is shown them; of what is frozen only what is still needed is kept."""
    config = unet_config(model_args)  # what it is, before any weights are read
    sdxl = config["addition_embed_type"] == "text_time"
    dtype, rows = frozen_dtype(accelerator), FramedImages
    if inpaints(config):
        rows, image_args = MaskedImages, image_args.uncached("the masks of inpainting are drawn anew each time")
    frozen = Encoders(model_args, sdxl, accelerator.device, dtype, rows)
    resolution = image_args.resolution or own_side(config) * frozen.vae_scale_factor
    noise = Denoising(load_scheduler(model_args), frozen.vae.config.scaling_factor, model_args.noise_offset)
    channels, scale = frozen.vae.config.latent_channels, frozen.vae_scale_factor
    sampler = Sampler(UNET_XL if sdxl else UNET, model_args, frozen, resolution, draw_latents)
    load = partial(load_denoiser, model_args, dtype)
    whole = blank(resolution) if inpaints(config) else {}
    draw_class_images(image_args.prior, sampler, frozen, load, accelerator, args.seed, **whole)
    samples = load_samples(frozen, resolution, image_args, args, accelerator)
    shown = pictures(samples, args) if inpaints(config) else {}
    return Data(
        samples,
        NoisyBatches(frozen, noise, image_args),
        Validation(sampler, args, frozen, Path(args.output_dir, "samples"), **shown),
        LatentShapes.of(samples.sizes, samples.buckets, channels, scale),
    )


if __name__ == "__main__":
    run(main)
