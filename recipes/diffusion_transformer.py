"""Fine-tune the transformer of a FLUX, Stable Diffusion 3, Qwen-Image or Sana pipeline, whole, by LoRA or QLoRA.

    accelerate launch -q recipes/diffusion_transformer.py
        a tiny FLUX on drawn shapes, offline, on a CPU; what it learned is in out/diffusion_transformer/samples.png

    accelerate launch -q recipes/diffusion_transformer.py --config recipes/diffusion_transformer/flux_lora_24gb.yaml
        a real one; --train_data_dir DIR trains it on a folder of images with captions, and what is on the command line
        wins over the file

Flags: TransformerArguments, ImageArguments, TransformerLoopArguments (named as in diffusers' scripts) and
ACArguments.
"""

from __future__ import annotations

from ckpt_ft.training.arguments import ACArguments
from ckpt_ft.training.diffusion.arguments import TransformerArguments, TransformerLoopArguments
from ckpt_ft.training.images.captioned import ImageArguments
from ckpt_ft.training.run.help import CONFIG, answer_help

if __name__ == "__main__":  # before the libraries are imported, which takes seconds
    answer_help(
        __doc__,
        {
            "model": TransformerArguments,
            "data": ImageArguments,
            "memory": ACArguments,
            "training": TransformerLoopArguments,
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
from ckpt_ft.training.diffusion.flow import FlowMatching
from ckpt_ft.training.diffusion.latent_shapes import LatentShapes
from ckpt_ft.training.diffusion.loop import leave_behind, resume, run_steps, start
from ckpt_ft.training.diffusion.loop_workload import fit_loop, flow_workload
from ckpt_ft.training.diffusion.noise import NoisyBatches
from ckpt_ft.training.diffusion.parts import frozen_dtype
from ckpt_ft.training.diffusion.sampling import Sampler
from ckpt_ft.training.diffusion.state import TrainingState
from ckpt_ft.training.diffusion.trained import prepare
from ckpt_ft.training.diffusion.transformer_encoders import (
    TransformerEncoders,
    checked_resolution,
    family_of,
    load_times,
    load_transformer,
    transformer_config,
)
from ckpt_ft.training.diffusion.validation import Validation
from ckpt_ft.training.loop_memory import LoopMemory
from ckpt_ft.training.replan import Attempt, run_within
from ckpt_ft.training.run.directory import RunDirectory
from ckpt_ft.training.run.loop_checkpoints import explained_full_disk
from ckpt_ft.training.run.parser import parse_args
from ckpt_ft.training.samples.pipelines import tiny_transformer_dir

# What runs when no pipeline is named.
BUILT_IN = {
    "resolution": 32,
    "max_sequence_length": 12,
    "weighting_scheme": "logit_normal",
    "train_batch_size": 16,
    "max_train_steps": 1800,
    "learning_rate": 1.5e-3,
    "lr_scheduler": "cosine",
    "lr_warmup_steps": 50,
    "proportion_empty_prompts": 0.1,
    "use_ema": True,
    "validation_steps": 600,
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
        (TransformerArguments, ImageArguments, TransformerLoopArguments, ACArguments),
        argv,
        builtin=BUILT_IN,
        unless="pretrained_model_name_or_path",
        description=__doc__,
    )
    directory = RunDirectory.of(args, lora=model_args.adapts)
    run_within(lambda attempt: train(model_args, image_args, directory, attempt), args, ac_args, directory)


@explained_full_disk()
def train(
    model_args: TransformerArguments, image_args: ImageArguments, directory: RunDirectory, attempt: Attempt
) -> None:
    """One run, from the checkpoint of `attempt` on."""
    accelerator = start(attempt.args, directory)
    if model_args.pretrained_model_name_or_path is None:
        with accelerator.main_process_first():
            model_args = replace(model_args, pretrained_model_name_or_path=tiny_transformer_dir())

    # 1. Images and captions: encoded once, after which VAE and text encoders leave the device
    data = load_data(model_args, image_args, attempt.args, accelerator)
    clear_device_cache(garbage_collection=True)

    # 2. The transformer, under the policy; what --ac_policy auto and --find_max_batch_size leave open is settled first
    part, dtype = data.validation.sampler.part, frozen_dtype(accelerator)
    transformer = load_transformer(model_args, part, dtype)
    transformer = prepare(transformer, model_args, dtype, model_args.lora_target_modules)
    transformer.to(accelerator.device)
    workload = flow_workload(transformer, attempt.args, accelerator, data.noisy, data.latents, image_args.prior)
    fitted = fit_loop(workload, accelerator, attempt)
    memory = LoopMemory(fitted, accelerator)
    memory.apply(transformer)

    # 3. Optimizer, schedule, moving average: what changes from step to step, from the checkpoint on
    state = TrainingState(transformer, len(data.samples), part, model_args, fitted.args, accelerator)
    resume(state, attempt, fitted, memory, directory, model_args, image_args)

    # 4. The loop
    workers = image_args.dataloader_num_workers
    batches = endless_batches(data.samples, fitted.args, workers, accelerator, state.samples_seen)
    signal = run_steps(state, batches, data, fitted, memory, directory)

    # 5. What is left behind: adapters or a pipeline, the sheet of samples, the memory report
    leave_behind(state, data, fitted, memory, directory, signal)


def load_data(
    model_args: TransformerArguments,
    image_args: ImageArguments,
    args: TransformerLoopArguments,
    accelerator: Accelerator,
) -> Data:
    """The images as the pipeline's transformer is shown them; of what is frozen only what is still needed is kept."""
    family = family_of(model_args)
    config = transformer_config(model_args, family)
    dtype = frozen_dtype(accelerator)
    frozen = TransformerEncoders(model_args, family, accelerator.device, dtype)
    resolution = checked_resolution(image_args.resolution, config, frozen)
    channels, side, _ = frozen.latent_shape(resolution)  # before the VAE leaves the device
    flow = FlowMatching(family, config, frozen.vae, load_times(model_args), model_args)
    sampler = Sampler(family.part, model_args, frozen, resolution, family.draw)
    load = partial(load_transformer, model_args, family.part, dtype)
    draw_class_images(image_args.prior, sampler, frozen, load, accelerator, args.seed)
    samples = load_samples(frozen, resolution, image_args, args, accelerator)
    return Data(
        samples,
        NoisyBatches(frozen, flow, image_args),
        Validation(sampler, args, frozen, Path(args.output_dir, "samples")),
        LatentShapes.of(samples.sizes, samples.buckets, channels, resolution // side),
    )


if __name__ == "__main__":
    run(main)
