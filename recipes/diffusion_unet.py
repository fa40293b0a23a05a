"""Fine-tune the U-Net of a Stable Diffusion 1.x, 2.x or XL pipeline, whole or by LoRA, under a checkpointing policy.

    accelerate launch -q recipes/diffusion_unet.py
        a tiny pipeline on drawn shapes, offline, on a CPU; what it learned is in out/diffusion_unet/samples.png

    accelerate launch -q recipes/diffusion_unet.py --config recipes/diffusion/sdxl_lora_24gb.yaml --train_data_dir DIR
        a real one on a folder of images with metadata.jsonl; what is on the command line wins over the file

Flags: DiffusionModelArguments, ImageArguments, LoopArguments (named as in diffusers' scripts) and ACArguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from accelerate.utils.memory import clear_device_cache

from ckpt_ft.errors import run
from ckpt_ft.training.arguments import ACArguments
from ckpt_ft.training.diffusion.arguments import DiffusionModelArguments, LoopArguments
from ckpt_ft.training.diffusion.denoiser import prepare
from ckpt_ft.training.diffusion.encoders import load_denoiser
from ckpt_ft.training.diffusion.loop import TrainingState, leave_behind, resume, run_steps, start
from ckpt_ft.training.diffusion.workload import fit_loop, load_unet_data, unet_workload
from ckpt_ft.training.images.captioned import ImageArguments
from ckpt_ft.training.replan import Attempt, run_with_replanning
from ckpt_ft.training.run.arguments import parse_args
from ckpt_ft.training.run.checkpoints import RunDirectory
from ckpt_ft.training.run.saving import explained_full_disk
from ckpt_ft.training.samples.drawings import LEARNED_PROMPTS
from ckpt_ft.training.samples.pipelines import tiny_pipeline_dir
from ckpt_ft.training.session import Session

# The defaults if no pipeline is given.
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
    "validation_prompt": LEARNED_PROMPTS,
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
    run_with_replanning(lambda attempt: train(model_args, image_args, directory, attempt), args, ac_args, directory)


@explained_full_disk()
def train(
    model_args: DiffusionModelArguments, image_args: ImageArguments, directory: RunDirectory, attempt: Attempt
) -> None:
    """Trains from the checkpoint of `attempt` on."""
    accelerator = start(attempt.args, directory)
    if model_args.pretrained_model_name_or_path is None:
        with accelerator.main_process_first():
            model_args = replace(model_args, pretrained_model_name_or_path=tiny_pipeline_dir())

    # 1. Encode images and captions once; then the VAE and the text encoders leave the device.
    data = load_unet_data(model_args, image_args, attempt.args, accelerator)
    clear_device_cache(garbage_collection=True)

    # 2. Load the U-Net and apply the policy, after resolving --ac_policy auto and --find_max_batch_size
    unet = prepare(load_denoiser(model_args, data.dtype), model_args, data.dtype)
    unet.to(accelerator.device)
    workload = unet_workload(unet, attempt.args, accelerator, data, model_args.snr_gamma)
    fitted = fit_loop(workload, accelerator, attempt)
    memory = Session(fitted, accelerator)
    memory.apply(unet)

    # 3. Create or resume the optimizer, schedule and moving average
    state = TrainingState(unet, len(data.samples), data.part, model_args, fitted.args, accelerator)
    resume(state, attempt, fitted, memory, directory, model_args, image_args)

    # 4. Run the loop; save adapters or a pipeline, a sheet of samples, and the memory report
    signal = run_steps(state, data, fitted, memory, directory)
    leave_behind(state, data, fitted, memory, directory, signal)


if __name__ == "__main__":
    run(main)
