"""Fine-tune the U-Net of a Stable Diffusion 1.x, 2.x or XL pipeline, whole or by LoRA, under a checkpointing policy.

    accelerate launch recipes/diffusion_unet.py
        a tiny pipeline on drawn shapes, offline, on a CPU; what it learned is in out/diffusion_unet/samples.png

    accelerate launch recipes/diffusion_unet.py --config recipes/diffusion/sdxl_lora_24gb.yaml --train_data_dir IMAGES
        a real one on a folder of images with metadata.jsonl; what is on the command line wins over the file

Flags: DiffusionModelArguments, ImageArguments, LoopArguments (named as in diffusers' scripts) and ACArguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from accelerate.utils.memory import clear_device_cache
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from ckpt_ft.errors import run
from ckpt_ft.files import cache_root
from ckpt_ft.training.arguments import ACArguments
from ckpt_ft.training.diffusion.arguments import DiffusionModelArguments, LoopArguments
from ckpt_ft.training.diffusion.encoders import Encoders, load_scheduler, load_unet, unet_config
from ckpt_ft.training.diffusion.latents import CachedLatents, EndlessBatches, FramedImages, cache_latents
from ckpt_ft.training.diffusion.tiny_pipeline import tiny_pipeline_dir
from ckpt_ft.training.diffusion.unet import (
    averaged,
    drop_prompts,
    make_optimizer,
    noisy_inputs,
    prepare_unet,
    save_only_what_is_trained,
    save_result,
)
from ckpt_ft.training.diffusion.unet_workload import fit_unet, unet_workload
from ckpt_ft.training.diffusion.validation import Validation
from ckpt_ft.training.fit import Attempt, run_within
from ckpt_ft.training.images.captioned import ImageArguments, load_captioned
from ckpt_ft.training.loop_memory import LoopMemory
from ckpt_ft.training.oom import advise_on_oom
from ckpt_ft.training.run.directory import RunDirectory
from ckpt_ft.training.run.loop_checkpoints import (
    clear_when_disk_is_full,
    hold_state,
    load_checkpoint,
    save_checkpoint,
    written,
)
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


def main(argv: Sequence[str] | None = None) -> None:
    model_args, image_args, args, ac_args = parse_args(
        (DiffusionModelArguments, ImageArguments, LoopArguments, ACArguments),
        argv,
        builtin=BUILT_IN,
        unless="pretrained_model_name_or_path",
        description=__doc__,
    )
    directory = RunDirectory.of(args, lora=model_args.rank is not None)
    run_within(
        lambda attempt: train(model_args, image_args, args, ac_args, directory, attempt),
        ac_args,
        directory,
    )


@clear_when_disk_is_full()
def train(
    model_args: DiffusionModelArguments,
    image_args: ImageArguments,
    args: LoopArguments,
    ac_args: ACArguments,
    directory: RunDirectory,
    attempt: Attempt,
) -> None:
    """One run, from the checkpoint of `attempt` on."""
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        mixed_precision=args.mixed_precision,
        log_with=None if args.report_to == "none" else args.report_to.split(","),
        project_config=ProjectConfiguration(args.output_dir, str(Path(args.output_dir, args.logging_dir))),
    )
    directory.open()
    torch.backends.cuda.matmul.allow_tf32 = args.allow_tf32
    set_seed(args.seed)
    frozen_dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(accelerator.mixed_precision, torch.float32)

    # 1. The pipeline: its U-Net's configuration says what it is before any weights are read
    if model_args.pretrained_model_name_or_path is None:
        with accelerator.main_process_first():
            model_args.pretrained_model_name_or_path = tiny_pipeline_dir()
    config = unet_config(model_args)
    sdxl = config["addition_embed_type"] == "text_time"
    frozen = Encoders(model_args, sdxl, accelerator.device, frozen_dtype)
    vae_config = frozen.vae.config
    resolution = image_args.resolution or config["sample_size"] * 2 ** (len(vae_config.block_out_channels) - 1)

    # 2. Images and captions: encoded once, after which VAE and text encoders leave the device
    with accelerator.main_process_first():
        rows = load_captioned(image_args, resolution)
    images = FramedImages(rows, frozen.tokenize, resolution, image_args, args.seed)
    empty_prompt = {name: value.to(accelerator.device) for name, value in frozen.encode_prompts([""]).items()}
    validation = Validation(model_args, args, frozen, resolution, Path(args.output_dir, "samples"))
    samples: FramedImages | CachedLatents = images
    encoders: Encoders | None = frozen
    if image_args.cache_latents:
        samples = cache_latents(
            images, frozen, cache_root() / "latents", args.train_batch_size,
            accelerator.process_index, accelerator.num_processes,
        )  # fmt: skip
        accelerator.wait_for_everyone()
        frozen.vae.to("cpu")  # validations bring it back
        encoders = None
    del frozen
    clear_device_cache(garbage_collection=True)

    # 3. The U-Net, under the policy
    unet = load_unet(model_args)
    parameters = prepare_unet(unet, model_args, frozen_dtype)
    unet.to(accelerator.device)
    noise_scheduler = load_scheduler(model_args)
    side = resolution // 2 ** (len(vae_config.block_out_channels) - 1)
    workload = unet_workload(unet, args, accelerator, noise_scheduler, side, frozen_dtype)
    # what --ac_policy auto and --find_max_batch_size leave open
    fitted = fit_unet(workload, args, ac_args, accelerator, attempt)
    memory = LoopMemory(ac_args, accelerator)
    memory.add_to_report = fitted.describe
    memory.apply(unet)

    # 4. Optimizer, schedule, moving average, and what of all this a checkpoint holds
    per_step = args.train_batch_size * accelerator.num_processes * args.gradient_accumulation_steps
    max_train_steps = args.max_train_steps or args.num_train_epochs * -(-len(samples) // per_step)
    optimizer = make_optimizer(parameters, args, args.learning_rate * (per_step if args.scale_lr else 1))
    lr_scheduler = get_scheduler(
        args.lr_scheduler, optimizer, num_warmup_steps=args.lr_warmup_steps, num_training_steps=max_train_steps
    )
    ema = EMAModel(parameters) if args.use_ema else None
    unet, optimizer = accelerator.prepare(unet, optimizer)
    save_only_what_is_trained(accelerator, model_args)
    hold_state(accelerator, lr_scheduler=lr_scheduler, **({} if ema is None else {"ema": ema}))
    # Each rank draws noise of its own; what of it has been drawn is in the checkpoint.
    set_seed(args.seed, device_specific=True)
    identity = {"rank": model_args.rank, "use_ema": args.use_ema, "processes": accelerator.num_processes}
    step, samples_seen = 0, 0
    if attempt.checkpoint is not None:
        step, samples_seen = load_checkpoint(accelerator, attempt.checkpoint, identity)
    if ema is not None:
        ema.to(accelerator.device)

    # 5. Batches, endless, from where the checkpoint stopped; not `prepare`d, because they are already this rank's
    order = EndlessBatches(
        len(samples), args.train_batch_size, args.seed, accelerator.process_index, accelerator.num_processes,
        start=samples_seen // (args.train_batch_size * accelerator.num_processes),
    )  # fmt: skip
    loader = DataLoader(
        samples,
        batch_sampler=order,
        num_workers=image_args.dataloader_num_workers,
        pin_memory=accelerator.device.type == "cuda",
        generator=torch.Generator(),  # a loader draws a seed when it starts: not from the RNG that draws the noise
    )
    if args.report_to != "none":
        settings = vars(model_args) | vars(image_args) | vars(args) | vars(ac_args)
        accelerator.init_trackers(args.tracker_project_name, {name: str(value) for name, value in settings.items()})
    directory.check_space(accelerator.unwrap_model(unet), optimizer)
    directory.clear()
    losses = LossLog(accelerator, args.output_dir, step)
    if validation.prompts and step == 0 and accelerator.is_main_process:
        validation.run(accelerator.unwrap_model(unet), accelerator, step)

    # 6. The loop
    def noisy(batch: dict[str, torch.Tensor]) -> Batch:
        """A micro-batch for the U-Net: encoded, if it was not before, and with noise."""
        if encoders is None:
            encoded = {name: value.to(accelerator.device) for name, value in batch.items()}
        else:
            encoded = encoders.encode(batch)
        drop_prompts(encoded, empty_prompt, image_args.proportion_empty_prompts)
        latents = DiagonalGaussianDistribution(encoded["moments"]).sample() * vae_config.scaling_factor
        inputs, target = noisy_inputs(latents, encoded, noise_scheduler, args.noise_offset)
        if samples_seen == 0:
            memory.check(inputs)
        last.update(inputs=inputs, target=target)
        return dict(last)

    def noted_loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        loss = workload.compute_loss(model, batch)
        losses.add(loss)
        return loss

    last: Batch = {}  # for the prediction beside what was measured
    progress = tqdm(total=max_train_steps, initial=step, disable=not accelerator.is_main_process, desc="steps")
    batches = iter(loader)
    stopping = False
    with (
        Stop() as stop,
        advise_on_oom(memory, "--train_batch_size"),
        memory.measure(unet, optimizer, max_train_steps - step, args.output_dir),
    ):
        while step < max_train_steps and not stopping:
            micro_batches = map(noisy, islice(batches, args.gradient_accumulation_steps))
            optimizer_step(
                unet, optimizer, micro_batches, noted_loss,
                max_grad_norm=args.max_grad_norm, parameters=parameters, engine=accelerator,
            )  # fmt: skip
            memory.step()
            step, samples_seen = step + 1, samples_seen + per_step
            progress.update()
            progress.set_postfix(loss=f"{losses.step(step, lr_scheduler.get_last_lr()[0]):.4f}")
            lr_scheduler.step()
            if ema is not None:
                ema.step(parameters)
            stopping = stop.agreed() and step < max_train_steps  # Ctrl-C, or SIGTERM from a scheduler
            if step % args.checkpointing_steps == 0 or stopping:
                save_checkpoint(accelerator, directory, step, samples_seen, identity, args.checkpoints_total_limit)
            if validation.prompts and (step % args.validation_steps == 0 or step == max_train_steps):
                if accelerator.is_main_process:
                    with averaged(ema, parameters):
                        validation.run(accelerator.unwrap_model(unet), accelerator, step)
                accelerator.wait_for_everyone()
            if step < max_train_steps:
                memory.begin_step()  # what was between is not part of a step
    progress.close()

    # 7. What is left behind: adapters or a pipeline, the sheet of samples, the memory report
    trained = accelerator.unwrap_model(unet)
    if not stopping:
        with averaged(ema, parameters):
            written(
                accelerator, directory.path, "the result",
                lambda: save_result(trained, validation.vae, model_args, args.output_dir), main_only=True,
            )  # fmt: skip
        if validation.prompts and accelerator.is_main_process:
            validation.write_sheet(Path(args.output_dir, "samples.png"))
    # DDP's wrapper goes before the process group. Were it to hold the group's last reference, torch would join gloo's
    # thread with the GIL held, and that thread may be waiting for the GIL to free its last tensors: neither ends.
    del unet
    accelerator.free_memory()

    memory.report(
        args.output_dir,
        workload=replace(workload, model=trained, make_batch=lambda samples, length: dict(last)),
        model=model_args.pretrained_model_name_or_path, train_batch_size=args.train_batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps, resolution=resolution, rank=model_args.rank,
    )  # fmt: skip
    accelerator.end_training()
    if stopping:
        raise stopped(stop.signal, directory.last_complete())


if __name__ == "__main__":
    run(main)
